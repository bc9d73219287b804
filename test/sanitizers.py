"""The tests of the C code under gcc's address and undefined-behaviour sanitizers, in processes whose C code
is compiled for them.

    python test/sanitizers.py [--sources rows …] [--jobs 2] [--share 4] [--turn 1] [--cases 60] [--tests
    test/backends/native/test_one_token.py …]

For some sources, or for all: random sizes of c_fuzz.py, then every nth test of the files that call them. The
first message of a sanitizer ends its process, and is printed with what the process did last. Libraries that
others have compiled (torch, oneDNN, OpenMP) are not instrumented. `make sanitize` runs it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_HERE = Path(__file__).parent
#: -O3 takes minutes to compile with them.
FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
LIBRARIES = ("libasan.so", "libubsan.so")
#: Python never frees some of its memory.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
#: C source → files whose tests call it.
TESTS = {
    "attention": ("int8_attention",),
    "depthwise": ("depthwise",),
    "dynamic_attention": ("dynamic_attention",),
    "flash": ("flash",),
    "float_attention": ("float_attention",),
    "low_bit": ("low_bit_c",),
    "low_bit_blocks": ("low_bit_blocks_c", "low_bit_engines"),
    "peak": ("hardware",),
    "recurrent": ("recurrent",),
    "rows": ("row_chain", "row_linear", "code_products"),
    "runner": ("one_token", "teams"),
    "steps": ("c_calls", "mask", "rotary", "norm", "plans"),
}
#: Of these: one compiles all of low_bit.c again, the other one runs c_fuzz.py in a process without
#: sanitizers.
_LEFT_OUT = "not with_the_instruction_of_avx512 and not some_random_sizes"
_STARTED = "NC_SANITIZED"
#: Of what a process printed before it failed.
_LINES = 60


def use() -> None:
    """Let C code be compiled for the sanitizers in this process, which is started again with their libraries
    if it has none.

    What is compiled never lies in the user's cache.

    Raises:
        RuntimeError: C code may have been loaded already.
    """
    if os.environ.pop(_STARTED, None) is None:
        with tempfile.TemporaryDirectory(prefix="nc-sanitized-") as folder:
            sys.exit(
                subprocess.run([sys.executable, *sys.argv], env=environment(folder), check=False).returncode
            )
    if "nc" in sys.modules:
        msg = "nc was imported before the sanitizers were asked for"
        raise RuntimeError(msg)
    del os.environ["LD_PRELOAD"]  # neither in the compiler, nor in processes that tests start
    from nc.kernels.c_code import build, flags

    build._compiler = lambda: "gcc"
    build._TIMEOUT_S = 1800
    flags.FLAGS = (*FLAGS, *flags.FLAGS[1:])


def environment(cache: str) -> dict[str, str]:
    """Of a process that calls `use`, with the sanitizers' libraries in front of all others, and a folder for what it compiles."""
    found = [
        subprocess.run(
            ["gcc", f"-print-file-name={n}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for n in LIBRARIES
    ]
    return {**os.environ, **OPTIONS, _STARTED: "1", "LD_PRELOAD": ":".join(found), "XDG_CACHE_HOME": cache}


def compile_sources(jobs: int, sources: list[str]) -> None:
    """Compile and load some sources, so that no later process has to."""
    from nc.kernels.c_code import build

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(build.load, sources))


def run(commands: list[list[str]], cache: str) -> None:
    """Run Python in several processes at once, and print the last line of each, or more of those that fail.

    Raises:
        SystemExit: one of them failed; says how.
    """

    def one(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            env=environment(cache),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    with ThreadPoolExecutor(len(commands)) as pool:
        done = list(pool.map(one, commands))
    for each in done:
        print("\n".join(each.stdout.splitlines()[-_LINES if each.returncode else -1 :]), flush=True)
    if any(each.returncode for each in done):
        sys.exit("The C code, or a test of it, failed under the sanitizers.")


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", nargs="*", default=list(TESTS), choices=list(TESTS), help="in C")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--share", type=int, default=1, metavar="N", help="run every Nth test")
    parser.add_argument(
        "--turn", type=int, default=0, metavar="K", help="which of the N shares, and where random sizes begin"
    )
    parser.add_argument(
        "--emulate", metavar="NAME", help="an instruction set that this CPU may lack: see isas.py"
    )
    parser.add_argument("--cases", type=int, default=60, help="random sizes of each function")
    parser.add_argument(
        "--tests",
        nargs="*",
        help="files of pytest; those that call the sources by default",
    )
    options = parser.parse_args()
    if options.tests is None:
        names = dict.fromkeys(name for source in options.sources for name in TESTS[source])
        options.tests = [str(found) for name in names for found in _HERE.rglob(f"test_{name}.py")]
    us, jobs = str(Path(__file__)), range(options.jobs)
    each = -(-options.cases // options.jobs)
    if options.emulate:
        from isas import emulation  # which loads nc

        os.environ.update(emulation(options.emulate))
    # each process runs a part of the cases, and of the tests
    fuzz = [
        [
            str(_HERE / "c_fuzz.py"),
            "--sanitize",
            "--sources",
            *options.sources,
            "--cases",
            str(each),
            "--seed",
            str((options.turn * options.jobs + job) * each),
        ]
        for job in jobs
    ]
    tests = [
        [
            us,
            "--pytest",
            "-q",
            "-s",
            "-x",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "-m",
            "not exhaustive",
            "-k",
            _LEFT_OUT,
        ]
        + [
            "--share",
            str(options.share * options.jobs),
            "--turn",
            str(options.turn % options.share + options.share * job),
            *options.tests,
        ]
        for job in jobs
    ]
    with tempfile.TemporaryDirectory(prefix="nc-sanitized-") as cache:
        run([[us, "--compile", str(options.jobs), *options.sources]], cache)
        run(fuzz, cache)
        if options.tests:
            run(tests, cache)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        use()
        compile_sources(int(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1:2] == ["--pytest"]:
        use()
        import pytest

        sys.exit(pytest.main(sys.argv[2:]))
    else:
        main()
