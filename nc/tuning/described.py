"""What a value is, by all that code can read of it: alike in other processes, another one after any change.

Data counts by its bytes, the user's functions by their code, by what they hold and by the globals that they
read, the user's classes likewise; code of installed packages counts by its version. Whatever can't be told
apart in this way is an error, and never left out.
"""

from __future__ import annotations

import collections
import contextlib
import copyreg
import dis
import functools
import hashlib
import logging
import os
import re
import site
import sys
import sysconfig
import threading
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nc.calibration.tensor_file import checksum
from nc.text.plain import plain


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\S+", text))


#: How many objects inside each other are looked at.
MOST_DEPTH = 60
_PLAIN = frozenset(map(type, (None, True, 0, 0.0, 0j, "", b"", ..., NotImplemented, range(0), slice(0))))
#: What has no data that a result depends on.
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_DESCRIPTORS = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
#: Names that read what values in memory do not show: files, the network, environment variables.
_READERS = _words(
    "open load read_text read_bytes fromfile memmap loadtxt genfromtxt read_csv read_json "
    "read_parquet read_table load_file load_dataset load_from_disk from_pretrained from_file imread "
    "urlopen urlretrieve read_image check_output popen system environ environb getenv getenvb"
)
#: Functions of Python that do so, or make code of text; methods of these names are others: `model.eval`.
_BUILTIN_READERS = _words("input eval exec")
#: Methods of lists, sets, dicts and deques that return None: code that calls these alone reads nothing.
_WRITES = _words("append appendleft add extend update clear insert")
_WRITABLE = (list, set, dict, collections.deque, collections.Counter)
_LOADS = _words(
    "LOAD_GLOBAL LOAD_NAME LOAD_DEREF LOAD_CLASSDEREF LOAD_FROM_DICT_OR_DEREF LOAD_FROM_DICT_OR_GLOBALS"
)
#: Of classes, what follows from the rest, or changes without them.
_DERIVED = _words(
    "__dict__ __weakref__ __doc__ __module__ __annotations__ __annotate__ __annotate_func__ _abc_impl "
    "__annotations_cache__ __abstractmethods__ __firstlineno__ __static_attributes__ __dataclass_fields__ "
    "__orig_bases__ __parameters__ __type_params__"
)


class UntoldError(Exception):
    """Something that can't be told apart from what it may become; the text says what, and where it is."""


def described(value: Any) -> str:
    """Return a hash of a value, alike in other processes with the same versions.

    Raises:
        UntoldError: it holds something that can't be told apart: an open file, a generator, an object of a C
            extension that can't be pickled, code that reads files, or more than `MOST_DEPTH` objects inside
            each other.
    """
    walk = _Walk()
    try:
        return _hash("", sys.version, walk.of(value, "")).hex()
    except RecursionError as error:
        msg = "its objects are too deep inside each other"
        raise UntoldError(msg) from error


def _hash(kind: str, *parts: bytes | str) -> bytes:
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


class _Walk:
    """Hashes of objects, each looked at once."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}
        self._open: dict[int, int] = {}
        self._path: list[str] = []
        self._alive: list[Any] = []  # what is known by its address stays there

    def of(self, value: Any, step: str) -> bytes:
        """Return the hash of a value; `step` says where it is, for messages."""
        kind = type(value)
        if kind in _PLAIN:
            return _hash(kind.__name__, hex(value) if kind is int else repr(value))
        key = id(value)
        if key in self._known:
            return self._known[key]
        if key in self._open:
            return _hash("again", str(len(self._open) - self._open[key]))
        self._path.append(step)
        if len(self._open) >= MOST_DEPTH:
            self._untold(f"more than {MOST_DEPTH} objects are inside each other")
        self._open[key] = len(self._open)
        found = self._of(value)
        del self._open[key]
        self._path.pop()
        self._known[key] = found
        self._alive.append(value)
        return found

    def _untold(self, what: str) -> Any:
        where = " → ".join(filter(None, self._path))
        msg = plain(f"{what} ({where})" if where else what)
        raise UntoldError(msg)

    def _all(self, values: Iterable[tuple[str, Any]]) -> Iterator[bytes]:
        for step, value in values:
            yield _hash(step, self.of(value, step))

    def _of(self, value: Any) -> bytes:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return _hash("method", self.of(value.__func__, _name(value)), self.of(value.__self__, "self"))
        if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
            return self._builtin(value)
        if isinstance(value, _DESCRIPTORS):
            return _hash("descriptor", self.of(value.__objclass__, ""), value.__name__)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.ModuleType):
            return self.module(value, None)
        if isinstance(value, (staticmethod, classmethod)):
            return _hash(type(value).__name__, self.of(value.__func__, ""))
        if isinstance(value, property):
            return _hash("property", *self._all((n, getattr(value, n)) for n in ("fget", "fset", "fdel")))
        if isinstance(value, logging.Logger):
            return _hash("logger", value.name)
        if isinstance(value, _LOCKS):
            return _hash("lock")
        kind = type(value)
        if kind in (list, tuple):
            return self._row(kind.__name__, value)
        if kind is dict:
            return self._table(value)
        return self._instance(value)

    # ---- containers ----

    def _row(self, kind: str, values: list[Any] | tuple[Any, ...]) -> bytes:
        if {type(each) for each in values} <= {float, str, bool, type(None)}:
            return _hash(f"plain {kind}", repr(values))
        return _hash(kind, *self._all((f"[{i}]", each) for i, each in enumerate(values)))

    def _table(self, values: dict[Any, Any]) -> bytes:
        parts = []
        for key, each in values.items():
            name = key if isinstance(key, str) else type(key).__name__
            parts += [self.of(key, "a key"), self.of(each, f"[{name!r}]")]
        return _hash("dict", *parts)

    def _set(self, values: Iterable[Any]) -> bytes:
        # sorted by their hashes; each is described by itself, so that its hash depends on nothing else
        found = []
        for each in values:
            alone = _Walk()
            alone._path, alone._open = [*self._path, "an element"], dict(self._open)
            found.append(alone.of(each, ""))
        return _hash("set", *sorted(found))

    # ---- data ----

    def _tensor(self, tensor: torch.Tensor) -> bytes:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return self._untold(f"a tensor of type {type(tensor).__qualname__}")  # type: ignore[no-any-return]
        try:
            data = checksum(str(tensor.layout), {"": tensor.detach().cpu().resolve_conj().resolve_neg()})
        except Exception:  # a layout or dtype without bytes, or no memory at all
            return self._untold(f"a tensor of layout {tensor.layout} and dtype {tensor.dtype}")  # type: ignore[no-any-return]
        return _hash("tensor", data, self._attributes(tensor))

    def _array(self, array: np.ndarray[Any, Any]) -> bytes:
        form = f"{array.dtype.descr if array.dtype.names else array.dtype.str} {array.shape}"
        plain_array = np.asarray(array)
        content = (
            self.of(plain_array.reshape(-1).tolist(), "elements")
            if array.dtype.hasobject
            else hashlib.sha256(np.ascontiguousarray(plain_array).tobytes()).digest()
        )
        return _hash("array", self.of(type(array), ""), form, content, self._attributes(array))

    # ---- code ----

    def _code(self, code: types.CodeType) -> bytes:
        numbers = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        return _hash(
            "code",
            repr((numbers, names)),
            code.co_code,
            getattr(code, "co_exceptiontable", b""),  # Python 3.10 has none
            *(self.of(const, "") for const in code.co_consts),
        )

    def _function(self, function: types.FunctionType) -> bytes:
        reads = _reads(function.__code__)
        of_library = _is_library(function.__code__.co_filename)
        if not of_library and (readers := sorted(reads.readers)):
            self._path.append(_name(function))
            self._untold(f"code that calls {readers[0]!r}, which may read what is not in memory")
        parts = [self._code(function.__code__), self.of(function.__defaults__, "a default")]
        parts.append(self.of(function.__kwdefaults__, "a default"))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            parts.append(self._read(name, reads, _content(cell), f"{_name(function)}'s {name}"))
        parts.append(self._all_of(vars(function)))
        if of_library:
            return _hash("library", _version(function.__module__), *parts)
        for name in sorted(reads.names - set(function.__code__.co_freevars)):
            if name in function.__globals__:
                value = function.__globals__[name]
                parts.append(self._read(name, reads, value, f"{_name(function)}'s global {name}"))
            else:
                parts.append(_hash("builtin or missing", name))
        parts += [self._imported(name, function, reads) for name in sorted(reads.imports)]
        return _hash("function", *parts)

    def _read(self, name: str, reads: _Reads, value: Any, step: str) -> bytes:
        """Return the hash of a variable that code reads."""
        if name in reads.written and type(value) in _WRITABLE:
            return _hash("written")
        if isinstance(value, types.ModuleType):
            return _hash(name, self.module(value, reads.attributes))
        if _name(value) in _READERS and callable(value):
            self._path.append(step)
            self._untold(f"{_name(value)!r}, which may read what is not in memory")
        return _hash(name, self.of(value, step))

    def _imported(self, name: str, function: types.FunctionType, reads: _Reads) -> bytes:
        """Return the hash of a module that code imports when it is called."""
        package = str(function.__globals__.get("__package__") or "")
        candidates = [name, f"{package}.{name}".strip(".")]
        module = next((sys.modules[each] for each in candidates if each in sys.modules), None)
        top = name.partition(".")[0]
        if module is None and (top in sys.stdlib_module_names or _is_installed(top)):
            return _hash("module", name, _version(top))
        if module is None:
            self._path.append(_name(function))
            self._untold(f"code that imports {name!r}, which nobody has imported yet")
        assert module is not None
        return self.module(module, reads.attributes)

    def module(self, module: types.ModuleType, attributes: frozenset[str] | None) -> bytes:
        """Return the hash of a module, or of some of its attributes; those of libraries by their version."""
        if _is_library_module(module.__name__):
            return _hash("module", module.__name__, _version(module.__name__))
        names = vars(module)
        chosen = (
            [name for name in names if not name.startswith("__")]
            if attributes is None
            else [
                *(name for name in names if name in attributes),
                *(["__getattr__"] * ("__getattr__" in names)),
            ]
        )
        parts = []
        for name in sorted(chosen):
            value = names[name]
            step = f"{module.__name__}.{name}"
            if isinstance(value, types.ModuleType):
                if value is module or _is_library_module(value.__name__):
                    parts.append(_hash(name, value.__name__))
                    continue
                key = id(value)
                if key in self._open:
                    continue
                self._open[key] = len(self._open)
                parts.append(_hash(name, self.module(value, attributes)))
                del self._open[key]
            else:
                parts.append(_hash(name, self.of(value, step)))
        return _hash("module", module.__name__, *parts)

    def _builtin(self, value: Any) -> bytes:
        owner = value.__self__
        if owner is None or isinstance(owner, types.ModuleType):
            module = str(value.__module__ or "")
            return _hash("builtin", module, value.__qualname__, _version(module))
        return _hash("bound", value.__name__, self.of(owner, f"of {value.__name__}"))

    def _class(self, kind: type) -> bytes:
        if _is_library_module(kind.__module__):
            return _hash("class", kind.__module__, kind.__qualname__, _version(kind.__module__))
        members = {
            name: each
            for name, each in vars(kind).items()
            if name not in _DERIVED and not isinstance(each, types.MemberDescriptorType)
        }
        bases = [self.of(base, "") for base in kind.__bases__]
        return _hash("class", kind.__qualname__, self.of(type(kind), ""), *bases, self._all_of(members))

    # ---- objects ----

    def _all_of(self, values: dict[str, Any]) -> bytes:
        return _hash("attributes", *self._all((str(name), values[name]) for name in sorted(values, key=str)))

    def _attributes(self, value: Any) -> bytes:
        """Return the hash of attributes and slots; what a class computes is not asked for."""
        found = dict(getattr(value, "__dict__", None) or {})
        if isinstance(value, torch.utils.data.DataLoader):
            found.pop("_DataLoader__multiprocessing_context", None)
            found.pop("_iterator", None)  # of workers that persist
        for name, each in _slots(type(value)):
            with contextlib.suppress(AttributeError):  # a slot without a value
                found[name] = each.__get__(value)
        return self._all_of(found)

    def _instance(self, value: Any) -> bytes:
        kind = type(value)
        parts = [self.of(kind, ""), self._attributes(value)]
        if isinstance(value, (set, frozenset)):
            return _hash("object", *parts, self._set(value))
        if isinstance(value, (list, tuple)):
            base = list if isinstance(value, list) else tuple
            return _hash("object", *parts, self._row(base.__name__, [*base.__iter__(value)]))  # type: ignore[arg-type]
        if isinstance(value, dict):
            return _hash("object", *parts, self._table(dict(dict.items(value))), self._more_of_dict(value))
        if not _has_c_state(kind):
            return _hash("object", *parts)
        try:
            registered = copyreg.dispatch_table.get(kind)
            made = value.__reduce_ex__(4) if registered is None else registered(value)
        except Exception:  # what a class says that can't be pickled
            return self._untold(f"an object of type {kind.__module__}.{kind.__qualname__}")  # type: ignore[no-any-return]
        if isinstance(made, str):
            return _hash("object", *parts, made)
        held = [list(each) if isinstance(each, Iterator) else each for each in made]
        self._alive.append(held)
        return _hash("object", *parts, *(self.of(each, f"{kind.__qualname__}") for each in held))

    def _more_of_dict(self, value: dict[Any, Any]) -> bytes:
        factory = value.default_factory if isinstance(value, collections.defaultdict) else None
        return self.of(factory, "default_factory")


class _Reads:
    """What code reads, with that of the functions in it.

    Attributes:
        names: of variables.
        written: of these, what it calls a method of `_WRITES` of, and reads nothing of.
        attributes: of anything, and names that it imports from modules.
        imports: modules.
        readers: of all these, what may read what is not in memory.
    """

    def __init__(self, code: types.CodeType) -> None:
        names, read, attributes, imports = set[str](), set[str](), set[str](), set[str]()
        codes = [code]
        for each in codes:
            codes += [const for const in each.co_consts if isinstance(const, types.CodeType)]
            instructions = list(dis.get_instructions(each))
            for one, after in zip(instructions, [*instructions[1:], None], strict=True):
                if one.opname in _LOADS:
                    names.add(str(one.argval))
                    if after is None or not _is_attribute(after.opname) or after.argval not in _WRITES:
                        read.add(str(one.argval))
                elif one.opname == "IMPORT_NAME":
                    imports.add(str(one.argval))
                elif _is_attribute(one.opname) or one.opname == "IMPORT_FROM":
                    attributes.add(str(one.argval))
        self.names, self.written = frozenset(names), frozenset(names - read)
        self.attributes, self.imports = frozenset(attributes), frozenset(imports)
        self.readers = _READERS & (attributes | names) | _BUILTIN_READERS & names


@functools.lru_cache(maxsize=4096)
def _reads(code: types.CodeType) -> _Reads:
    return _Reads(code)


def _is_attribute(opname: str) -> bool:
    return opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value
        return NotImplemented


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", type(value).__name__))


def _slots(kind: type) -> Iterator[tuple[str, types.MemberDescriptorType]]:
    """Yield the slots of a class by name; members of C classes are offsets and the like."""
    for each in kind.__mro__:
        if "__slots__" in vars(each):
            found = ((name, slot) for name, slot in vars(each).items())
            yield from (
                (f"{each.__qualname__}.{n}", s) for n, s in found if isinstance(s, types.MemberDescriptorType)
            )


def _has_c_state(kind: type) -> bool:
    """Return whether objects hold more than attributes and slots, as those of classes written in C do."""
    known = len(list(_slots(kind))) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    words = (kind.__basicsize__ - object.__basicsize__) // np.dtype(np.intp).itemsize
    return kind.__itemsize__ != 0 or words > known


# ---- code of the user's, and code of installed packages ----


@functools.lru_cache(maxsize=1)
def _roots() -> tuple[str, ...]:
    paths = {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()}
    paths |= {str(Path(str(each.__file__)).parent) for each in (os, np, torch)}
    paths.add(str(Path(__file__).parents[1]))
    wanted = {path for path in paths if path.rstrip(os.sep) not in (sys.prefix, sys.base_prefix)}
    ends = ("site-packages", "dist-packages")
    wanted |= {path for path in sys.path if path.endswith(ends)}
    return tuple(os.path.realpath(path) + os.sep for path in wanted if path)


@functools.lru_cache(maxsize=65536)
def _is_library(file: str) -> bool:
    """Return whether a file is one of Python or of an installed package."""
    return file.startswith("<frozen") or os.path.realpath(file).startswith(_roots())


def _is_library_module(name: str | None) -> bool:
    module = sys.modules.get(name or "")
    if name == "__main__" or module is None:
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        return (name or "").partition(".")[0] in sys.stdlib_module_names or bool(
            getattr(module, "__path__", None) and all(map(_is_library, map(str, module.__path__)))
        )
    return _is_library(file)


def _is_installed(top: str) -> bool:
    import importlib.util

    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    return found is not None and found.origin is not None and _is_library(found.origin)


def _version(module: str | None) -> str:
    top = sys.modules.get((module or "").partition(".")[0])
    return str(getattr(top, "__version__", ""))
