"""requirements/newer.py: what is newer than the pins, without asking an index."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

SCRIPT = Path(__file__).parents[1] / "requirements" / "newer.py"
FAKE_PIP = """
import sys
name = sys.argv[-1]
if name == "gone":
    sys.exit("ERROR: no host answers at https://index.example")
print(f"{name} (2.10.0)\\nAvailable versions: 2.10.0, 2.9.1, 2.9.0, 2.8.0")
"""
PINS = """# a comment about one==1.0
-r common.txt
one==2.9.0
two[extra]==2.10.0 ; python_version >= "3"  # why
three==1.0 ; python_version < "3"
gone==1.0
"""


def test_pins_of_this_python_and_no_others():
    functions = runpy.run_path(str(SCRIPT))
    assert functions["pins_in"](PINS) == {
        "one": Version("2.9.0"),
        "two": Version("2.10.0"),
        "gone": Version("1.0"),
    }
    assert {"torch", "torchvision", "transformers"} <= functions["pins_in"](
        functions["NEWEST"].read_text()
    ).keys()


@pytest.mark.parametrize(
    ("pinned", "versions", "line"),
    [
        ("2.9.0", ["2.10.0", "2.9.1", "2.8"], "x 2.9.0: newer is 2.9.1, 2.10.0"),
        ("2.10.0", ["2.10.0", "2.9.1"], "x 2.10.0 is the newest"),
        ("2.8.0", ["2.8.0+cpu", "2.8.0"], "x 2.8.0 is the newest"),
        ("1.0", [], "x 1.0: the package index does not answer"),
    ],
)
def test_a_line_for_each_package(pinned, versions, line):
    told = runpy.run_path(str(SCRIPT))["told"]
    assert told("x", Version(pinned), [Version(v) for v in versions]) == line


def test_the_script_ends_well_and_names_no_host(tmp_path, monkeypatch):
    (tmp_path / "pip.py").write_text(FAKE_PIP)
    (tmp_path / "pins.txt").write_text(PINS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "pins.txt"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "one 2.9.0: newer is 2.9.1, 2.10.0",
        "two 2.10.0 is the newest",
        "gone 1.0: the package index does not answer",
    ]
