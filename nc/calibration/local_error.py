"""What dynamic quantization costs each operator on its own.

It compares its int8 result with its fp32 result, for the inputs that it has in fp32.

Dynamic quantization has no calibration that could show a bad operator, and the errors of other operators can
mask the error of one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.graph.catalogue import kind_of_node
from nc.graph.fx_utils import constant_of, run_with
from nc.graph.recurrent import CELLS
from nc.numerics.metrics import sqnr_db

#: Results below this, in dB, are hardly more than noise: the error has a tenth of the power of the result.
LEAST_DB = 10.0


def local_errors(
    module: fx.GraphModule,
    quantized: fx.GraphModule,
    operators: Collection[str],
    example: Sequence[torch.Tensor],
) -> dict[str, float]:
    """SQNR in dB of the results of operators; of the worst result where several are read.

    Args:
        module: the fp32 graph.
        quantized: a copy of it in which these operators are quantized, with nodes between them that have the
            same names.
        operators: names of dynamic operators.
        example: flat inputs.

    Returns:
        By the name of the operator. Those whose fp32 result is zero or not finite are left out, since it has
        no SQNR.
    """
    originals = {node.name: node for node in module.graph.nodes}
    replaced = {
        node.meta["operator"]: node
        for node in quantized.graph.nodes
        if node.meta.get("operator") in operators
    }
    errors: dict[str, float] = {}

    def compare(node: fx.Node, value: Any, env: Mapping[fx.Node, Any]) -> Any:
        name = str(node.meta.get("operator"))
        if name in replaced:

            def value_of(source: fx.Node) -> Any:
                original = originals.get(source.name)
                if original is not None and original in env:
                    return env[original]
                return constant_of(quantized, source) if source.op == "get_attr" else computed(source)

            def computed(source: fx.Node) -> Any:
                assert callable(source.target), f"{source.name} computes nothing"
                args, kwargs = fx.map_arg((source.args, source.kwargs), value_of)
                return source.target(*args, **kwargs)

            got = computed(replaced[name])
            pairs = zip(
                _read(node, value),
                _read(node, _of_cell(got) if kind_of_node(node) in CELLS else got),
                strict=True,
            )
            found = [sqnr_db(expected, result) for expected, result in pairs if _has_signal(expected)]
            if found:
                errors[name] = min(found)
        return value

    run_with(module, example, compare)
    return errors


def _of_cell(results: Sequence[torch.Tensor]) -> Any:
    """Return what a cell gives, out of what a layer of one step gives in its place."""
    states = tuple(state.squeeze(0) for state in results[1:])
    return states if len(states) > 1 else states[0]


def _read(node: fx.Node, value: Any) -> list[torch.Tensor]:
    """Return the results of an operator that other operators read."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [value[index] for _, index in dict.fromkeys(user.args for user in node.users)]


def _has_signal(value: torch.Tensor) -> bool:
    return bool(value.isfinite().all()) and bool(value.any())
