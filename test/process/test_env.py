"""Environment variables: one module reads them, when their values are needed."""

import ast
from pathlib import Path

import pytest

from nc.process import env

PACKAGE = Path(env.__file__).parents[1]
#: Names of `os` by which code reaches the environment.
WAYS = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def ways_to_the_environment(source):
    """Line numbers at which a source names one of `WAYS`, as an attribute or in an import."""
    for node in ast.walk(ast.parse(source)):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = [alias.name for alias in node.names]
        yield from (node.lineno for name in names if name in WAYS)


def test_one_module_reads_the_environment():
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := list(ways_to_the_environment(path.read_text(encoding="utf-8"))))
    }
    assert set(found) == {"process/env.py"}


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['A']", "from os import getenv", "import os as o\no.getenv('A')"]
)
def test_a_read_is_found(source):
    assert list(ways_to_the_environment(source))


def test_a_variable_is_read_in_the_moment_of_the_call(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert not env.COLUMNS.is_set
    assert env.COLUMNS.get() == ""
    assert env.COLUMNS.get("80") == "80"
    monkeypatch.setenv("COLUMNS", "")
    assert env.COLUMNS.is_set
    assert env.COLUMNS.get("80") == ""
    monkeypatch.setenv("COLUMNS", "120")
    assert env.COLUMNS.get("80") == "120"
    assert env.extended({"COLUMNS": "60", "NC_MADE_UP": "1"})["COLUMNS"] == "60"
    assert "NC_MADE_UP" not in env.extended({})


@pytest.mark.parametrize("before", [None, "", "1"])
def test_a_changed_variable_is_put_back(monkeypatch, before):
    monkeypatch.delenv("NC_MADE_UP", raising=False)
    if before is not None:
        monkeypatch.setenv("NC_MADE_UP", before)

    def change():
        with env.changed("NC_MADE_UP", "2"):
            assert env.extended({})["NC_MADE_UP"] == "2"
            msg = "the block ends with an error"
            raise KeyError(msg)

    with pytest.raises(KeyError):
        change()
    assert env.extended({}).get("NC_MADE_UP") == before
