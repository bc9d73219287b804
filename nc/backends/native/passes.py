"""How a QDQ graph becomes a graph of oneDNN calls: two visible, ordered lists for all that runs these."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from nc.backends.dynamic import replace_dynamic, why_not_dynamic
from nc.backends.low_bit.graph import replace_low_bit
from nc.backends.native.bf16 import compute_in_bf16, drop_round_trips, why_not_bf16
from nc.backends.native.compiled import functional, name_convolutions
from nc.backends.native.factors import fold_factors, sum_first
from nc.backends.native.fuse import fuse, note_shapes, why_not_int8
from nc.backends.native.low_bit_rows import replace_low_bit_rows, why_not_rows
from nc.backends.native.merge import merge
from nc.backends.native.operators import norm, rotary, row_linear
from nc.backends.native.operators.bf16_attention import replace_bf16_attention
from nc.backends.native.operators.bf16_linear import replace_bf16_linears
from nc.backends.native.operators.dynamic_attention import (
    replace_dynamic_attention,
    why_not_dynamic_attention,
)
from nc.backends.native.operators.dynamic_convolution import (
    fuse_rounded,
    round_inputs,
    why_not_dynamic_convolution,
)
from nc.backends.native.operators.finished_convolution import fuse_finished
from nc.backends.native.operators.mask import restore_masks
from nc.backends.native.operators.matmul import fuse_products, signed, why_not_product
from nc.backends.native.operators.row_chain import chain_rows
from nc.backends.native.operators.transposed_convolution import fuse_transposed, why_not_transposed
from nc.backends.native.qdq_rewrites import pool_codes, remaining
from nc.backends.native.recurrent import replace_recurrent, why_not_recurrent
from nc.backends.passes import Pass
from nc.backends.rewrites.attention import recompose
from nc.backends.rewrites.codes import hoist, unsigned
from nc.backends.torchscript import explicit_clamps
from nc.graph.catalogue import CONVOLUTIONS
from nc.graph.fx_utils import drop_unused, inline


def kernels(
    example: Sequence[torch.Tensor], *, program: bool = False, products: bool = False
) -> tuple[Pass, ...]:
    """Operators become calls of kernels.

    Args:
        example: flat inputs, whose sizes a program's weights are laid out for.
        program: for AOTInductor, which compiles low-bit operators by itself.
        products: also products of two activations, transposed and dynamic convolutions and rotary embeddings,
            for which plans have kernels and torch has not.
    """
    right_sides = (Pass("signed_codes", signed, why_not_product, "int8"),) if products else ()
    own = (
        (
            Pass("rotary", rotary.recompose_rotary, rotary.why_not_rotary, rotary.NAME),
            Pass("products", fuse_products),
            Pass("transposed", fuse_transposed, why_not_transposed, "int8"),
            Pass("finished_convolutions", fuse_finished),
        )
        if products
        else ()
    )
    rounded = (Pass("rounded_images", round_inputs, why_not_dynamic_convolution, "int8"),) if products else ()
    # asked why not in each graph: where none of its linears is taken, no plan may run it
    replace_rows = row_linear.replace_row_linears if products else lambda _: None
    why_not_torch = functools.partial(why_not_dynamic, besides=CONVOLUTIONS if products else ())
    replace_attention = replace_dynamic_attention if products else lambda _: None
    shapes, low_bit = (
        Pass("shapes", functools.partial(note_shapes, example=example)),
        Pass("low_bit_kernels", functools.partial(replace_low_bit, backend="native")),
    )
    low_bit_rows = functools.partial(replace_low_bit_rows, example=example, replace=products)
    return (
        *(() if program else (Pass("low_bit_rows", low_bit_rows, why_not_rows, row_linear.NAME),)),
        shapes if program else low_bit,
        Pass("recurrent_layers", replace_recurrent, why_not_recurrent, "int8"),
        Pass("row_linears", replace_rows, row_linear.why_not_row_linear, row_linear.NAME),
        Pass("dynamic_attention", replace_attention, why_not_dynamic_attention, "int8"),
        Pass("dynamic_kernels", replace_dynamic, why_not_torch, "int8"),
        *(
            (Pass("bf16_attention", replace_bf16_attention), Pass("bf16_linears", replace_bf16_linears))
            if products
            else ()
        ),
        Pass("bf16", compute_in_bf16, why_not_bf16, "bf16"),
        Pass("attention", recompose),
        *((Pass("masks", restore_masks),) if products else ()),
        Pass("norms", norm.recompose_norms, norm.why_not_norm, norm.NAME),
        Pass("factors", fold_factors),  # of weights that products share, which keep their codes
        Pass("sums_first", sum_first),
        Pass("unsigned_codes", unsigned),
        *right_sides,
        Pass("early_codes", hoist),
        Pass("bf16_round_trips", drop_round_trips),
        Pass("merged_linears", merge),
        *own,
        *rounded,
        Pass("static_kernels", fuse, why_not_int8, "int8"),
        *((Pass("row_chains", chain_rows),) if products else ()),
        *((Pass("dynamic_convolutions", fuse_rounded),) if products else ()),
    )


def finish(*, program: bool = False) -> tuple[Pass, ...]:
    """Return the passes that make what is left around the kernels fit to run.

    An executor can run it, or AOTInductor can compile it as a `program`.
    """
    here = (
        Pass("pools_of_codes", pool_codes),
        Pass("explicit_clamps", explicit_clamps),
        Pass("converters", remaining),
    )
    compiled = (
        Pass("functional_sums", functional),
        Pass("inductor_names", name_convolutions),
        Pass("inlined_converters", inline),
    )
    return (*(compiled if program else here), Pass("unused_constants", drop_unused))
