"""How plans compute linears and 1 x 1 convolutions of codes in C (`rows.c`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from nc.backends.native.plans import c_functions, row_linears
from nc.backends.native.plans.operands import PlanTensor, WeightToPack
from nc.backends.native.plans.products import After, after_of
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import Refused, need
from nc.kernels import cpu, tuning
from nc.kernels.c_code import abi
from nc.kernels.c_code.isas import NUMBERS
from nc.kernels.onednn.descriptions import Geometry, PostOp
from nc.process.unavailable import Unavailable

#: What is written, and what the zero point of int8 codes is more in the C code.
_WRITTEN, _SHIFT = (torch.uint8, torch.float32, torch.int8), 128
_NOT_POINTWISE = (
    "it is not a linear or 1 x 1 convolution whose number of inputs is a multiple of 4, at most "
    f"{abi.CONSTANTS.most_inputs}"
)
#: AMX multiplies so many inputs at once.
AMX_STEP = 64
#: Features for which oneDNN has kernels that are faster than code for AVX2.
_BEYOND_AVX2 = ("avx512f", "avx_vnni", "avx512_vnni", "amx_int8")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Product:
    """What a linear or convolution computes.

    Attributes:
        x: codes [rows, K] whose rows may have gaps, or [N, C, ...] with channels last.
        result: fp32 or codes [rows, outputs], or [N, outputs, ...] with channels last.
        weight: codes [outputs, K], or [outputs, C / groups, ...].
        scales: of the weight, one or one for each output.
        bias: fp32, or None.
        post_ops: what follows, in order.
        other: what a `BinaryOp` adds.
        geometry: how the window moves; None for a linear.
        groups: of the channels.
    """

    x: PlanTensor
    result: PlanTensor
    weight: WeightToPack
    scales: torch.Tensor
    bias: torch.Tensor | None
    post_ops: tuple[PostOp, ...]
    other: PlanTensor | None = None
    geometry: Geometry | None = None
    groups: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """What makes results of the sums of a product.

        result = activation(scale * sum + bias + added_scale * (added - added_zero_point))
        code = round(result * inverse + zero_point)

    Attributes:
        after: what is added, and the activation.
        inverse: 1 / scale of the codes, times what the result is multiplied by; 0 for fp32.
        zero_point: of uint8, and what is added to the result; for int8 codes 128 more, because C makes them
            as uint8.
        factor: that scale and bias have besides.
        offset: that is added to the bias then.
    """

    after: After
    inverse: float = 0.0
    zero_point: float = 0.0
    factor: float = 1.0
    offset: float = 0.0

    def plain(self) -> Finish:
        """Return the same with the step to codes as a part of scale, bias and bounds.

        C needs fewer operations for it. An activation that is more than bounds stays as it is.
        """
        bounds = _bounds(self.after)
        if bounds is None or self.inverse <= 0:
            return self
        low, high = (min(max(bound * self.inverse + self.zero_point, 0.0), 255.0) for bound in bounds)
        added_scale = self.after.scale * self.inverse
        nothing = self.after.added == "nothing"
        offset = self.zero_point - (0.0 if nothing else self.after.zero_point * added_scale)
        after = After(self.after.added, added_scale, 0, "clip", low, high)
        return Finish(after, 1.0, 0, self.inverse, offset)

    def fields(self) -> dict[str, abi.Value]:
        """Return it as fields of the functions in C."""
        after = self.after
        return {
            "added": abi.ADDED.number(after.added),
            "activation": abi.ACTIVATION.number(after.activation),
            "alpha": after.alpha,
            "beta": after.beta,
            "added_scale": after.scale,
            "added_zero_point": after.zero_point,
            "inverse": self.inverse,
            "zero_point": self.zero_point,
        }


def _bounds(after: After) -> tuple[float, float] | None:
    """Return the bounds that are all that an activation does; None where it does more."""
    match after.activation:
        case "identity":
            return -math.inf, math.inf
        case "relu":
            return 0.0, math.inf
        case "clip":
            return after.alpha, after.beta
    return None


def finish_of(a: Mapping[str, Any], product: Product) -> Finish:
    """Return what makes the results of a product, of the arguments of its node.

    Raises:
        Refused: there is no C code for its dtypes, or for what follows it.
    """
    x, result = product.x.tensor, product.result.tensor
    need(x.dtype is torch.uint8 and result.dtype in _WRITTEN, f"it reads {x.dtype} and writes {result.dtype}")
    need(result.numel(), "its result has no element")
    after = after_of(product.post_ops)
    if result.dtype is torch.float32:
        need((after.factor, after.term) == (1.0, 0.0), "numbers follow its activation, and it gives fp32")
        return Finish(after)
    shift, scale = _SHIFT if result.dtype is torch.int8 else 0, a["output_scale"]
    return Finish(after, after.factor / scale, a["output_zero_point"] + shift + after.term / scale)


def is_pointwise(product: Product) -> bool:
    """Return whether each row of the result reads one row of codes."""
    g, (_, inputs, *window) = product.geometry, product.weight.tensor.shape
    stays = g is None or (math.prod(window) == 1 and set(g.strides) == {1} and not any((*g.before, *g.after)))
    return product.groups == 1 and inputs % 4 == 0 and inputs <= abi.CONSTANTS.most_inputs and stays


def rows_of(product: Product) -> dict[str, abi.Value]:
    """Fields of the rows that a pointwise product reads."""
    x, inputs = product.x.tensor, product.weight.tensor.shape[1]
    need(product.other is None or product.other.tensor.is_contiguous(), "what it adds has gaps")
    stride = x.stride(0) if product.geometry is None else inputs
    return {"inputs": inputs, "stride": stride, "rows": x.numel() // inputs}


def fields_of(recorder: Recorder, product: Product, finish: Finish) -> dict[str, abi.Value]:
    """Fields that all products of codes have."""
    return {
        "threads": recorder.threads,
        "outputs": product.weight.tensor.shape[0],
        "to": c_functions.NUMBERS[product.result.tensor.dtype],
        **finish.fields(),
    }


def tensors_of(
    a: Mapping[str, Any],
    product: Product,
    finish: Finish,
    packed: torch.Tensor,
    sums: torch.Tensor,
) -> list[PlanTensor | torch.Tensor]:
    """Tensors that all products of codes take; numbers of outputs are as many as the weight's `sums`."""
    outputs, size = product.weight.tensor.shape[0], sums.numel()
    scale, bias = (
        row_linears.for_outputs(v, outputs, size) for v in (product.scales.reshape(-1), product.bias)
    )
    factors = (
        (scale * a["x_scale"]).double() * finish.factor,
        bias.double() * finish.factor + finish.offset,
    )
    shift = sums * -a["x_zero_point"]
    return [product.result, product.x, packed, shift, *(each.float() for each in factors)]


def kernels_beyond_avx2() -> str:
    """Return for what this CPU has kernels in oneDNN that code for AVX2 does not take the place of.

    It is "" for a CPU with AVX2 alone.
    """
    features = cpu.machine_features()
    found = next((name for name in _BEYOND_AVX2 if name in features), "")
    return f"oneDNN has kernels for {found}" if found else ""


def why_unavailable() -> str:
    """Why products of codes are not computed in C here; "" when they are."""
    found = row_linears.code(row_linears.CODES)
    if isinstance(found, Unavailable):
        return found.reason
    if found.isa not in tuning.CODE_PRODUCTS.value:
        return f"oneDNN is faster with {found.isa}"
    return kernels_beyond_avx2() if found.isa == "avx2" else ""


def multiply(recorder: Recorder, node: fx.Node, a: Mapping[str, Any], product: Product) -> None:
    """Append the call of a pointwise product; raises `Refused` where there is no function for it.

    Args:
        recorder: of the plan.
        node: of the graph.
        a: its arguments, of which scales and zero points are read.
        product: what to compute.
    """
    why, found = why_unavailable(), row_linears.code(row_linears.CODES)
    need(not why or recorder.only_c, why)
    if isinstance(found, Unavailable):
        raise Refused(found.reason)
    need(is_pointwise(product), _NOT_POINTWISE)
    finish, shapes, weight = finish_of(a, product), rows_of(product), product.weight
    plain = finish.plain() if product.result.tensor.dtype is not torch.float32 else finish
    packed, sums = recorder.weights.formed(weight, "rows ", lambda: _packed(recorder.in_memory(weight)))
    tensors = tensors_of(a, product, plain, packed, sums)
    more = [] if product.other is None else [product.other]
    fits_amx = weight.tensor.shape[1] % AMX_STEP == 0
    isa = next(each for each in row_linears.isas(row_linears.CODES) if fits_amx or each != "amx")
    fields = fields_of(recorder, product, plain) | shapes | {"isa": NUMBERS[isa]}
    recorder.call_function(found.codes, fields, [*tensors, *more], node, factors=2)


def _packed(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [outputs, inputs, 1, ...] as `code_product` reads it."""
    return row_linears.pack(row_linears.CODES, codes.reshape(codes.shape[:2]))
