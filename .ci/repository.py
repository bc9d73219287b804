"""The files of the repository: their hashes, and which of them each one reads.

A Python file reads what it imports, also inside functions; what `nc.name` or a string like "nc.room.module"
names; files and folders of data that it names; and C sources of which it names one or a function. A C source
reads the headers that it includes, and the tables of which its own header is made. A package does not count
as imported because one of its modules is.

Needs Python alone, no history of git, and nothing of nc installed.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import fnmatch
import functools
import hashlib
import re
import runpy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath

#: What belongs to the repository; what else lies in a developer's folder does not.
PARTS = (
    *(".ci", "benchmarks", "deploy", "docs", "examples", "nc", "requirements", "results", "test"),
    *("CHANGELOG.md", "LICENSE", "Makefile", "README.md", "pyproject.toml", "setup.py"),
)
LEDGER = ".ci/ledger.json"
MUTATIONS = "test/mutations.py"
C_CODE = "nc/kernels/c_code"
#: What each C source is compiled with, see nc/kernels/c_code/flags.py.
_MADE = (f"{C_CODE}/identity.h", f"{C_CODE}/abi.py", f"{C_CODE}/gelu.py", "nc/kernels/tuning.py")
#: Folders whose modules tests, examples and benchmarks import by their names alone.
_PATHS = ("test", "examples", "benchmarks")
#: Folders of tests, and their rooms of nc, that are a job for each of their folders and one for their files.
DIVIDED = ("backends", "algorithms", "api")


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of test/mutations.py.

    Attributes:
        name: of the mutation.
        file: which it changes, below nc/.
        tests: test files that should notice it, without "test_".
        environment: of the tests: "native", "ipex" where only IPEX can, "emulated" where instructions are.
    """

    name: str
    file: str
    tests: tuple[str, ...]
    environment: str

    @property
    def key(self) -> str:
        """Its name among the files of a tree."""
        return f"{MUTATIONS}::{self.name}"


@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
    """The files below a folder, as they are when they are first looked at.

    Each row of test/mutations.py counts as a file too, so that a new one changes nothing for the others.
    """

    root: Path

    @functools.cached_property
    def files(self) -> Mapping[str, str]:
        """Name → 8 digits that depend on the content; without the ledger."""
        found = {}
        for part in PARTS:
            top = self.root / part
            for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
                name = path.relative_to(self.root).as_posix()
                if path.is_file() and _counts(name):
                    found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
        return found | {row.key: digest for row, digest in self._parsed_rows}

    @functools.cached_property
    def hash(self) -> str:
        """16 digits that depend on all files."""
        return self.hash_of(self.files)

    def hash_of(self, names: Iterable[str]) -> str:
        """Return 16 digits that depend on the names and the contents of files."""
        text = "\n".join(f"{name} {self.files[name]}" for name in sorted(names))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def below(self, parts: Iterable[str]) -> set[str]:
        """Return the files that some parts name, see `names`; what is not there is left out."""
        return {name for part in parts for name in self._below(part)}

    @functools.cached_property
    def _below(self) -> Callable[[str], list[str]]:
        return functools.cache(lambda part: [name for name in self.files if names([part], name)])

    @functools.cached_property
    def rows(self) -> tuple[Row, ...]:
        """All mutations."""
        return tuple(row for row, _ in self._parsed_rows)

    @functools.cached_property
    def _parsed_rows(self) -> list[tuple[Row, str]]:
        path = self.root / MUTATIONS
        if not path.exists():
            return []
        found = []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), MUTATIONS)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Mutation":
                name, _, file, _, _, tests = (ast.literal_eval(value) for value in node.args)
                words = {word.arg: ast.literal_eval(word.value) for word in node.keywords}
                environment = next((name for name in ("ipex", "emulated") if words.get(name)), "native")
                digest = hashlib.sha256(ast.dump(node).encode()).hexdigest()[:8]
                found.append((Row(name, file, tests, environment), digest))
        return found

    def text(self, name: str) -> str:
        """Return the content of a file of text."""
        return (self.root / name).read_text(encoding="utf-8")

    # --- what a file reads

    def distances(self, near: Mapping[str, int], inside: str = "") -> dict[str, int]:
        """Return the files that some files reach, and over how many others.

        Args:
            near: files → where counting begins.
            inside: of what files read, take what is below this folder alone.
        """
        return self._distances(frozenset(near.items()), inside)

    @functools.cached_property
    def _distances(self) -> Callable[[frozenset[tuple[str, int]], str], dict[str, int]]:
        return functools.cache(self._computed_distances)  # those of a room are the same in all suites

    def _computed_distances(self, begin: frozenset[tuple[str, int]], inside: str) -> dict[str, int]:
        near = dict(begin)
        found = dict(near)
        waiting = collections.deque(sorted(near, key=lambda name: (near[name], name)))
        while waiting:
            name = waiting.popleft()
            for other in self.reads(name):
                if other.startswith(inside) and (other not in found or found[other] > found[name] + 1):
                    found[other] = found[name] + 1
                    waiting.append(other)
        return found

    def reads(self, name: str) -> frozenset[str]:
        """Return the files that a file imports, includes or names."""
        if name not in self._read:
            suffix = PurePosixPath(name).suffix
            found = _PythonFile(self, name).reads() if suffix == ".py" else set()
            if suffix in (".c", ".h"):
                found |= self.included(name)
            if suffix == ".c" and name.startswith(C_CODE):
                found.update(_MADE)
            self._read[name] = frozenset(found & self.files.keys()) - {name}
        return self._read[name]

    @functools.cached_property
    def _read(self) -> dict[str, frozenset[str]]:
        return {}

    def included(self, name: str) -> set[str]:
        """Return the headers that a C file includes from its folder, and from the package."""
        text = self.text(name) if name in self.files else ""
        headers = re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.MULTILINE)
        folder = PurePosixPath(name).parent.as_posix()
        return {f"{place}/{header}" for header in headers for place in (folder, C_CODE)} & self.files.keys()

    @functools.cached_property
    def sources(self) -> tuple[str, ...]:
        """The C sources of the package, without ".c"."""
        found = (PurePosixPath(name) for name in self.files)
        return tuple(path.stem for path in found if path.parent.as_posix() == C_CODE and path.suffix == ".c")

    @functools.cached_property
    def source_of(self) -> Mapping[str, str]:
        """Source or C function → source."""
        table = f"{C_CODE}/abi.py"
        functions = runpy.run_path(str(self.root / table))["FUNCTIONS"] if table in self.files else {}
        return {name: row.source for name, row in functions.items()} | {name: name for name in self.sources}

    @functools.cached_property
    def exported(self) -> Mapping[str, str]:
        """Name of `nc/__init__.py` → the module that it comes from."""
        if "nc/__init__.py" not in self.files:
            return {}
        body = ast.parse(self.text("nc/__init__.py")).body
        imports = [node for node in body if isinstance(node, ast.ImportFrom) and node.module]
        return {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}

    def module(self, dotted: str, prefix: str = "") -> str | None:
        """Return the file of a module; None where the repository has none."""
        path = prefix + dotted.replace(".", "/")
        return next((n for n in (f"{path}.py", f"{path}/__init__.py") if n in self.files), None)

    @functools.cached_property
    def by_name(self) -> Mapping[str, str]:
        """Last part of a path → the path, for files that a string may name.

        That is all but modules of nc and data of tests, where the last part is in one path only.
        """
        found = collections.defaultdict(list)
        for name in self.files:
            if "::" not in name and not name.startswith(("nc/", "test/data/")):
                found[PurePosixPath(name).name].append(name)
        return {last: paths[0] for last, paths in found.items() if len(paths) == 1}

    @functools.cached_property
    def data(self) -> Mapping[str, list[str]]:
        """Folder of nc or of tests that has no Python in it → the files below it."""
        code = {
            parent for name in self.files if name.endswith(".py") for parent in PurePosixPath(name).parents
        }
        found = collections.defaultdict(list)
        for name in self.files:
            apart = [parent for parent in PurePosixPath(name).parents if parent not in code]
            if apart and name.startswith(("nc/", "test/")):
                found[apart[-1].as_posix()].append(name)
        return found


class _PythonFile:
    """What a Python file reads: modules, C sources, and files that it names."""

    def __init__(self, tree: Tree, name: str) -> None:
        self.tree, self.name, self.folder = tree, name, PurePosixPath(name).parent.as_posix()
        nodes = list(ast.walk(ast.parse(tree.text(name), name)))
        self.imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
        self.strings = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        attributes = (n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name))
        self.attributes = {(node.value.id, node.attr) for node in attributes}  # type: ignore[attr-defined]

    def reads(self) -> set[str]:
        modules = {found for dotted in self.imported() for found in self.found(dotted)}
        return modules | self.named() | self.c_sources(modules) | self.conftests()

    def imported(self) -> set[str]:
        """Return the modules that it imports, and those that its strings name, as `monkeypatch` does."""
        found = {text for text in self.strings if re.fullmatch(r"nc(\.\w+)+", text)}
        for node in self.imports:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif node.module:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        return found | {f"nc.{attribute}" for name, attribute in self.attributes if name == "nc"}

    def found(self, dotted: str) -> set[str]:
        """Return the file of a module, or of the module that has a name.

        A package does not count as imported because one of its modules is: `nc` itself imports everything.
        """
        prefixes = ("",) if self.name.startswith("nc/") else ("", *(f"{path}/" for path in _PATHS))
        while dotted and dotted != "nc":
            if dotted.startswith("nc.") and dotted.count(".") == 1 and dotted[3:] in self.tree.exported:
                return self.found(self.tree.exported[dotted[3:]])
            files = {file for prefix in prefixes if (file := self.tree.module(dotted, prefix))}
            if files:
                return files
            dotted = dotted.rpartition(".")[0]
        return set()

    def named(self) -> set[str]:
        """Return data that its strings name: folders, files of its own one, and others by their last part."""
        found = set()
        inside = [name for name in self.tree.files if name.startswith(f"{self.folder}/")]
        patterns = [text for text in self.strings if re.fullmatch(r"[\w*./-]*\.\w+", text)]
        for text in patterns if self.folder != C_CODE else ():
            if self.name.startswith("nc/"):
                found |= {n for n in inside if fnmatch.fnmatch(n, f"{self.folder}/{text}") and _is_data(n)}
            elif (last := PurePosixPath(text).name) in self.tree.by_name:
                path = self.tree.by_name[last]
                found |= {path} if f"/{path}".endswith(f"/{text}") else set()
        for folder, files in self.tree.data.items():
            path = PurePosixPath(folder)
            if path.name in self.strings and self.name.startswith(f"{path.parent.as_posix()}/"):
                found.update(files)
        return found

    def c_sources(self, modules: Iterable[str]) -> set[str]:
        """Return the C sources that it loads.

        A file that imports a module of nc/kernels/c_code loads the sources and the functions that it names;
        one that names none, or asks for the tables of all, loads any.
        """
        used = {module for module in modules if module.startswith(f"{C_CODE}/")}
        if not used or self.folder == C_CODE:
            return set()
        sources = {self.tree.source_of[text] for text in self.strings & self.tree.source_of.keys()}
        of_all = {("abi", "FUNCTIONS"), ("build", "sources")} & self.attributes
        if of_all or (f"{C_CODE}/build.py" in used and not sources):
            sources = set(self.tree.sources)
        return {f"{C_CODE}/{source}.c" for source in sources}

    def conftests(self) -> set[str]:
        """Return the files that pytest loads before a test file, but for the one of all tests."""
        if not PurePosixPath(self.name).name.startswith("test_"):
            return set()
        folders = [folder.as_posix() for folder in PurePosixPath(self.name).parents]
        return {f"{folder}/conftest.py" for folder in folders if folder.startswith("test/")}


def _is_data(name: str) -> bool:
    return PurePosixPath(name).suffix not in (".py", ".c", ".h") and "::" not in name


def _counts(name: str) -> bool:
    first, *others = name.split("/")
    hidden = any(part == "__pycache__" or part.startswith(".") for part in others)
    return name != LEDGER and not hidden and not name.endswith((".pyc", ".so"))


def names(parts: Iterable[str], name: str) -> bool:
    """Whether one of some parts of the repository names a file: it is the file, or a folder above it.

    `test/.` and divided folders name the files in them alone.
    """
    folder = name.rpartition("/")[0]
    for part in parts:
        top, _, room = part.partition("/")
        alone = part == "test/." or (top in ("test", "nc") and room in DIVIDED)
        if name == part or (folder == part.removesuffix("/.") if alone else name.startswith(f"{part}/")):
            return "::" not in name or name == part
    return False
