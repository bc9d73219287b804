"""The contract of a low-bit kernel: what it takes as data, how it packs a weight, how it multiplies."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from nc.errors import ConfigError
from nc.formats.tensor_format import TensorFormat
from nc.kernels import cpu
from nc.numerics.packed_weight import PackedWeight

#: What a kernel makes of a weight for itself. It is never stored.
PackedLayout = tuple[torch.Tensor | None, ...]
#: A kernel without a limit of rows.
ANY_ROWS = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True)
class LowBitKernel:
    """One kernel. All that it cannot do is data, so nothing runs to find that out.

    Attributes:
        name: in reports.
        what: what it computes, one line for documents.
        bits: sizes of integer codes that it takes.
        floats: names of floating-point formats that it takes; None: any.
        activations: what it multiplies: of "fp32", "bf16", "int8" and "int8_block32". With the last two it
            gets activations that are not rounded yet, and rounds them itself; where it only has "fp32", it
            computes layers with int8 activations too, and gets rounded ones.
        groups: group sizes that it takes; None: any. A group of a whole row counts with its size K.
        group_step: groups must be multiples of this, or whole rows.
        whole_row: it needs one group per row.
        zero_points: it takes integer zero points and minima; otherwise only symmetric weights.
        outputs: N must be a multiple of this.
        inputs: K must be a multiple of this.
        isa: features of the CPU that it needs, see `features`.
        in_c: it is C code of nc, whose features tests may emulate.
        max_rows: it is not used for more rows M of activations.
        needs: what torch must have: names of operators, "namespace::name".
        refused: why it is never used; "" for kernels that are.
        unavailable: why it can't run on this machine, found out when nothing else is in the way; "" when it
            can.
        pack: weight → what `linear` reads.
        linear: (x of shape [M, K], what `pack` made, the weight) → [M, N], in fp32 or the dtype of x. x is
            bf16 where bf16 is multiplied, else fp32. None only where `refused` says why.
        adds_bias: `linear` takes the bias, [N] or None, as a fourth argument.
    """

    name: str
    what: str
    bits: tuple[int, ...] = ()
    floats: tuple[str, ...] | None = ()
    activations: tuple[str, ...] = ("fp32",)
    groups: tuple[int, ...] | None = None
    group_step: int = 1
    whole_row: bool = False
    zero_points: bool = True
    outputs: int = 1
    inputs: int = 1
    isa: tuple[str, ...] = ()
    in_c: bool = False
    max_rows: int = ANY_ROWS
    needs: tuple[str, ...] = ()
    refused: str = ""
    unavailable: Callable[[], str] = lambda: ""
    pack: Callable[[PackedWeight], PackedLayout] = lambda _: ()
    linear: Callable[..., torch.Tensor] | None = None
    adds_bias: bool = False

    def __post_init__(self) -> None:
        """Raise ConfigError for a row that neither computes nor is refused."""
        if (self.linear is None) != bool(self.refused):
            msg = (
                f"Low-bit kernel {self.name!r}: give either `linear`, which computes it, or `refused`, which "
                "says why it is never used."
            )
            raise ConfigError(msg)

    def why_not(
        self,
        form: TensorFormat,
        shape: tuple[int, int],
        activations: str,
        available: Collection[str] | None = None,
    ) -> str | None:
        """Why it cannot compute a layer; None if it can.

        Args:
            form: of the weight.
            shape: (N, K) of the weight.
            activations: what they are multiplied as, "fp32", "bf16", "int8" or "int8_block32".
            available: features of the CPU; None: of this one.
        """
        outputs, inputs = shape
        group = inputs if form.group_size == -1 else form.group_size
        has = features(in_c=self.in_c) if available is None else available
        missing = [feature for feature in self.isa if feature not in has]
        absent = [name for name in self.needs if not _exists(name)]
        checks = (
            (self.refused, self.refused),
            (absent, f"torch {torch.__version__} has no {', '.join(absent)}"),
            (missing, f"this CPU has no {', '.join(missing)}{cpu.why_narrow()}"),
            (not self.takes(form), f"it does not take {form.dtype}"),
            (
                not self._multiplies(activations),
                f"it multiplies {' and '.join(self.activations)} only{self._way_out(activations)}",
            ),
            (
                not self.zero_points and not (form.symmetric and not form.float_zero),
                "it takes symmetric weights only",
            ),
            (self.whole_row and group != inputs, f"it takes one scale per row only, not groups of {group}"),
            (
                self.groups is not None and group not in self.groups,
                f"it takes groups of {self.groups}, not {group}",
            ),
            (
                group % self.group_step and group != inputs,
                f"it takes groups of multiples of {self.group_step}, not {group}",
            ),
            (outputs % self.outputs, f"{outputs} outputs are not a multiple of {self.outputs}"),
            (inputs % self.inputs, f"{inputs} inputs are not a multiple of {self.inputs}"),
        )
        return next((reason for found, reason in checks if found), None) or self.unavailable() or None

    def _multiplies(self, activations: str) -> bool:
        return activations in self.activations or (activations != "bf16" and "fp32" in self.activations)

    def _way_out(self, activations: str) -> str:
        """Return what the user can change."""
        asked = self.activations[0]
        return (
            f'; ask for act_dtype="{asked}" if that precision is enough'
            if activations == "fp32" and asked != "fp32"
            else ""
        )

    def takes(self, form: TensorFormat) -> bool:
        """Return whether it is for weights of that number format at all."""
        if form.dtype.kind == "integer":
            return form.bits in self.bits
        return self.floats is None or form.dtype.name in self.floats

    @property
    def rows(self) -> str:
        """The rows it is used for, as text; "" for any."""
        return "" if self.max_rows == ANY_ROWS else f"M <= {self.max_rows}"


def features(*, in_c: bool = False) -> tuple[str, ...]:
    """Features of this CPU that kernels may need, those of torch or those in C of nc.

    They are those of `nc.kernels.cpu`, and "aten_avx2" where ATen runs vector code.
    """
    return (
        *(cpu.code_features() if in_c else cpu.machine_features()),
        *(("aten_avx2",) if torch.backends.cpu.get_cpu_capability().startswith("AVX") else ()),
    )


def _exists(operator: str) -> bool:
    namespace, _, name = operator.partition("::")
    return hasattr(getattr(torch.ops, namespace), name)
