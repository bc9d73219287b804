"""The distribution nc-quant and the module nc: what is said when something else is installed as `nc`."""

import importlib.metadata
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from click.testing import CliRunner

import nc
from nc.cli.main import main
from nc.process import installation

ROOT = Path(__file__).resolve().parents[2]
ADVICE = "Run `pip uninstall nc nc-quant`, then install nc-quant again."
COLOURS = "Named colors in Python"


def describe_in(folder, name, summary):
    """Make a distribution called nc known in a folder."""
    folder = folder / name
    folder.mkdir(parents=True)
    text = f"Metadata-Version: 2.4\nName: nc\nVersion: 1.2.0\n{summary}\n"
    (folder / ("METADATA" if name.endswith(".dist-info") else "PKG-INFO")).write_text(text)


def test_the_installed_distribution_is_ours():
    found = importlib.metadata.metadata(installation.DISTRIBUTION)
    assert (found["Name"], found["Version"]) == ("nc-quant", nc.__version__)
    assert CliRunner().invoke(main, ["--version"]).stdout == f"nc-quant, version {nc.__version__}\n"


def test_nothing_is_said_of_this_installation():
    assert (
        installation.why_not_ours() == installation.other_distribution() == installation.altered_files() == ""
    )


@pytest.mark.parametrize(
    ("name", "summary", "said"),
    [
        ("nc-1.2.0.dist-info", f"Summary: {COLOURS}", f"nc 1.2.0 ({COLOURS}) is another project"),
        ("nc.egg-info", f"Summary: {COLOURS}", f"nc 1.2.0 ({COLOURS}) is another project"),
        ("nc-1.2.0.dist-info", "Author: somebody", "nc 1.2.0 (without a summary) is another project"),
        ("nc_tools-1.2.0.dist-info", f"Summary: {COLOURS}", ""),
    ],
)
def test_another_distribution_that_installs_a_module_nc_is_named(tmp_path, monkeypatch, name, summary, said):
    describe_in(tmp_path, name, summary)
    monkeypatch.syspath_prepend(str(tmp_path))
    why = installation.other_distribution()
    assert why.startswith(said)
    assert why.endswith(ADVICE if said else "")
    result = CliRunner().invoke(main, ["doctor"], env={"COLUMNS": "200"})
    assert why in result.stdout
    assert result.exit_code == 1 if said else ADVICE not in result.stdout


def test_leftovers_do_not_hide_another_project(tmp_path, monkeypatch):
    (tmp_path / "empty/nc-1.0.dist-info").mkdir(parents=True)
    describe_in(tmp_path / "site", "nc-1.2.0.dist-info", f"Summary: {COLOURS}")
    for folder in ("site", "empty"):  # the last one is searched first
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    assert COLOURS in installation.other_distribution()


def test_import_warns_once_at_the_line_that_imports(tmp_path):
    describe_in(tmp_path, "nc-1.2.0.dist-info", f"Summary: {COLOURS}")
    (tmp_path / "user.py").write_text(
        f"import sys\nsys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\nimport nc\nimport nc\n"
    )
    done = subprocess.run(
        [sys.executable, "user.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, source = done.stderr.splitlines()
    assert first.startswith(f"{tmp_path / 'user.py'}:3: NCWarning: nc 1.2.0 ({COLOURS}) is another project")
    assert source.strip() == "import nc"


def test_nothing_is_warned_of_in_a_sound_installation():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        installation.warn_of_others()


#: As the other project does it: the module is replaced by an object that answers to every name.
ANSWERS_ALL = """
import sys
class NC:
    def __getattr__(self, name):
        return globals().get(name, "a colour")
sys.modules[__name__] = NC()
"""


#: `python -m nc COMMAND` in a process whose `nc` is in FOLDER.
RUN = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("nc", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("init", "said"),
    [
        ("", "is not part of nc-quant"),
        (ANSWERS_ALL, "is not part of nc-quant"),
        (None, "nc/__init__.py of nc-quant is missing"),
    ],
)
@pytest.mark.parametrize("command", ["doctor", "--version"])
def test_a_foreign_init_is_one_line_and_no_traceback(tmp_path, init, said, command):
    shutil.copytree(ROOT / "nc", tmp_path / "nc", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "nc/__init__.py").unlink()
    if init is not None:
        (tmp_path / "nc/__init__.py").write_text(init)
    # -I -S: without site-packages, since this environment's editable installation would fill in what is
    # missing
    words = [sys.executable, "-I", "-S", "-c", RUN, str(tmp_path), command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("nc: error: ")
    assert said in line
    assert line.endswith(ADVICE)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder with two files of nc-quant and the hashes that the installation wrote."""
    (tmp_path / "nc").mkdir()
    (tmp_path / "nc/__init__.py").write_text("one")
    (tmp_path / "nc/two.py").write_text("two")
    info = tmp_path / "nc_quant-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: nc-quant\nVersion: 0.1.0\n")
    # printf one | openssl dgst -sha256 -binary | basenc --base64url
    (info / "RECORD").write_text(
        "nc/__init__.py,sha256=dpLDrTVAu4A8Ags67mbNiIcSMjTqDG5xQ8Ct1z_0Me0,3\n"
        "nc/two.py,sha256=P8TM_nRYcOLA2Z9x8w_wZWyN7dQcwdfT03aw2-aF4vM,3\n"
        "nc/__pycache__/plan.cpython-311.pyc,,\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_overwritten_and_missing_files_are_counted(installed):
    assert installation.altered_files() == ""
    (installed / "nc/__init__.py").write_text("colours")
    assert installation.altered_files().endswith(
        f" as nc-quant installed them: 1, e.g. nc/__init__.py. {ADVICE}"
    )
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert installation.altered_files() in result.stdout
    (installed / "nc/two.py").unlink()
    assert installation.altered_files().startswith(
        "Files that are missing or not as nc-quant installed them: 2, e.g. "
    )


def test_without_an_installation_there_is_nothing_to_check(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    assert installation.altered_files() == installation.other_distribution() == ""
