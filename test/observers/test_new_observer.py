"""What docs/contribute/extending.md says that a new observer costs: a file and its name in a table."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/contribute/extending.md"


def module_of_the_page():
    section = PAGE.read_text(encoding="utf-8").partition("## An observer\n")[2]
    return re.search(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[1]


def run_with(tmp_path, module):
    """Run the tests of observers with a copy of the package that has one more."""
    shutil.copytree(ROOT / "nc", tmp_path / "nc", ignore=shutil.ignore_patterns("__pycache__"))
    observers = tmp_path / "nc/observers"
    (observers / "batch_mean.py").write_text(module, encoding="utf-8")
    table = observers / "__init__.py"
    text = table.read_text(encoding="utf-8")
    named = text.replace("PERCENTILE, MSE,", "PERCENTILE, BATCH_MEAN, MSE,").replace(
        "from nc.observers.kl", "from nc.observers.batch_mean import BATCH_MEAN\nfrom nc.observers.kl"
    )
    table.write_text(named, encoding="utf-8")
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    return subprocess.run(
        (
            *command,
            "-m",
            "not exhaustive",
            "-k",
            "sums_of_extremes",
            str(ROOT / "test/observers/test_observers.py"),
        ),
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_tests_of_observers_take_a_new_one(tmp_path):
    run = run_with(tmp_path, module_of_the_page())
    assert run.returncode == 0, run.stdout
    assert re.search(r"^\d+ passed", run.stdout.splitlines()[-1]), run.stdout


def test_they_find_what_is_wrong_with_it(tmp_path):
    """A statistic that says nothing of batches is tested in another order, too."""
    run = run_with(tmp_path, module_of_the_page().replace("    by_batch=True,\n", ""))
    assert run.returncode == 1
    assert "test_order_and_split_do_not_matter[sums_of_extremes]" in run.stdout
