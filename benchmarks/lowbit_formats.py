"""What the comparison of low-bit weights goes through: models and formats. Needs nothing but Python."""

from __future__ import annotations

from dataclasses import dataclass

#: Model → the module list of its blocks.
BLOCKS = {
    "smollm2": "model.layers",
    "antiberty": "bert.encoder.layer",
    "lm": "layers",
    "minilm": "encoder.layer",
}


@dataclass(frozen=True)
class Format:
    """What is compared: tools in one format store codes of as many bits, in groups of one size.

    Attributes:
        bits: of a code.
        group: input channels that share a scale; -1: all of a row.
        kind: "int" or "nf".
        symmetric: without zero points.
        other: for a subject whose rows `group` does not divide, the size instead.
    """

    bits: int
    group: int
    kind: str = "int"
    symmetric: bool = True
    other: tuple[tuple[str, int], ...] = ()

    def of(self, subject: str) -> int:
        """Return the group size for a subject."""
        return dict(self.other).get(subject, self.group)


#: 576 = 64 * 9 input channels are no multiple of 128: legal sizes around it that divide 1536 too are 96 and
#: 192.
FORMATS = {
    "int4-g64": Format(4, 64),
    "int4-g128": Format(4, 128, other=(("smollm2", 192),)),
    "int3-g64": Format(3, 64),
    "nf4-g64": Format(4, 64, kind="nf"),
    "int4-asym-g64": Format(4, 64, symmetric=False),
    "int8-row": Format(8, -1),
    "int8-g64": Format(8, 64),
}
