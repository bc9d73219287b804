"""Which share of a model's weights and multiply-adds is computed in which precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one operator contributes.

    Attributes:
        operator: its name.
        form: the precision that it has: "int8", "bf16", "fp32", "int4 weight", ….
        weights: names and numbers of values of the weights that it reads.
        multiply_adds: how many it does; None if that is not known.
    """

    operator: str
    form: str
    weights: Sequence[tuple[str, int]] = ()
    multiply_adds: int | None = None

    def without(self, names: Collection[str]) -> tuple[Part, ...]:
        """Return it without some weights, which are fp32, and these; multiply-adds as the weights' values."""
        if not names or self.form == "fp32":
            return (self,)
        kept, floats = (
            [(name, size) for name, size in self.weights if (name in names) is among]
            for among in (False, True)
        )
        if not floats:
            return (self,)
        part, whole = (sum(size for _, size in weights) for weights in (floats, self.weights))
        adds = rest = None
        if self.multiply_adds is not None:
            adds = self.multiply_adds * part // max(whole, 1)
            rest = self.multiply_adds - adds
        return (
            dataclasses.replace(self, weights=kept, multiply_adds=rest),
            dataclasses.replace(self, form="fp32", weights=floats, multiply_adds=adds),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Sums over a model.

    Attributes:
        weights: values of weights by form, the largest number first. A weight that is read in two forms
            counts in both.
        multiply_adds: multiply-adds on the example inputs by form, the largest number first.
        unknown: operators whose multiply-adds are not known.
    """

    weights: Mapping[str, int]
    multiply_adds: Mapping[str, int]
    unknown: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return a line for each, with shares in percent; none for what the model has not."""
        found = []
        if self.weights:
            found.append(f"weights: {_percentages(self.weights)} of {_number(sum(self.weights.values()))}")
        if self.multiply_adds:
            found.append(
                f"multiply-adds on the example: {_percentages(self.multiply_adds)} of "
                f"{_number(sum(self.multiply_adds.values()))}"
            )
        if self.unknown:
            more = f" and {len(self.unknown) - 3} more" if len(self.unknown) > 3 else ""
            found.append(f"multiply-adds of {', '.join(self.unknown[:3])}{more} are not known")
        return found


def shares_of(parts: Iterable[Part]) -> Shares:
    """Return the sums over all parts; a weight that several parts read in one form counts once."""
    weights: dict[tuple[str, str], int] = {}
    multiply_adds: dict[str, int] = {}
    unknown = []
    for part in parts:
        for name, size in part.weights:
            weights[part.form, name] = size
        if part.multiply_adds is None:
            unknown.append(part.operator)
        elif part.multiply_adds:
            multiply_adds[part.form] = multiply_adds.get(part.form, 0) + part.multiply_adds
    values: dict[str, int] = {}
    for (form, _), size in weights.items():
        values[form] = values.get(form, 0) + size
    return Shares(weights=_sorted(values), multiply_adds=_sorted(multiply_adds), unknown=tuple(unknown))


def fractions(numbers: Mapping[str, int]) -> dict[str, float]:
    """Each number divided by the sum of all."""
    total = sum(numbers.values())
    return {form: number / total for form, number in numbers.items()} if total else {}


def _sorted(numbers: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(numbers.items(), key=lambda item: -item[1]))


def _percentages(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{_percent(share)} {form}" for form, share in fractions(numbers).items())


def _percent(share: float) -> str:
    """Never 100 % for what is not all, nor 0 % for what is something."""
    text = f"{share:.1%}"
    return {"100.0%": "over 99.9%", "0.0%": "under 0.1%"}.get(text, text) if 0 < share < 1 else f"{share:.0%}"


def _number(count: int) -> str:
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= unit:
            return f"{count / unit:.1f}{name}"
    return str(count)
