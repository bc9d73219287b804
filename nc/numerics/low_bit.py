"""Linear and embedding with a packed low-bit weight: dequantize, then compute.

The exact reference of every low-bit kernel.
"""

from __future__ import annotations

import torch

from nc.errors import InputError
from nc.formats import dtype as named
from nc.formats.tensor_format import low_bit
from nc.numerics.dynamic import quantize_dequantize_dynamic
from nc.numerics.packed_weight import PackedWeight

#: What activations are rounded to before a low-bit linear: nothing, bf16, or int8 with one symmetric
#: scale per token, or for each `BLOCK` of its elements.
ACT_DTYPES = ("fp32", "bf16", "int8", "int8_block32")
#: Those that are codes with a scale.
ROUNDED = ("int8", "int8_block32")
#: The last block of a token may be shorter.
BLOCK = 32


def round_activations(x: torch.Tensor, act_dtype: str) -> torch.Tensor:
    """fp32 values of int8 codes of `x`: from -127 to 127, times the largest magnitude / 127.

    Args:
        x: fp32, shape [..., K].
        act_dtype: "int8" or "int8_block32".
    """
    if act_dtype == "int8":
        return quantize_dequantize_dynamic(x, True, -127, 127, True)  # per token, symmetric
    inputs = x.shape[-1]
    blocks = torch.nn.functional.pad(x, (0, -inputs % BLOCK)).reshape(
        *x.shape[:-1], -(-inputs // BLOCK), BLOCK
    )
    return quantize_dequantize_dynamic(blocks, True, -127, 127, True).flatten(-2)[..., :inputs]  # as above


def linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    minimum: torch.Tensor | None,
    outer_scale: torch.Tensor | None,
    outer_minimum: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: str,
    in_features: int,
    act_dtype: str,
) -> torch.Tensor:
    """Return `x @ W.T + bias`, where W is dequantized from its packed codes and scales.

    Args:
        x: fp32, bf16 or fp16, shape [..., K].
        codes: packed codes of W, shape [N, K], as in `PackedWeight`.
        scale: the `PackedWeight`'s scales.
        zero: its zero points.
        minimum: its minima.
        outer_scale: its outer scales.
        outer_minimum: its outer minima.
        bias: shape [N].
        dtype: name of the number format.
        in_features: K.
        act_dtype: one of `ACT_DTYPES`: "bf16" multiplies bf16 activations by bf16 weights; for the others see
            `round_activations`.

    Returns:
        Shape [..., N], in the dtype of `x`.

    Raises:
        InputError: `x` does not have a floating-point dtype; an integer dtype would round the weight to 0.
    """
    if not x.is_floating_point():
        msg = (
            f"A linear of {in_features} inputs and {codes.shape[0]} outputs with a weight in {dtype} was "
            f"called with a tensor of {x.dtype}, shape {tuple(x.shape)}; it takes fp32, bf16 or fp16. Token "
            "ids go through an embedding first; convert other numbers with .float()."
        )
        raise InputError(msg)
    weight = stored_weight(
        codes, scale, zero, minimum, outer_scale, outer_minimum, dtype, in_features
    ).dequantize()
    kind = x.dtype
    if act_dtype == "bf16":
        x, weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
    elif act_dtype != "fp32":
        x = round_activations(x.float(), act_dtype).to(kind)
    return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype)).to(
        kind
    )


def linear_gradient(
    gradient: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    minimum: torch.Tensor | None,
    outer_scale: torch.Tensor | None,
    outer_minimum: torch.Tensor | None,
    dtype: str,
    in_features: int,
) -> torch.Tensor:
    """Return the gradient with respect to the input of `linear`: `gradient @ W`, fp32, shape [..., K].

    Activation rounding is treated as the identity (straight-through estimator).

    Args:
        gradient: gradient with respect to the output of `linear`, shape [..., N].
        codes: as in `linear`.
        scale: as in `linear`.
        zero: as in `linear`.
        minimum: as in `linear`.
        outer_scale: as in `linear`.
        outer_minimum: as in `linear`.
        dtype: as in `linear`.
        in_features: as in `linear`.
    """
    weight = stored_weight(codes, scale, zero, minimum, outer_scale, outer_minimum, dtype, in_features)
    return gradient.float() @ weight.dequantize()


def embedding(
    ids: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    minimum: torch.Tensor | None,
    outer_scale: torch.Tensor | None,
    outer_minimum: torch.Tensor | None,
    dtype: str,
    features: int,
    result: torch.dtype,
) -> torch.Tensor:
    """Rows of a packed weight of shape [rows, features], only these dequantized.

    Args:
        ids: integers, any shape.
        codes: as for `linear`, and so are the next five.
        scale: likewise.
        zero: likewise.
        minimum: likewise.
        outer_scale: likewise.
        outer_minimum: likewise.
        dtype: name of the number format.
        features: of a row.
        result: dtype of the result, shape [*ids.shape, features].
    """
    rows = ids.reshape(-1)

    def at(part: torch.Tensor | None) -> torch.Tensor | None:
        # formats of 8 bits have no index kernel; their bytes do
        if part is None or part.shape[0] != codes.shape[0]:  # of the whole table
            return part
        return (
            part.view(torch.uint8).index_select(0, rows).view(part.dtype)
            if part.element_size() == 1
            else part.index_select(0, rows)
        )

    # as a float embedding does, it refuses ids below 0, which `codes[rows]` would count from the end, and
    # masks
    picked = codes.index_select(0, rows)
    found_scale = at(scale)
    assert found_scale is not None
    weight = stored_weight(
        picked, found_scale, at(zero), at(minimum), at(outer_scale), at(outer_minimum), dtype, features
    )
    return weight.dequantize().to(result).reshape(*ids.shape, features)


def stored_weight(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    minimum: torch.Tensor | None,
    outer_scale: torch.Tensor | None,
    outer_minimum: torch.Tensor | None,
    dtype: str,
    features: int,
) -> PackedWeight:
    """Return the weight whose tensors an operator takes.

    Its `form` has what kernels choose by, not how the scales are stored.

    Args:
        codes: as for `linear`, and so are the next five.
        scale: likewise.
        zero: likewise.
        minimum: likewise.
        outer_scale: likewise.
        outer_minimum: likewise.
        dtype: name of the number format.
        features: K.
    """
    form = low_bit(
        dtype=named(dtype),
        group_size=features // scale.shape[1],
        symmetric=zero is None and minimum is None,
        float_zero=minimum is not None,
    )
    return PackedWeight(
        form=form,
        shape=(codes.shape[0], features),
        codes=codes,
        scale=scale,
        zero=zero,
        minimum=minimum,
        outer_scale=outer_scale,
        outer_minimum=outer_minimum,
    )
