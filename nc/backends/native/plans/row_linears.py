"""How plans compute linears of rounded rows (`rows.c`), for each format that rows can have."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.plans.layouts import in_rows
from nc.backends.native.plans.operands import PlanTensor, check_sizes
from nc.backends.native.plans.products import after_of, bias_of, codes_of, post_ops_of
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import Refused, need
from nc.kernels import cpu
from nc.kernels.c_code import abi
from nc.kernels.c_code.build import load_on_threads
from nc.kernels.c_code.calls import Function, function_of
from nc.kernels.c_code.isas import ISAS, NUMBERS
from nc.kernels.c_code.limit import used
from nc.kernels.onednn.descriptions import contiguous_strides
from nc.numerics import int16_pairs
from nc.process.large_pages import LargePages
from nc.process.unavailable import Unavailable

#: Rows and outputs of a tile, and what outputs are filled up to.
TILE, PAIR = 16, 32
#: Bytes of a row in a tile.
_BYTES = 64
#: Of packed weights: what is read from there limits the speed of few rows.
_MEMORY = LargePages()
_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")


@dataclasses.dataclass(frozen=True, slots=True)
class RowFormat:
    """What rows are rounded to, and their weights.

    Attributes:
        name: in profiles, after the instruction set; "" for codes.
        dtype: of a number of a rounded row.
        function: in C, which rounds rows.
        isas: instruction sets with a product of such rows, the best one first.
        behind: bytes that each row has after all tiles.
        sums: int8 weight [outputs, inputs] → what zero points are multiplied by, int32 [outputs].
    """

    name: str
    dtype: torch.dtype
    function: str
    isas: tuple[str, ...]
    behind: int
    sums: Callable[[torch.Tensor], torch.Tensor]

    @property
    def depth(self) -> int:
        """Inputs that one instruction multiplies."""
        return _BYTES // self.dtype.itemsize

    @property
    def bf16(self) -> bool:
        """Whether rows and weights are bf16."""
        return self.dtype is torch.bfloat16

    def held(self, rows: int, inputs: int) -> int:
        """Return the elements of rounded rows in memory."""
        in_tiles = -(-inputs // self.depth) * self.depth
        return -(-rows // TILE) * TILE * (in_tiles + self.behind // self.dtype.itemsize)


#: Codes from 0 to 255, and a scale and a zero point for each row.
CODES = RowFormat(
    "",
    torch.uint8,
    "round_rows",
    ("amx", "avx512_vnni", "avx_vnni", "avx2"),
    8,
    lambda codes: codes.sum(1, dtype=torch.int32),
)
BF16 = RowFormat(
    "bf16",
    torch.bfloat16,
    "bf16_rows",
    ("amx", "avx512_bf16"),
    0,
    lambda _: torch.zeros(1, dtype=torch.int32, device="cpu"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Code:
    """The functions in C for a format, and the best instruction set for them.

    Attributes:
        rounds: rows of fp32.
        product: of rounded rows.
        codes: product of codes that have one scale and one zero point.
        norm: of rows of fp32, which it rounds.
        chain: product of rounded rows, whose results are rounded again.
        isa: of the products.
    """

    rounds: Function
    product: Function
    codes: Function
    norm: Function
    chain: Function
    isa: str


@functools.cache
def _library() -> ctypes.CDLL | Unavailable:
    """Return the library on torch's threads, or why there is none."""
    return load_on_threads("rows")


@functools.cache
def _tiles() -> bool:
    """Return whether the operating system lets this process use AMX."""
    library = _library()
    return not isinstance(library, Unavailable) and bool(library.nc_rows_amx())


def isas(form: RowFormat) -> tuple[str, ...]:
    """Instruction sets that this CPU has and the C code may use, the best one first."""
    library = _library()
    names = () if isinstance(library, Unavailable) else used(library)
    return tuple(
        name
        for name in form.isas
        if name in names and not cpu.code_lacks(ISAS[name]) and (name != "amx" or _tiles())
    )


def code(form: RowFormat) -> _Code | Unavailable:
    """Return the code for this CPU, or why there is none."""
    library, found = _library(), isas(form)
    if isinstance(library, Unavailable):
        return library
    if not found:
        least = form.isas[-1]
        return Unavailable(f"there is no {', '.join(cpu.code_lacks(ISAS[least])) or f'code for {least}'}")
    product, codes, norm, chain = (
        function_of(library, name, f"{name} {found[0]} {form.name}".rstrip())
        for name in ("row_product", "code_product", "norm_rows", "row_chain")
    )
    return _Code(function_of(library, form.function), product, codes, norm, chain, found[0])


def why_unavailable(form: RowFormat) -> str:
    """Why there are no such functions here; "" when there are."""
    found = code(form)
    return found.reason if isinstance(found, Unavailable) else ""


def why_not_weight(codes: torch.Tensor) -> str:
    """Why the product of codes does not take a weight here; "" when it does.

    Args:
        codes: int8, shape [outputs, inputs].
    """
    found = code(CODES)
    adds_pairs = not isinstance(found, Unavailable) and found.isa == "avx2"
    if adds_pairs and not int16_pairs.fit(codes, int16_pairs.PAIR_LIMIT):
        return "its weight is too large for AVX2, which adds pairs of products in 16 bits"
    return ""


def _available(form: RowFormat) -> _Code:
    found = code(form)
    if isinstance(found, Unavailable):
        raise Refused(found.reason)
    return found


def round_rows(form: RowFormat, recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """Round the rows of `x` in C: numbers in tile order, with the shape of the input."""
    found, x = _available(form), _fp32_rows(recorder, node, a["x"])
    *before, inputs = x.tensor.shape
    rows = math.prod(before)
    memory = recorder.new((form.held(rows, inputs),), (1,), form.dtype)
    fields = {"rows": rows, "inputs": inputs, "stride": inputs, "threads": recorder.threads}
    tensors = [memory, x]
    if not form.bf16:
        per_row = a["per_row"]
        fields |= {"symmetric": a["symmetric"], "per_row": per_row, "isa": NUMBERS[found.isa]}
        tensors += [] if per_row else [recorder.new((rows, 2), (2, 1), torch.float32)]
    recorder.call_function(found.rounds, fields, tensors, node)
    return _in_shape(memory, x.tensor.shape)


def norm(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> list[PlanTensor]:
    """Norm the rows of `x` in C: the normed rows where they are kept, and the rounded ones."""
    form = BF16 if a["bf16"] else CODES
    found, x = _available(form), _fp32_rows(recorder, node, a["x"])
    *before, inputs = x.tensor.shape
    rows = math.prod(before)
    memory = recorder.new((form.held(rows, inputs),), (1,), form.dtype)
    normed = _kept(recorder, x.tensor.shape, keeps=a["keeps_normed"])
    fields = _followers(a) | {"rows": rows, "inputs": inputs, "stride": inputs, "bf16": form.bf16}
    fields |= {"threads": recorder.threads, "isa": NUMBERS[found.isa]}
    factors = [recorder.constant(a[name]) for name in ("norm_weight", "norm_bias")]
    check_sizes(factors[0].numel() == inputs, node, x.tensor.shape, factors[0].shape)
    recorder.call_function(found.norm, fields, [memory, normed or _NOTHING, x, *factors], node)
    return [normed or memory, _in_shape(memory, x.tensor.shape)]


def multiply(form: RowFormat, recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """Multiply rounded rows with a weight in C; what follows the product goes with it."""
    found, product = _available(form), _product(form, recorder, node, a)
    result = recorder.new(product.sizes, contiguous_strides(product.sizes), torch.float32)
    more = [] if product.other is None else [product.other]
    tensors = [result, *product.tensors, *more]
    recorder.call_function(found.product, product.fields | {"isa": NUMBERS[found.isa]}, tensors, node, 2)
    return result


def chain(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> list[PlanTensor]:
    """Multiply rounded rows in C and round the product's result, perhaps after a norm.

    The results are those of the product and of the norm, if they are kept, and the rounded ones.
    """
    form = BF16 if a["bf16"] else CODES
    found, product = _available(form), _product(form, recorder, node, a)
    *before, outputs = product.sizes
    need(form.bf16 or outputs <= abi.CONSTANTS.most_inputs, "its results are too many for a product in int32")
    memory = recorder.new((form.held(math.prod(before), outputs),), (1,), form.dtype)
    sums = recorder.new(product.sizes, contiguous_strides(product.sizes), torch.float32)
    normed = _kept(recorder, product.sizes, keeps=a["keeps_normed"])
    factors = [recorder.optional_constant(a[name]) for name in ("norm_weight", "norm_bias")]
    results = [memory, sums, normed or _NOTHING]
    tensors = [*results, *product.tensors, product.other or _NOTHING]
    tensors += [_NOTHING if factor is None else factor for factor in factors]
    fields = product.fields | _followers(a) | {"keeps": a["keeps_sum"], "isa": NUMBERS[found.isa]}
    first = len(results) - 1
    recorder.call_function(found.chain, fields, tensors, node, factors=2, first=first, shown={"keeps": True})
    return [sums, normed or sums, _in_shape(memory, product.sizes)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Product:
    """What a product of rounded rows reads.

    Attributes:
        sizes: of its result.
        fields: of the function in C, but for the instruction set.
        tensors: rows, packed weight, its sums, scale and bias.
        other: what is added, or None.
    """

    sizes: tuple[int, ...]
    fields: dict[str, abi.Value]
    tensors: list[PlanTensor | torch.Tensor]
    other: PlanTensor | None


def _product(form: RowFormat, recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> _Product:
    rows = recorder.read(a["rows"])
    weight, bias = codes_of(recorder, a["weight"]), bias_of(recorder, a["bias"])
    scale, other = recorder.optional_constant(a.get("scale")), recorder.optional(a["other"])
    need(rows.tensor.dtype is form.dtype, "its input is not rounded")
    (outputs, inputs), *before = weight.tensor.shape, *rows.tensor.shape[:-1]
    sizes = (*before, outputs)
    check_sizes(rows.tensor.shape[-1] == inputs, node, rows.tensor.shape, weight.tensor.shape)
    if other is not None:
        check_sizes(tuple(other.tensor.shape) == sizes, node, other.tensor.shape, sizes)
        other = in_rows(recorder, other, node)
    packed, sums = recorder.weights.formed(
        weight, f"rows {form.name}", lambda: pack(form, recorder.in_memory(weight))
    )
    after = after_of(post_ops_of(a, "activation"))
    fields: dict[str, abi.Value] = {
        "rows": math.prod(before),
        "inputs": inputs,
        "outputs": outputs,
        "threads": recorder.threads,
        "bf16": form.bf16,
        "activation": abi.ACTIVATION.number(after.activation),
        "alpha": after.alpha,
        "beta": after.beta,
    }
    factors = [for_outputs(values, outputs, packed.shape[0] * TILE) for values in (scale, bias)]
    held = PlanTensor(_from_begin(rows.tensor), rows.root)
    return _Product(sizes, fields, [held, packed, sums, *factors], other)


def _fp32_rows(recorder: Recorder, node: fx.Node, value: Any) -> PlanTensor:
    """Return an fp32 tensor in row-major order."""
    x = in_rows(recorder, recorder.read(value), node)
    need(x.tensor.dtype is torch.float32, f"its input is {x.tensor.dtype}")
    return x


def _in_shape(memory: PlanTensor, shape: Sequence[int]) -> PlanTensor:
    """Return rounded rows with the shape of what was rounded."""
    return PlanTensor(memory.tensor[: math.prod(shape)].view(*shape), memory.root)


def _kept(recorder: Recorder, shape: Sequence[int], *, keeps: bool) -> PlanTensor | None:
    return recorder.new(shape, contiguous_strides(shape), torch.float32) if keeps else None


def _followers(a: Mapping[str, Any]) -> dict[str, abi.Value]:
    """Fields of what follows a row."""
    names = {"norm": abi.NORM.number(a["norm"])}
    return names | {"epsilon": a["epsilon"], "symmetric": a["symmetric"]}


def pack(form: RowFormat, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight as `row_product` reads it.

    Args:
        form: of the rows that it is multiplied with.
        weight: int8 or bf16, shape [outputs, inputs].

    Returns:
        The weight, shape [outputs / 16, inputs / depth, 16, 16, depth / 16], filled up with zeros: outputs to
        a multiple of 32, inputs to one of the format's depth; and its `sums`.
    """
    outputs, inputs = weight.shape
    filled = torch.nn.functional.pad(weight, (0, -inputs % form.depth, 0, -outputs % PAIR))
    panels, blocks = filled.shape[0] // TILE, filled.shape[1] // form.depth
    packed = filled.view(panels, TILE, blocks, TILE, form.depth // TILE).permute(0, 2, 3, 1, 4)
    return _MEMORY.copied(packed), form.sums(filled)


def _from_begin(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of the memory that a tensor begins."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((size,), (1,))


def for_outputs(values: torch.Tensor | None, outputs: int, size: int) -> torch.Tensor:
    """Return one fp32 number for each output, 0 for those that fill up the last panels."""
    result = torch.zeros(size, dtype=torch.float32, device="cpu")
    if values is not None:
        result[:outputs] = values.detach().float().expand(outputs)
    return result
