"""No function of the package has more paths than a reader can follow."""

import ast
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: The most paths, counted as `paths_of` does.
MOST = 20

_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case)


def paths_of(function):
    """Return the cyclomatic complexity of a function with those inside it.

    1, and 1 for each branch, loop, handler, assertion, further operand of `and` or `or`, comprehension and
    `if` in one. Radon counts so too, but for the `else` of loops.
    """
    return 1 + sum(map(_added_by, ast.walk(function)))


def _added_by(node):
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return int(isinstance(node, _BRANCHES))


def functions_of(path):
    """Yield (line, name, paths) for the functions of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.name, paths_of(node)


def test_no_function_has_too_many_paths():
    files = sorted((ROOT / "nc").rglob("*.py"))
    found = [(path.relative_to(ROOT), *function) for path in files for function in functions_of(path)]
    assert found
    wrong = [f"{path}:{line} {name}: {paths}" for path, line, name, paths in found if paths > MOST]
    advice = f"more than {MOST} paths; name a predicate, or a part with an idea of its own"
    assert not wrong, "\n".join([advice, *wrong])


@pytest.mark.parametrize(
    ("body", "paths"),
    [
        ("return 0", 1),
        ("if a:\n  return 1\nelif b:\n  return 2\nelse:\n  return 3", 3),
        ("return 1 if a else 2", 2),
        ("return a and b or c", 3),
        ("return a and b and c", 3),
        ("for x in a:\n  pass\nelse:\n  pass", 2),
        ("while a:\n  pass", 2),
        ("return [x for x in a if x if b for y in x]", 5),
        ("return (lambda x: x or a)(b)", 2),
        ("try:\n  a()\nexcept ValueError:\n  b()\nexcept TypeError:\n  c()\nfinally:\n  a()", 3),
        ("assert a\nwith b:\n  c()", 2),
        ("match a:\n  case 1:\n    b()\n  case _:\n    c()", 3),
        ("def inner():\n  return a or b\nreturn inner", 2),
    ],
)
def test_paths_are_counted(body, paths):
    (function,) = ast.parse("def outer(a, b, c):\n" + textwrap.indent(body, "  ")).body
    assert paths_of(function) == paths
