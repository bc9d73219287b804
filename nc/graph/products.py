"""Weights of operators that nc has no int8 form of, such as products of stacked experts.

They stay fp32, and the report must say so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nc.formats.reasons import Cause
from nc.graph.plan import Plan

_CAUSES = (Cause.NO_INTEGER_FORM, Cause.CUSTOM_OPERATOR, Cause.REWRITABLE)


@dataclass(frozen=True, slots=True)
class UnknownProduct:
    """A weight that such an operator reads.

    Attributes:
        operator: "namespace::name" of the operator, without "aten::".
        weight: name of the parameter.
        shape: of the weight.
    """

    operator: str
    weight: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


def unknown_products(plan: Plan) -> tuple[UnknownProduct, ...]:
    """All of a plan, each weight once."""
    stuck = [d for d in plan.decisions if any(map(d.stays_for, _CAUSES))]
    return tuple(
        {name: UnknownProduct(d.kind, name, shape) for d in stuck for name, shape in d.weights}.values()
    )


def unknown_text(products: Sequence[UnknownProduct]) -> str:
    """Return a line about them, the largest weights first."""
    largest = sorted(products, key=lambda product: -product.size)
    shown = ", ".join(f"{product.weight} {list(product.shape)}" for product in largest[:3])
    more = f" and {len(products) - 3} more" if len(products) > 3 else ""
    operators = ", ".join(dict.fromkeys(product.operator for product in products))
    return (
        f"{sum(p.size for p in products) / 1e6:.1f} M weights stay fp32, as nc has no int8 for what reads "
        f"them ({operators}): {shown}{more}"
    )
