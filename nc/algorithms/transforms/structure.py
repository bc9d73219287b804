"""Which module feeds which linears, channel by channel.

It is measured while a block runs, so names and classes do not matter.

The output channels of a module are multiplied by powers of two, which a computer does exactly. A linear whose
input channels are then multiplied by the same factors reads these channels, and nothing else, linearly:
queries, keys and values after a norm, the output projection after the values (also with fewer heads of values
than of queries), the down projection after the up projection. If dividing these inputs by the factors then
restores the block's output, nothing else reads the channels: the factor can be folded into weights.

That is so on each path of the block (`nc.algorithms.transforms.paths`). What reads a norm is also followed
from operator to operator, because a reader whose values are 0 for this sample is not measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nc.algorithms.transforms.paths import Path, paths_of
from nc.modules.block_calls import BlockCall, fresh, run
from nc.modules.layers import Layer, layers_of

_BASE = 7  # exponents 1 to 7 are the digits of a channel's index; 0 means "not changed"
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Link:
    """A module and the linears that read its output channels.

    Attributes:
        producer: name in the block of a norm or a linear.
        consumers: names in the block of all linears that read it.
        channels: for each consumer int64 of shape [K]: which output channel of the producer its input channel
            is; -1: none.
        size: number of output channels of the producer.
        norm: whether the producer is a norm.
        call: arguments that the producer gets, of a norm.
    """

    producer: str
    consumers: tuple[str, ...]
    channels: tuple[torch.Tensor, ...]
    size: int
    norm: bool
    call: BlockCall = field(default=((), {}), compare=False, repr=False)

    def spread(self, scale: torch.Tensor, index: int) -> torch.Tensor:
        """Return a value per output channel of the producer → one per input channel of a consumer.

        It is 1 where there is none.
        """
        channels = self.channels[index]
        return torch.where(channels < 0, torch.ones_like(scale[:1]), scale[channels.clamp(min=0)])

    def gather(self, values: torch.Tensor, index: int, reduce: str = "mean") -> torch.Tensor:
        """Return a value per input channel of a consumer → one per output channel of the producer.

        It is 0 where nothing reads it.

        Args:
            values: shape [K].
            index: of the consumer.
            reduce: "mean" or "amax", where several input channels are one output channel (grouped-query
                attention).
        """
        known = self.channels[index] >= 0
        zeros = torch.zeros(self.size, dtype=values.dtype)
        return zeros.scatter_reduce(0, self.channels[index][known], values[known], reduce, include_self=False)

    @property
    def read(self) -> torch.Tensor:
        """Which output channels of the producer are read, bool, shape [size]."""
        found = torch.zeros(self.size, dtype=torch.bool)
        for channels in self.channels:
            found[channels[channels >= 0]] = True
        return found


def links_of(
    module: torch.nn.Module, call: BlockCall, norms_only: bool = False, outside: Sequence[str] = ()
) -> tuple[list[Link], dict[str, str]]:
    """All links of a block, norms first in the order of its modules, and why norms are in none.

    Args:
        module: the block, in eval mode.
        call: a sample that reaches it.
        norms_only: leave out links whose producer is a linear.
        outside: leave out producers in these modules.

    Returns:
        Links; and for norms whose result is not read by linears alone, or may not be, the reason ("" is the
        whole block).
    """
    inside = tuple(f"{name}." for name in outside) or ("\0",)
    linears = _linears(module)
    norms = _norms(module, inside)
    producers = [] if norms_only else [name for name in linears if not name.startswith(inside)]
    if not norms and not producers:
        return [], {}
    modules = {name: layer.module for name, layer in linears.items()}
    paths = paths_of(module, call, norms, modules, outside)
    if paths.why:
        return [], {"": paths.why}
    probes = [_Probe(module, path, linears, norms) for path in paths.all]
    candidates = [(name, True) for name in norms if name not in paths.others]
    candidates += [(name, False) for name in producers]
    found = [link for name, norm in candidates if (link := _link(probes, name, norm)) is not None]
    return found, {name: f"{other} reads its result too" for name, other in paths.others.items()}


def _linears(module: torch.nn.Module) -> dict[str, Layer]:
    return {layer.name: layer for layer in layers_of(module) if layer.kind == "linear" and layer.why is None}


def _norms(module: torch.nn.Module, outside: tuple[str, ...]) -> dict[str, torch.nn.Module]:
    parts = module.named_modules()
    return {name: part for name, part in parts if is_norm_like(part) and not name.startswith(outside)}


def _link(probes: Sequence[_Probe], name: str, norm: bool) -> Link | None:
    """Return what reads a module on all paths; None if others than linears do."""
    probes = [probe for probe in probes if name in (probe.calls if norm else probe.inputs)]
    if not probes:
        return None
    size = probes[0].size(name, norm)
    readers: dict[str, torch.Tensor] = {}
    measured = [probe.readers(name, size) for probe in probes]
    for reader, channels in (item for found in measured for item in found.items()):
        before = readers.get(reader, channels)
        if bool(((before != channels) & (before >= 0) & (channels >= 0)).any()):
            return None
        readers[reader] = torch.where(before < 0, channels, before)
    if any(
        reader in probe.inputs and reader not in found
        for reader in readers
        for probe, found in zip(probes, measured, strict=True)
    ):
        return None  # on some path it reads something else
    if not readers or not all(probe.is_complete(name, readers, size) for probe in probes):
        return None
    call = probes[0].calls[name] if norm else ((), {})
    return Link(name, tuple(readers), tuple(readers.values()), size, norm, call)


def is_norm_like(module: torch.nn.Module) -> bool:
    """Return whether a module has nothing but one gain per channel, and perhaps a bias."""
    if isinstance(module, torch.jit.ScriptModule):
        return False  # its parameters can't be replaced
    weight = module._parameters.get("weight")
    plain = weight is not None and weight.dim() == 1 and weight.numel() > 1 and not list(module.children())
    return plain and set(module._parameters) <= {"weight", "bias"}


class _Probe:
    """Measures which linears read a module, on one path of a block.

    Attributes:
        inputs: name of each linear that runs → its input rows in all calls, float64.
        calls: name of each norm that runs → the arguments of its first call.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        path: Path,
        linears: dict[str, Layer],
        norms: dict[str, torch.nn.Module],
    ) -> None:
        self.module, self.path, self.linears = module, path, linears
        self.modules: dict[str, torch.nn.Module] = {name: layer.module for name, layer in linears.items()}
        with _calls_of(norms) as self.calls:
            self.inputs, self.output = self._run()

    def _run(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Run the path; return the input rows of each linear in all its calls, and the output."""
        with _inputs_of(self.modules) as found, self.path.taking():
            output: torch.Tensor = run(self.module, self.path.call)
        return {name: torch.cat(rows) for name, rows in found.items()}, output

    def size(self, name: str, norm: bool) -> int:
        """Return the number of output channels of a norm or linear."""
        if not norm:
            return self.linears[name].shape[0]
        weight: torch.Tensor = self.module.get_submodule(name).weight  # type: ignore[assignment]
        return weight.numel()

    def readers(self, name: str, size: int) -> dict[str, torch.Tensor]:
        """Return each linear that reads a module, with the module's output channel for each input channel."""
        # of a linear that makes queries, keys and values at once, only the last channels reach their reader
        # linearly
        start = 0 if self._exponents(name, _one_factor(size, 0)) else self._first_linear(name, size)
        return {} if start is None else self._channels(name, size, start)

    def _first_linear(self, name: str, size: int) -> int | None:
        """Return the first channel from which all channels reach a reader linearly.

        None if not even the last one does.
        """
        low, high = 1, size - 1
        if not self._exponents(name, _one_factor(size, high)):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (
                (low, middle) if self._exponents(name, _one_factor(size, middle)) else (middle + 1, high)
            )
        return high

    def _channels(self, name: str, size: int, start: int) -> dict[str, torch.Tensor]:
        """Return what `readers` returns, for output channels from `start` on; -1 for other input channels."""
        index = torch.arange(size)
        sums: dict[str, torch.Tensor] = {}
        reads: dict[str, torch.Tensor] = {}
        place = 1
        while place < size or place == 1:
            digits = index // place % _BASE
            measured = self._exponents(name, torch.where(index < start, 0, digits + 1))
            if place == 1:
                sums = {reader: torch.zeros_like(exponents) for reader, exponents in measured.items()}
                reads = {
                    reader: torch.ones_like(exponents, dtype=torch.bool)
                    for reader, exponents in measured.items()
                }
            for reader in [r for r in sums if r not in measured]:
                del sums[reader], reads[reader]
            for reader in sums:
                reads[reader] &= measured[reader] > 0
                sums[reader] += (measured[reader] - 1) * place
            place *= _BASE
        return {
            reader: torch.where(reads[reader] & (sums[reader] < size), sums[reader], -1) for reader in sums
        }

    def _exponents(self, name: str, exponents: torch.Tensor) -> dict[str, torch.Tensor]:
        """Multiply the output channels of a module by 2^exponents; return the linears that follow exactly.

        Returns:
            Name of each linear whose inputs are multiplied by powers of two, too → their exponents, int64,
            shape [K]; 0 for an input channel that does not change.
        """
        with _multiplied(self.module.get_submodule(name), exponents):
            found, _ = self._run()
        result = {}
        for reader, after in found.items():
            before = self.inputs.get(reader)
            if reader == name or before is None or after.shape != before.shape:
                continue
            top = before.abs().argmax(0, keepdim=True)
            ratio = (after.gather(0, top) / before.gather(0, top))[0]
            power = ratio.abs().log2().round().nan_to_num(0.0, 0.0, 0.0).clamp(-30, 30)
            error = (after - before * power.exp2()).abs().amax(0)
            follows = error <= _TOLERANCE * after.abs().amax(0)
            if bool(follows.all()) and bool((power != 0).any()) and bool((power >= 0).all()):
                result[reader] = power.long()
        return result

    def is_complete(self, name: str, found: dict[str, torch.Tensor], size: int) -> bool:
        """Return whether dividing the readers' inputs by the factors restores the output of the block."""
        exponents = torch.arange(size) % _BASE + 1
        read = torch.zeros(size, dtype=torch.bool)
        for channels in found.values():
            read[channels[channels >= 0]] = True
        exponents = torch.where(read, exponents, 0)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_multiplied(self.module.get_submodule(name), exponents))
            for reader, channels in found.items():
                back = torch.where(channels < 0, 0, exponents[channels.clamp(min=0)])
                stack.enter_context(_divided(self.modules[reader], back))
            stack.enter_context(self.path.taking())
            output = run(self.module, self.path.call)
        return same(self.output, output, _TOLERANCE)


def same(before: torch.Tensor, after: torch.Tensor, bound: float) -> bool:
    """Return whether two tensors differ by at most `bound` times the largest magnitude.

    NaN (of masked rows) is equal to NaN.
    """
    return difference(before, after) <= bound


def difference(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return the largest difference of two tensors over the largest magnitude of the first."""
    if not torch.equal(before.isnan(), after.isnan()):
        return float("inf")
    before, after = (x.detach().nan_to_num().double() for x in (before, after))
    return float((after - before).abs().max() / before.abs().max().clamp(min=1e-300))


def _one_factor(size: int, start: int) -> torch.Tensor:
    index = torch.arange(size)
    return torch.where(index < start, 0, index % _BASE + 1)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.detach().reshape(-1, x.shape[-1]).to(torch.float64, copy=True)


@contextlib.contextmanager
def _inputs_of(linears: dict[str, torch.nn.Module]) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Rows of all calls that have some, as they are then: what follows may change them in place."""
    found: dict[str, list[torch.Tensor]] = {}

    def hook(name: str) -> Any:
        def keep(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rows = _rows(args[0] if args else next(iter(kwargs.values())))
            if len(rows):
                found.setdefault(name, []).append(rows)

        return keep

    with _hooked(linears, hook):
        yield found


@contextlib.contextmanager
def _calls_of(modules: dict[str, torch.nn.Module]) -> Iterator[dict[str, BlockCall]]:
    """Arguments of the first call of each module that has rows."""
    found: dict[str, BlockCall] = {}

    def hook(name: str) -> Any:
        def keep(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = pytree.tree_leaves((args, kwargs))
            if name not in found and all(x.numel() for x in given if isinstance(x, torch.Tensor)):
                found[name] = fresh((args, kwargs))

        return keep

    with _hooked(modules, hook):
        yield found


@contextlib.contextmanager
def _hooked(modules: dict[str, torch.nn.Module], hook: Callable[[str], Any]) -> Iterator[None]:
    handles = [m.register_forward_pre_hook(hook(name), with_kwargs=True) for name, m in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _multiplied(module: torch.nn.Module, exponents: torch.Tensor) -> Iterator[None]:
    def hook(_: torch.nn.Module, __: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or output.shape[-1:] != exponents.shape:
            return output  # its channels are elsewhere; nothing follows, so nothing is linked
        return output * exponents.to(output.dtype).exp2()

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _divided(module: torch.nn.Module, exponents: torch.Tensor) -> Iterator[None]:
    def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def part(x: torch.Tensor) -> torch.Tensor:
            return x * (-exponents).to(x.dtype).exp2()

        if args:
            return (part(args[0]), *args[1:]), kwargs
        (key, value), *rest = kwargs.items()
        return args, {key: part(value), **dict(rest)}

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
