"""Rotation of the residual stream (R1) and of the values of each head (R2), folded into weights.

Sources: QuaRot (arXiv 2404.00456), SpinQuant (arXiv 2405.16406).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.utils import _pytree as pytree

from nc.algorithms.solvers.base import InputNeeds
from nc.algorithms.transforms.base import Scope
from nc.algorithms.transforms.folding import NotEquivalentError, fold, gain_offset, rewrite, smallest
from nc.algorithms.transforms.structure import Link, is_norm_like, links_of
from nc.errors import UnsupportedError
from nc.graph.plan import Applied
from nc.modules.block_calls import BlockCall, Sample, block_lists, filled, record, run
from nc.modules.layers import Layer, layers_of


@dataclass(frozen=True)
class Rotation:
    """Spreads outliers over all channels, by orthogonal matrices that cancel out.

    Weights are multiplied by these matrices, which costs nothing at run time. It is for decoders whose norms
    precede attention and feed-forward. The gains of these norms are first folded into the linears that read
    them. Layers that read the residual stream are multiplied by R1, layers that write to it (embeddings too)
    by its transpose. For a model with LayerNorm, R1 keeps the mean of the channels.

    Attributes:
        heads: also rotate values per head (R2).
        seed: of the random parts.
    """

    heads: bool = True
    seed: int = 0

    name: ClassVar[str] = "rotation"
    level: ClassVar[Literal["model"]] = "model"

    @property
    def needs(self) -> InputNeeds:
        """Nothing."""
        return InputNeeds()

    def apply(self, scope: Scope) -> Applied:
        """See `Transform.apply`.

        Raises:
            UnsupportedError: some weights are not in memory.
        """
        model = scope.model
        if any(parameter.is_meta for parameter in model.parameters()):
            msg = (
                "Rotation needs all weights in memory, because it changes them together. Load the model "
                "first, or leave Rotation() out."
            )
            raise UnsupportedError(msg)
        try:
            stream = _stream(model, smallest(scope.samples) if scope.samples else _some_tokens(model))
        except NotEquivalentError as error:
            return Applied(self.name, (), f"nothing: {error}")
        generator = torch.Generator().manual_seed(self.seed)
        r1 = orthogonal(stream.size, generator, keep_mean=stream.keep_mean)
        try:
            checked = rewrite(model, stream.call, lambda wide: _rotate_stream(wide, stream, r1))
        except NotEquivalentError as error:
            return Applied(
                self.name,
                (),
                f"nothing: {error}; it is for decoders with norms before attention and feed-forward",
            )
        if stream.tied:
            model.config.tie_word_embeddings = False  # type: ignore[union-attr]
        parts = [f"residual stream of {stream.size} channels, {checked}"]
        changed = [*stream.embeddings, *stream.readers, *stream.writers]
        if self.heads:
            rotated = [
                link
                for prefix, link in stream.values
                if self._rotate_heads(scope, stream, prefix, link, generator)
            ]
            parts.append(f"values of {len(rotated)} of {len(stream.blocks)} blocks per head of {stream.head}")
        if stream.tied:
            parts.append("the output head now has its own weight, separate from the embedding's")
        return Applied(self.name, tuple(dict.fromkeys(changed)), "; ".join(parts))

    def _rotate_heads(
        self, scope: Scope, stream: _Stream, prefix: str, link: Link, generator: torch.Generator
    ) -> bool:
        """Rotate one block by R2, if the block then computes the same.

        A down projection after an up projection, for example, cannot be rotated.
        """
        heads = stream.head and _whole_heads(link, stream.head)
        if not heads:
            return False
        r2 = orthogonal(stream.head, generator)
        try:
            rewrite(
                scope.model.get_submodule(prefix),
                stream.calls[prefix],
                lambda wide: _rotate_values(wide, link, r2),
            )
        except NotEquivalentError:
            return False
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stream:
    """The residual stream of a model.

    Attributes:
        size: channels.
        call: a sample of the model.
        blocks: names of the blocks.
        calls: a sample of each block.
        norms: (prefix of a block, link from a norm to its readers); "" for the norm after the blocks.
        values: (prefix, link from values to an output projection, perhaps also others from a linear to one).
        embeddings: names of what starts the stream.
        readers: names of linears that read it.
        writers: names of linears that add to it.
        keep_mean: its norms subtract the mean.
        head: channels of an attention head; 0 if that is not known.
        tied: the output head shares its weight with an embedding.
    """

    size: int
    call: BlockCall
    blocks: tuple[str, ...]
    calls: dict[str, BlockCall]
    norms: tuple[tuple[str, Link], ...]
    values: tuple[tuple[str, Link], ...]
    embeddings: tuple[str, ...]
    readers: tuple[str, ...]
    writers: tuple[str, ...]
    keep_mean: bool
    head: int
    tied: bool


def orthogonal(size: int, generator: torch.Generator, keep_mean: bool = False) -> torch.Tensor:
    """Return a random orthogonal matrix, float64, shape [size, size].

    A Hadamard matrix of the largest power of two 2^k that divides the size, its Kronecker product with a
    random orthogonal matrix of the rest, times random signs. 576 = 2^6 * 9: there is no Hadamard matrix of
    order 9.

    Args:
        size: n.
        generator: of the random parts.
        keep_mean: the vector of ones stays as it is (a plain random matrix on the space orthogonal to it).
    """
    if keep_mean:
        basis = torch.eye(size, dtype=torch.float64)
        basis[:, 0] = 1
        basis = torch.linalg.qr(basis).Q
        inner = torch.eye(size, dtype=torch.float64)
        inner[1:, 1:] = _random(size - 1, generator)
        kept: torch.Tensor = torch.linalg.multi_dot([basis, inner, basis.T])
        return kept
    power = size & -size
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while hadamard.shape[0] < power:
        hadamard = (
            torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)]) / 2**0.5
        )
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    return torch.kron(hadamard, _random(size // power, generator)) * signs.unsqueeze(1)


def _random(size: int, generator: torch.Generator) -> torch.Tensor:
    q, r = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))
    result: torch.Tensor = (q * r.diagonal().sign()).contiguous()
    return result


def _some_tokens(model: torch.nn.Module) -> BlockCall:
    """16 random token ids, for a model that was given no samples."""
    get = getattr(model, "get_input_embeddings", None)
    table = get() if callable(get) else None
    if not isinstance(table, torch.nn.Embedding):
        msg = "there are no samples to check it with, and the model has no get_input_embeddings()"
        raise NotEquivalentError(msg)
    return (torch.randint(0, table.num_embeddings, (1, 16), generator=torch.Generator().manual_seed(0)),), {}


def _norms_of_stream(
    model: torch.nn.Module, found: Sequence[tuple[str, Link]], left: Mapping[str, str]
) -> list[tuple[str, Link]]:
    """Return the links from norms of the stream's size to linears, each with the name of its block.

    Raises:
        NotEquivalentError: there is none, or a norm of this size feeds something else too, or may.
    """
    unknown = next((name for name in left if not is_norm_like(model.get_submodule(name))), None)
    if unknown is not None:
        msg = f"{unknown or 'the model'!r} was left alone: {left[unknown]}"
        raise NotEquivalentError(msg)
    size = next((link.size for _, link in found if link.norm), None)
    if size is None:
        msg = "no norm feeds linears only"
        raise NotEquivalentError(msg)
    norms = [(prefix, link) for prefix, link in found if link.norm and link.size == size]
    linked = {_name(prefix, link.producer) for prefix, link in norms}
    for name, part in model.named_modules():
        if is_norm_like(part) and part.weight.numel() == size and name not in linked:
            why = f": {left[name]}" if name in left else ""
            msg = f"the output of {name!r} goes elsewhere than to linears only{why}"
            raise NotEquivalentError(msg)
    return norms


def _stream(model: torch.nn.Module, call: BlockCall) -> _Stream:
    layers = {layer.name: layer for layer in layers_of(model)}
    linears = {name: layer for name, layer in layers.items() if layer.kind == "linear"}
    blocks = _only_stack(model, linears)
    calls = _block_calls(model, blocks, call)
    found, left = _links_of(model, call, blocks, calls)
    norms = _norms_of_stream(model, found, left)
    size = norms[0][1].size
    readers = tuple(_name(prefix, consumer) for prefix, link in norms for consumer in link.consumers)
    tables = {
        id(layer.module.weight): name
        for name, layer in layers.items()
        if layer.kind == "embedding" and layer.shape[1] == size
    }
    heads = [name for name in readers if linears[name].head]
    return _Stream(
        size=size,
        call=call,
        blocks=blocks,
        calls=calls,
        norms=tuple(norms),
        values=tuple((prefix, link) for prefix, link in found if not link.norm),
        embeddings=tuple(tables.values()),
        readers=readers,
        writers=tuple(
            name for name, layer in linears.items() if layer.shape[0] == size and name not in readers
        ),
        keep_mean=any(
            _subtracts_mean(model.get_submodule(_name(prefix, link.producer)), link.call)
            for prefix, link in norms
        ),
        head=_head_size(model),
        tied=any(id(linears[name].module.weight) in tables for name in heads),
    )


def _only_stack(model: torch.nn.Module, linears: Mapping[str, Layer]) -> tuple[str, ...]:
    """Return the names of the blocks of a model that has one stack of them.

    Raises:
        NotEquivalentError: the model has no stack of blocks, or several.
    """
    lists = block_lists(model, [name for name, layer in linears.items() if not layer.head])
    if len(lists) != 1:
        msg = f"the model has {len(lists)} stacks of blocks, not one"
        raise NotEquivalentError(msg)
    return tuple(lists[0])


def _links_of(
    model: torch.nn.Module, call: BlockCall, blocks: Sequence[str], calls: Mapping[str, BlockCall]
) -> tuple[list[tuple[str, Link]], dict[str, str]]:
    """Return the links inside each block and those of norms outside of all, each with its block's name.

    And why norms are in none, by their name in the model; of a block that is left alone, by its name.
    """
    found: list[tuple[str, Link]] = []
    left: dict[str, str] = {}
    for name in (*blocks, ""):
        module = model.get_submodule(name)
        outside = () if name else tuple(blocks)
        links, why = links_of(module, calls.get(name, call), norms_only=not name, outside=outside)
        found += [(name, link) for link in links]
        left |= {_name(name, inside) if inside else name: text for inside, text in why.items()}
    return found, left


def _block_calls(model: torch.nn.Module, blocks: tuple[str, ...], call: BlockCall) -> dict[str, BlockCall]:
    modules = [model.get_submodule(name) for name in blocks]
    recorded = record(model, modules, [Sample(call)])
    if recorded is None:
        msg = "the blocks are not called once each, in order"
        raise NotEquivalentError(msg)
    calls: dict[str, BlockCall] = {}
    hidden = None
    for name, module, one in zip(blocks, modules, recorded[0], strict=True):
        calls[name] = filled(one, hidden)
        hidden = run(module, calls[name])
    return calls


def _subtracts_mean(norm: torch.nn.Module, call: BlockCall) -> bool:
    """Return whether a norm's output does not depend on the mean of the channels."""
    width = norm.weight.numel()  # type: ignore[operator]

    def shifted(value: Any) -> Any:
        is_input = isinstance(value, torch.Tensor) and value.shape[-1:] == (width,)
        return value + 1 if is_input and value.is_floating_point() else value

    before = run(norm, call)
    after = run(norm, pytree.tree_map(shifted, call))
    return bool(torch.allclose(before, after, rtol=1e-2, atol=1e-3))


def _head_size(model: torch.nn.Module) -> int:
    config = getattr(model, "config", None)
    size = getattr(config, "head_dim", None)
    if size is None:
        hidden, count = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
        size = hidden // count if hidden and count else 0
    return int(size)


def _rotate_stream(model: torch.nn.Module, stream: _Stream, r1: torch.Tensor) -> None:
    """Fold gains and R1 into a `WideCopy` of the model."""
    if stream.tied:
        _untie(model)
    with torch.no_grad():
        for prefix, link in stream.norms:
            block = model.get_submodule(prefix)
            _fold_bias(block, link)
            norm = block.get_submodule(link.producer)
            gain = norm.weight.detach() + gain_offset(norm, link.call)  # type: ignore[operator]
            if bool((gain == 0).any()):
                msg = f"a gain of {link.producer!r} is 0"
                raise NotEquivalentError(msg)
            fold(block, link, gain)
        layers = {layer.name: layer for layer in layers_of(model)}
        rotation = r1.to(next(iter(layers.values())).weight.dtype)
        for name in (*stream.embeddings, *stream.readers):
            weight = layers[name].weight
            weight.copy_(weight @ rotation)
        for name in stream.writers:
            _rotate_rows(layers[name], rotation)


def _rotate_rows(layer: Layer, rotation: torch.Tensor) -> None:
    weight, bias = layer.weight, layer.module.bias
    weight.copy_(rotation.T @ weight)
    if isinstance(bias, torch.Tensor):
        bias.copy_(bias @ rotation)


def _fold_bias(block: torch.nn.Module, link: Link) -> None:
    """Move the bias of a norm into the biases of its readers."""
    bias = block.get_submodule(link.producer)._parameters.get("bias")
    if bias is None:
        return
    for layer in layers_of(block):
        if layer.name in link.consumers:
            added = layer.weight @ bias
            own = layer.module._parameters.get("bias")
            layer.module._parameters["bias"] = torch.nn.Parameter(added if own is None else own + added)
    bias.zero_()


def _untie(model: torch.nn.Module) -> None:
    """Give the output head its own weight."""
    for layer in layers_of(model):
        if layer.head and layer.kind == "linear":
            weight = layer.module._parameters["weight"]
            assert weight is not None
            layer.module._parameters["weight"] = torch.nn.Parameter(
                weight.detach().clone(), requires_grad=weight.requires_grad
            )


def _whole_heads(link: Link, head: int) -> bool:
    """Return whether a reader's input channels are whole heads of the producer's output channels."""
    if len(link.consumers) != 1 or link.channels[0].numel() % head:
        return False
    groups = link.channels[0].reshape(-1, head)
    first = groups[:, :1]
    return bool((first >= 0).all()) and torch.equal(groups, first + torch.arange(head))


def _rotate_values(block: torch.nn.Module, link: Link, r2: torch.Tensor) -> None:
    """Fold R2 into a `WideCopy` of a block."""
    layers = {layer.name: layer for layer in layers_of(block)}
    values, reader = layers[link.producer], layers[link.consumers[0]]
    rotation = r2.to(values.weight.dtype)
    head = len(r2)
    with torch.no_grad():
        for start in sorted(set(link.channels[0][::head].tolist())):
            part = values.weight[start : start + head]
            part.copy_(rotation.T @ part)
            bias = values.module.bias
            if isinstance(bias, torch.Tensor):
                bias[start : start + head] = bias[start : start + head] @ rotation
        columns = reader.weight
        columns.copy_((columns.reshape(columns.shape[0], -1, head) @ rotation).reshape(columns.shape))


def _name(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
