"""Codes of weights that several conversions of one model share."""

from __future__ import annotations

import torch

from nc.formats import TensorFormat
from nc.numerics.weights import quantize_weight

_Key = tuple[int, TensorFormat, int | None, int]
_Codes = tuple[torch.Tensor, torch.Tensor]


class KnownCodes:
    """Quantizes each weight once for each way; it keeps weights and codes as long as it exists."""

    def __init__(self) -> None:
        self._found: dict[_Key, tuple[torch.Tensor, _Codes]] = {}

    def of(self, weight: torch.Tensor, spec: TensorFormat, axis: int | None, groups: int = 1) -> _Codes:
        """Return copies of what `quantize_weight` returns."""
        key = id(weight), spec, axis, groups
        if key not in self._found:
            # the weight is kept, so that no other tensor gets its id
            self._found[key] = weight, quantize_weight(weight, spec, axis, groups)
        codes, scale = self._found[key][1]
        return codes.clone(), scale.clone()
