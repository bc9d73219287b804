"""The list of hand-made faults fits the code.

`make mutations` runs for hours, and must not stop for an old entry.
"""

import pytest
from mutations import MUTATIONS, ROOT, UNDECIDED, files_of, verdict


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_text_stands_exactly_once_in_its_file(mutation):
    path = ROOT / "nc" / mutation.file
    assert path.read_text(encoding="utf-8").count(mutation.text) == 1, (
        f"bring test/mutations.py up to date with {path}"
    )
    assert mutation.fault != mutation.text


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_test_files_that_should_notice_it_exist(mutation):
    assert mutation.tests
    assert [name for name in mutation.tests if len(files_of(name)) != 1] == []


KERNEL = next(m for m in MUTATIONS if m.file == "kernels/c_code/rows.c")
OTHER = next(m for m in MUTATIONS if m.file == "process/cores.py")


@pytest.mark.parametrize(
    ("lost", "lacking", "code", "lines"),
    [
        ([], ["amx"], 0, []),
        ([KERNEL], [], 1, [f"not caught: {KERNEL.name}"]),
        ([KERNEL], ["amx"], UNDECIDED, [f"not decided, this CPU lacks amx: {KERNEL.name}"]),
        ([OTHER], ["amx"], 1, [f"not caught: {OTHER.name}"]),
        (
            [OTHER, KERNEL],
            ["amx", "avx512"],
            1,
            [f"not caught: {OTHER.name}", f"not decided, this CPU lacks amx, avx512: {KERNEL.name}"],
        ),
    ],
)
def test_a_fault_that_the_cpu_may_not_run_is_not_decided(capsys, lost, lacking, code, lines):
    assert verdict(lost, lacking) == code
    assert capsys.readouterr().out.splitlines() == lines


def test_names_are_told_apart():
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
