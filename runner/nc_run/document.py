"""What plan.json says, as values that are checked: types, ranges, and what plans must have.

Numbers that depend on the rows and texts of a call are three integers, see `affine`. Numbers of fields that
are no integers are in hexadecimal, as `float.hex` writes them.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from nc_run.abi import FUNCTIONS
from nc_run.affine import MOST, Affine, number
from nc_run.isas import ISAS
from nc_run.json_text import built
from nc_run.uses import USES

SCHEMA = 1
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
#: Most threads of a plan.
MOST_THREADS = 1024
_DTypeName = Literal["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]


def _need(condition: object, why: str) -> None:
    if not condition:
        raise ValueError(why)


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """An input of the model."""

    name: str
    dtype: _DTypeName


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """An array in data.bin; `at`: its first byte, and how many there are."""

    dtype: _DTypeName
    sizes: list[int]
    at: tuple[int, int]

    def __post_init__(self) -> None:
        """Check ranges."""
        _need(len(self.sizes) <= 8 and all(0 <= n < MOST for n in self.sizes), "an array has other sizes")
        _need(self.at[1] == math.prod(self.sizes) * np.dtype(self.dtype).itemsize, "an array has other bytes")


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """Inputs of the model, and the outputs that it gave for them where it was exported."""

    inputs: list[Stored]
    outputs: list[Stored]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """An operator on integers of padded texts; `values`: of inputs, then of steps before."""

    op: Literal["add", "sub", "mul", "ne", "eq", "to", "cumsum"]
    values: list[int]
    number: int | None
    dtype: Literal["bool", "int32", "int64"]

    def __post_init__(self) -> None:
        """Check the number of arguments."""
        count = len(self.values) + (self.number is not None)
        _need(
            self.values and count == (1 if self.op in ("to", "cumsum") else 2), "a step has other arguments"
        )
        _need(abs(self.number or 0) < 1 << 31, "a step has a larger number")


@dataclasses.dataclass(frozen=True, slots=True)
class Texts:
    """What a model of padded texts takes; see `texts`. `results`: values that are inputs of plans too."""

    mask: int | None
    firsts: bool
    longest: int
    positions: int | None
    together: bool
    from_begin: bool
    of_tokens: list[bool]
    steps: list[Step]
    results: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of a call is: in a block, in an input, or in data.bin (first byte, number of bytes)."""

    block: int | None = None
    input: int | None = None
    constant: tuple[int, int] | None = None
    offset: Any = 0

    def __post_init__(self) -> None:
        """Check that it is in one of them."""
        given = [each for each in (self.block, self.input, self.constant) if each is not None]
        _need(len(given) == 1, "a tensor is in several places, or in none")
        object.__setattr__(self, "offset", number(self.offset, "an offset"))

    @property
    def nothing(self) -> bool:
        """Return whether it has no bytes, and so no address."""
        return self.constant is not None and not self.constant[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """Layout of an input of a plan, or of an output, which is in a block or input."""

    dtype: _DTypeName
    sizes: list[Any]
    strides: list[Any]
    block: int | None = None
    input: int | None = None
    offset: Any = 0

    def __post_init__(self) -> None:
        """Check sizes and strides."""
        _need(len(self.sizes) == len(self.strides) <= 8, "an array has other strides than sizes")
        for name in ("sizes", "strides"):
            values = [number(value, f"one of its {name}") for value in getattr(self, name)]
            object.__setattr__(self, name, values)
        object.__setattr__(self, "offset", number(self.offset, "an offset"))

    def shape(self, rows: int, texts: int) -> tuple[int, ...]:
        """Return the sizes for these rows and texts."""
        return tuple(size.at(rows, texts) for size in self.sizes)

    def bytes(self, rows: int, texts: int) -> int:
        """Return the bytes from the first to the last element for these rows and texts."""
        shape = self.shape(rows, texts)
        steps = [stride.at(rows, texts) for stride in self.strides]
        last = sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        return (last + 1) * np.dtype(self.dtype).itemsize if math.prod(shape) else 0


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call of a function in C.

    Attributes:
        operator: what it is for, in messages.
        function: its name.
        fields: by name; arrays are flat lists.
        tensors: in their order.
        words: its structure as numbers of 8 bytes: for no row and text, for each row, for each text.
    """

    operator: str
    function: str
    fields: dict[str, Any]
    tensors: list[Place]
    words: tuple[list[int], list[int], list[int]] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check names and numbers."""
        _need(self.function in USES, f"there is no function {self.function!r}")
        structure = FUNCTIONS[self.function].takes
        names = [field.name for field in structure.fields]
        _need(sorted(self.fields) == sorted(names), f"{self.function} has other fields")
        parts = [(structure.size, 0, 0)]
        values: dict[str, Any] = {}
        for field in structure.fields:
            given = self.fields[field.name]
            flat = given if field.shape else [given]
            count = math.prod(field.shape)
            _need(isinstance(flat, list) and len(flat) == count, f"{field.name!r} has another shape")
            read = _double if field.kind == "double" else _integer
            found = [read(value, field.name) for value in flat]
            parts += [word for word, _ in found]
            each = [value for _, value in found]
            values[field.name] = each if field.shape else each[0]
        object.__setattr__(self, "fields", values)
        of = tuple([part[i] for part in parts] for i in range(3))
        object.__setattr__(self, "words", of)

    def at(self, rows: int, texts: int) -> dict[str, Any]:
        """Return the fields for these rows and texts."""
        return {name: _at(value, rows, texts) for name, value in self.fields.items()}

    @property
    def isa(self) -> str:
        """Return the instruction set that it names; "" where it names none."""
        number = self.fields.get("isa")
        return "" if number is None else tuple(ISAS)[number.base]


def _at(value: Any, rows: int, texts: int) -> Any:
    if isinstance(value, Affine):
        return value.at(rows, texts)
    return [_at(each, rows, texts) for each in value] if isinstance(value, list) else value


def _integer(value: Any, name: str) -> tuple[tuple[int, int, int], Affine]:
    is_negative = type(value) is int and -MOST < value < 0  # zero points, and -1 for "all"
    found = Affine(value) if is_negative else number(value, f"{name!r}")
    if name == "isa":
        is_known = found == Affine(found.base) and 0 <= found.base < len(ISAS)
        _need(is_known, f"there is no instruction set {found.base}")
    return (found.base, found.of_row, found.of_text), found


def _double(value: Any, name: str) -> tuple[tuple[int, int, int], float]:
    _need(isinstance(value, str) and len(value) < 40, f"{name!r} is not a number in hexadecimal")
    try:
        found = float.fromhex(value)
    except OverflowError as error:
        raise ValueError(str(error)) from error
    return (struct.unpack("<q", struct.pack("<d", found))[0], 0, 0), found


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Calls for a number of threads."""

    threads: int
    blocks: list[Any]
    inputs: list[Array]
    calls: list[Call]
    outputs: list[Array]

    def __post_init__(self) -> None:
        """Check that all that is named is there."""
        _need(1 <= self.threads <= MOST_THREADS, f"it has {self.threads} threads")
        sizes = [number(size, "a block") for size in self.blocks]
        object.__setattr__(self, "blocks", sizes)
        places: list[Array | Place] = [*self.outputs]
        places += [place for call in self.calls for place in call.tensors]
        for place in places:
            _need(place.block is None or 0 <= place.block < len(self.blocks), "a tensor has no block")
            _need(place.input is None or 0 <= place.input < len(self.inputs), "a tensor has no input")
        for output in self.outputs:
            _need((output.block is None) != (output.input is None), "an output is in no block or input")
        for call in self.calls:
            threads = call.fields.get("threads", Affine(1))
            _need(threads == Affine(threads.base), "threads depend on sizes")
            _need(1 <= threads.base <= self.threads, f"{call.function} has other threads than its plan")


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """plan.json."""

    format: Literal["nc-run"]
    schema: int
    nc: str
    c_code: str
    inputs: list[Named]
    outputs: list[str]
    texts: Texts | None
    plans: list[Plan]
    probes: list[Probe]

    def __post_init__(self) -> None:
        """Check that parts fit each other."""
        _need(self.plans and self.inputs and self.outputs, "it has no plan, input or output")
        _need(len(set(self.outputs)) == len(self.outputs), "outputs have the same name")
        names = [each.name for each in self.inputs]
        _need(len(set(names)) == len(names), "inputs have the same name")
        more = 0 if self.texts is None else 3 + len(self.texts.results)
        for plan in self.plans:
            _need(len(plan.inputs) == len(names) + more, "a plan has other inputs")
            _need(len(plan.outputs) == len(self.outputs), "a plan has other outputs")
            wanted = [each.dtype for each in self.inputs]
            if self.texts is not None:
                tokens = [_in_64_bits(dtype) for dtype in wanted] + ["int64"] * len(self.texts.results)
                _check_rows(plan, [*tokens, "int64", "int32", "int64"])
            else:
                fixed = all(size == Affine(size.base) for each in plan.inputs for size in each.sizes)
                _need(fixed, "sizes of its inputs depend on texts, which it has none of")
                _need([each.dtype for each in plan.inputs] == wanted, "inputs of a plan have other dtypes")
        if self.texts is not None:
            self._check_texts(self.texts, len(names))
        for probe in self.probes:
            counts = len(probe.inputs), len(probe.outputs)
            _need(counts == (len(names), len(self.outputs)), "a probe has other inputs or outputs")

    def _check_texts(self, texts: Texts, count: int) -> None:
        _need(len(texts.of_tokens) == len(self.outputs), "it has other outputs for tokens")
        _need(texts.mask is None or 0 <= texts.mask < count, "there is no such mask")
        for i, step in enumerate(texts.steps):
            _need(all(0 <= value < count + i for value in step.values), "a step takes a value of a later one")
        numbers = [each.dtype for each in self.inputs] + [step.dtype for step in texts.steps]
        known = all(0 <= i < len(numbers) and _in_64_bits(numbers[i]) == "int64" for i in texts.results)
        _need(known, "there is no such result of steps")
        _need(1 <= texts.longest < MOST and (texts.positions or 1) >= 1, "texts have other lengths")
        for plan in self.plans:
            for output, of_tokens in zip(plan.outputs, texts.of_tokens, strict=True):
                first = [Affine(1), Affine(0, 1)] if of_tokens else [Affine(0, 0, 1)]
                _need(output.sizes[: len(first)] == first, "an output has other sizes than its texts")


def _in_64_bits(dtype: str) -> str:
    return "int64" if np.dtype(dtype).kind in "iu" else dtype


def _check_rows(plan: Plan, dtypes: list[str]) -> None:
    """Check the inputs of a plan for rows: tokens, places, starts and firsts, see `texts`."""
    rows, texts = Affine(0, 1), Affine(0, 0, 1)
    tokens = [[Affine(1), rows]] * (len(dtypes) - 3)
    wanted = [*tokens, [rows], [texts._replace(base=1)], [texts]]
    _need([each.sizes for each in plan.inputs] == wanted, "inputs of a plan have other sizes")
    _need([each.dtype for each in plan.inputs] == dtypes, "inputs of a plan have other dtypes")


def document_of(value: Mapping[str, Any]) -> Document:
    """Return the document of parsed JSON.

    Raises:
        ValueError: it says what no exporter writes.
    """
    found: Document = built(Document, value, "plan.json")
    return found
