"""What keeps captured graphs and models right in a process that has imported IPEX.

IPEX replaces torch's layer norm for all models. Its own one is wrong over several dimensions, unless
gradients are recorded: it reads past the end of the weights. It also replaces the embedding bags that add
rows up, by an operator that exists nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import re

import torch
from torch import fx

from nc.backends.passes import Pass
from nc.graph.catalogue import input_node, schema_arguments
from nc.graph.fx_utils import add_constant, call_function, constant_value, fqn_of, take_over

aten = torch.ops.aten
_OWN_BAG = "torch_ipex.embedding_bag.default"


def flat_layer_norms(module: fx.GraphModule) -> None:
    """Make layer norms over several dimensions ones over their product."""
    for node in [n for n in module.graph.nodes if n.target is aten.layer_norm.default]:
        a = schema_arguments(node)
        x, shape = a["input"], list(a["normalized_shape"])
        if len(shape) == 1:
            continue
        with module.graph.inserting_before(node):
            flat = call_function(module.graph, aten.flatten.using_ints, (x, -len(shape), -1))
            weights = [
                w and call_function(module.graph, aten.reshape.default, (w, [-1]))
                for w in (a["weight"], a["bias"])
            ]
        with module.graph.inserting_after(node):
            back = call_function(module.graph, aten.unflatten.int, (node, -1, shape))
        node.replace_all_uses_with(back, delete_user_cb=functools.partial(operator.is_not, back))
        node.args, node.kwargs = (flat, [math.prod(shape)], *weights, a["eps"]), {}
        back.meta["val"] = node.meta["val"]
        sizes = [*node.meta["val"].shape[: -len(shape)], math.prod(shape)]
        flat.meta["val"] = node.meta["val"] = node.meta["val"].new_empty(sizes)
        for weight in [w for w in weights if w is not None]:
            weight.meta["val"] = input_node(weight).meta["val"].new_empty([math.prod(shape)])
            value = constant_value(module, weight)
            if value is not None:
                fqn = fqn_of(weight)
                weight.replace_all_uses_with(
                    add_constant(module, node, f"{re.sub(r'[^a-zA-Z0-9_]', '_', fqn)}_flat", value, fqn)
                )


def embedding_bags_of_torch(module: fx.GraphModule) -> None:
    """IPEX's embedding bag becomes torch's: other engines, and machines without IPEX, know that one."""
    for node in [n for n in module.graph.nodes if str(n.target) == _OWN_BAG]:
        a = schema_arguments(node)
        tensors = [a[name] for name in ("weight", "indices", "offsets")]
        sums = (
            False,
            0,
            a["sparse"],
            None,
            a["include_last_offset"],
        )  # not scaled by frequency, mode 0, no weights of samples
        with module.graph.inserting_before(node):
            bag = call_function(module.graph, aten.embedding_bag.default, (*tensors, *sums))
            rows = call_function(module.graph, operator.getitem, (bag, 0))
        bag.meta["val"] = aten.embedding_bag.default(*(t.meta["val"] for t in tensors), *sums)
        take_over(rows, node)
        node.replace_all_uses_with(rows)
        module.graph.erase_node(node)


def right_layer_norms(model: torch.nn.Module) -> contextlib.AbstractContextManager[object]:
    """Record gradients while a model with such layer norms runs."""
    wide = any(isinstance(m, torch.nn.LayerNorm) and len(m.normalized_shape) > 1 for m in model.modules())
    return torch.enable_grad() if wide else contextlib.nullcontext()


CAPTURE_PASSES = (
    Pass("flat_layer_norms", flat_layer_norms, avoids="computes layer norms over several dimensions wrongly"),
    Pass(
        "embedding_bags_of_torch",
        embedding_bags_of_torch,
        avoids="leaves an operator in the graph that no other engine has",
    ),
)
