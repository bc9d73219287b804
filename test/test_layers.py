"""Imports go in one direction, between the folders of `nc` and between its modules."""

import ast
import collections
import functools
from pathlib import Path

import pytest

from nc.backends import ENGINES

ROOT = Path(__file__).parents[1]

#: Imports inside functions, by the module that has them; each avoids a load that most users do not need.
DEFERRED = {
    # names and versions are known without loading the engine
    "nc.backends.ipex": ("nc.backends.ipex.lower", "nc.backends.ipex.quiet"),
    "nc.__main__": ("nc.cli.main",),  # after it is known that the package is ours
    "nc.cli.main": ("nc",),  # `--help` must not wait for torch
    "nc.cli.bench": ("nc",),
    "nc.cli.check": ("nc",),
    "nc.cli.machine": ("nc",),
    "nc.cli.report": ("nc",),
    "nc.cli.serve": ("nc",),
    "nc.cli.shell": ("nc.backends",),
    "nc.vllm": ("nc.vllm.linear",),  # it imports vLLM, which calls `register` in each process
}


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in sorted((ROOT / "nc").rglob("*.py"))}


def room(module):
    """The folder of `nc` that a module is in; files of `nc` itself are rooms of their own."""
    return ".".join(module.split(".")[:2])


@functools.cache
def imports(module):
    """[(imported module, whether inside a function)]; `from package import module` counts as the module."""
    found = []

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{module}: relative import"
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    found.append((full if full in FILES else child.module, inside))
            elif isinstance(child, ast.Import):
                found.extend((alias.name, inside) for alias in child.names)
            visit(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    visit(ast.parse(FILES[module].read_text(encoding="utf-8")), False)
    return tuple(found)


def own(module):
    return [(name, inside) for name, inside in imports(module) if name.split(".")[0] == "nc"]


def levels(below):
    """For each key how many levels are below it.

    Args:
        below: key → the keys that it needs.

    Raises:
        AssertionError: some need each other; the message names them in a circle.
    """
    found, path = {}, []

    def level(key):
        if key not in found:
            assert key not in path, f"a cycle: {' -> '.join([*path[path.index(key) :], key])}"
            path.append(key)
            found[key] = 1 + max((level(other) for other in sorted(below.get(key, ()))), default=-1)
            path.pop()
        return found[key]

    for key in below:
        level(key)
    return found


def test_rooms_need_each_other_in_one_direction():
    """Imports inside functions count, too."""
    below = {room(module): set() for module in FILES}
    for module in FILES:
        below[room(module)] |= {room(name) for name, _ in own(module)} - {room(module)}
    found = levels(below)
    for level in sorted(set(found.values())):
        print(level, *sorted(name for name in found if found[name] == level))
    assert set(found) == {room(module) for module in FILES}
    assert max(found, key=found.get) in ("nc.cli", "nc.__main__")


def test_modules_need_each_other_in_one_direction():
    found = levels(
        {module: {name for name, inside in own(module) if not inside} - {module} for module in FILES}
    )
    assert found["nc"] > found["nc.api.workflow"] > found["nc.graph.qdq"] > found["nc.errors"]


def test_a_cycle_is_found():
    with pytest.raises(AssertionError, match="a cycle: b -> c -> b"):
        levels({"a": {"b"}, "b": {"c"}, "c": {"b"}})


def test_the_package_itself_holds_folders():
    files = {path.name for path in (ROOT / "nc").iterdir() if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "_version.py", "errors.py", "py.typed"}


@pytest.mark.parametrize("module", FILES)
def test_imports_inside_functions_are_the_listed_ones(module):
    allowed = DEFERRED.get(module, ())
    for name, inside in own(module):
        assert not inside or any(name == a or name.startswith(f"{a}.") for a in allowed), (
            f"{module} defers {name}"
        )


def test_every_module_that_defers_exists():
    assert not [
        module for module, names in DEFERRED.items() for name in (module, *names) if name not in FILES
    ]


def test_algorithms_and_backends_do_not_know_each_other():
    for module in FILES:
        for a, b in (("nc.algorithms", "nc.backends"), ("nc.backends", "nc.algorithms")):
            if module.startswith(a):
                assert not [name for name, _ in own(module) if name.startswith(b)]


def test_ipex_is_imported_in_one_place_and_only_when_used():
    engine = "intel_extension_for_pytorch"
    users = {
        module: inside for module in FILES for name, inside in imports(module) if name.split(".")[0] == engine
    }
    assert users == {"nc.backends.ipex.quiet": True}


#: Where engines have names: the table of them, the order of "auto" that was measured, and the public
#: functions `nc.export_…`; what writes folders for readers of a format, and what measures beside another engine.
NAMING = {"nc.backends", "nc.backends.auto_order", "nc.api.exports", "nc.hf.export", "nc.cli.split"}


def test_engines_are_known_by_name_in_few_places():
    """By an import, or by a string that is the name.

    An engine that is added or removed changes nothing else.
    """
    engines = {
        name for name in ENGINES if FILES[f"nc.backends.{name}"].name == "__init__.py"
    }  # the reference has no folder
    assert engines >= {"native", "onnx"}
    found = set()
    for module, path in FILES.items():
        if not any(f"{module}.".startswith(f"nc.backends.{name}.") for name in engines):
            known = {
                name
                for name in engines
                for other, _ in own(module)
                if f"{other}.".startswith(f"nc.backends.{name}.")
            }
            found |= {module} if known or strings_in(path) & engines else set()
    assert found == NAMING
    for name in engines:  # what several of them use is in nc/backends itself
        for module in FILES:
            if f"{module}.".startswith(f"nc.backends.{name}."):
                others = [
                    other
                    for other, _ in own(module)
                    for each in engines - {name}
                    if f"{other}.".startswith(f"nc.backends.{each}.")
                ]
                assert not others, module


def strings_in(path):
    """Every string in a file."""
    return {
        n.value
        for n in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }


def test_nothing_above_the_graph_reads_a_configuration():
    """Backends and algorithms see the QDQ graph and the plan only."""
    for module in FILES:
        if module.startswith(
            ("nc.graph", "nc.algorithms", "nc.backends.ipex", "nc.observers", "nc.numerics")
        ):
            assert not [name for name, _ in own(module) if name.split(".")[:2] == ["nc", "config"]], module


def test_only_capture_and_load_decide_the_kind_of_an_operator():
    """All else reads it, so an operator has one kind everywhere."""
    users = {module for module, path in FILES.items() if "decide_kinds" in names_in(path)}
    assert users == {"nc.graph.catalogue", "nc.capture.naming", "nc.storage.graph_json"}


def test_arguments_are_read_by_their_names():
    """`Linear.of(node).weight`, not `node.args[1]`.

    A position says nothing, and a graph may give an argument by name.
    """
    readers = {"nc.graph.catalogue"}  # where names are looked up
    assert {module for module, path in FILES.items() if "args" in subscripted_in(path)} == readers


def subscripted_in(path):
    """Names of the attributes of which a file reads a part: `args` for `node.args[1]` and `node.args[:2]`."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {
        node.value.attr
        for node in nodes
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute)
    }


def names_in(path):
    """Every name, attribute and function in a file."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return {
        getattr(node, field)
        for node in nodes
        for field in ("id", "attr", "name")
        if isinstance(getattr(node, field, None), str)
    }


#: What torch makes of floats is of the user's default dtype, unless it is named.
_OF_FLOATS = {
    "as_tensor",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randn",
    "scalar_tensor",
    "tensor",
    "zeros",
}


def test_new_tensors_name_their_dtype():
    found = []
    for path in sorted((ROOT / "nc").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in _OF_FLOATS
            ):
                of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
                if of_torch and "dtype" not in {keyword.arg for keyword in node.keywords}:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


def test_a_public_class_has_a_name_of_its_own():
    """A name that means two things makes a reader look up which."""
    found = collections.defaultdict(list)
    for path in sorted((ROOT / "nc").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(ROOT).as_posix())
    assert len(found) > 300
    assert not {name: paths for name, paths in found.items() if len(paths) > 1}
