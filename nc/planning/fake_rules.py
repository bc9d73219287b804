"""Values of a configuration → what is simulated of one operator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import fx

from nc.errors import ConfigError
from nc.formats import FakeSpec, FakeTensorSpec, TensorFormat
from nc.formats.fake_spec import ROLES
from nc.graph.fake_quant import roles_of
from nc.graph.tensor_meta import dim_of


def fake_spec(values: Mapping[str, Any], kind: str, node: fx.Node) -> FakeSpec:
    """Return the resolved specs of the roles that an operator has.

    Args:
        values: role → spec, or None or "fp32" where the role stays fp32.
        kind: of the operator.
        node: the operator in the captured graph.

    Raises:
        ConfigError: values that contradict each other, an axis that a tensor has not, or blocks that do not
            cover it.
    """
    tensors = roles_of(node, kind)
    specs = {
        role: values[role].resolved(role, kind)
        for role in ROLES
        if isinstance(values.get(role), FakeTensorSpec) and role in tensors
    }
    for role, spec in specs.items():
        _check_blocks(spec, role, tensors[role])
    return FakeSpec(**specs)


def _check_blocks(form: TensorFormat, role: str, node: fx.Node) -> None:
    """Raise ConfigError if blocks do not cover a tensor.

    A size that differs between calls counts as one that they do cover.
    """
    sizes, free = [dim_of(size) for size in node.meta["val"].shape], math.prod(form.granularity.shape)
    try:
        form.granularity.block_size([size if isinstance(size, int) else free for size in sizes])
    except ConfigError as error:
        shape = ", ".join(str(size) if isinstance(size, int) else "any" for size in sizes)
        msg = f"{role} as {form} does not fit its shape ({shape}). {error}"
        raise ConfigError(msg) from error
