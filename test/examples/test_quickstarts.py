"""The quick starts run with nothing but the packages that their pages tell to install."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Pages, and extras of nc-quant that each names.
PAGES = [
    ("README.md", ""),
    ("docs/start/quickstart-int8.md", ""),
    pytest.param("docs/start/quickstart-4-bit.md", "hf", marks=pytest.mark.needs_plans),
]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

#: Hides every installed distribution that nc-quant with some extras does not require, directly or not.
HIDES = '''
import importlib.metadata as metadata
import sys
from importlib.machinery import PathFinder

from packaging.requirements import Requirement


def required(extras):
    """Names of distributions that nc-quant needs."""
    found, waiting = set(), [("nc-quant", frozenset(extras))]
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in found:
            continue
        found.add((name, extras))
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # not installed here
            continue
        for line in map(Requirement, lines):
            if line.marker is None or any(line.marker.evaluate({"extra": e}) for e in (*extras, "")):
                waiting.append((line.name.lower().replace("_", "-"), frozenset(line.extras)))
    return {name for name, _ in found}


class Only:
    """Finds modules of some distributions, of Python, and of the working directory."""

    def __init__(self, extras):
        self.names = names = required(extras)
        owners = metadata.packages_distributions()
        self.hidden = {
            module
            for module, dists in owners.items()
            if names.isdisjoint(d.lower().replace("_", "-") for d in dists)
        }

    def find_distributions(self, context):
        for found in PathFinder.find_distributions(context):
            if (found.metadata["Name"] or "").lower().replace("_", "-") in self.names:
                yield found

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.hidden else PathFinder.find_spec(name, path, target)


only = Only([e for e in sys.argv[1].split(",") if e])
sys.meta_path[:] = [only if finder is PathFinder else finder for finder in sys.meta_path]
for module in [m for m in sys.modules if m.partition(".")[0] in only.hidden]:
    del sys.modules[module]
'''


def run(code, extras, folder):
    script = folder / "script.py"
    script.write_text(HIDES + code, encoding="utf-8")
    command = [sys.executable, str(script), extras]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(("page", "extras"), PAGES)
def test_a_quick_start_runs_with_what_its_page_names(page, extras, tmp_path):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert all(f".[{extra}]" in text for extra in extras.split(",") if extra)
    code = "\n".join(BLOCK.findall(text))
    assert "nc.save(" in code
    done = run(code, extras, tmp_path)
    assert done.returncode == 0, done.stderr


def test_other_packages_are_hidden(tmp_path):
    assert "No module named 'transformers'" in run("import transformers", "", tmp_path).stderr
    assert "No module named 'hypothesis'" in run("import hypothesis", "hf", tmp_path).stderr
    done = run(
        "import importlib.util as u; assert u.find_spec('pytest') is None; import torch, rich", "", tmp_path
    )
    assert done.returncode == 0, done.stderr
