"""The replacement of a language model's `forward`.

It computes single tokens, and a few at once, by plans, and calls the model for all else.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeGuard

import torch

from nc.backends import plan_token
from nc.errors import BackendError, CaptureError, NCError, UnsupportedError, VerificationError
from nc.generation.memory import Memory, SourceMemory, memory_of, why_unknown
from nc.generation.names import (
    CACHE_NAMES,
    StepNames,
    cache_field,
    cache_of,
    own_part,
    source_part,
    step_names,
)
from nc.generation.snapshot import Snapshot
from nc.generation.step import captured
from nc.nn import QuantLinear
from nc.numerics.metrics import worst_sqnr_db
from nc.process.traced import in_trace
from nc.process.unavailable import Unavailable
from nc.process.warn import warn

#: Arguments of a decoding step that plans know. Others may be given if they ask for nothing.
_KNOWN = {
    "position_ids",
    "encoder_outputs",
    "use_cache",
    "return_dict",
    "cache_position",
    "logits_to_keep",
    *CACHE_NAMES,
}
#: What logits must have in common with the model's own, in dB. Where activations are rounded to int8 or bf16,
#: a value at a tie moves all that follows; a wrong mask, position or weight gives far less than that, too.
_EXACT_DB, _ROUNDED_DB = 60.0, 20.0
#: Where noise in the model's own cache moves codes at ties, and they its logits by more, a plan may differ by
#: as much and a margin, as it moves other codes. It may never differ by more than the last number says.
_MARGIN_DB, _LEAST_DB = 10.0, 6.0
#: The noise, in units of the last place: sums in other orders differ by some in each of many operators.
_NOISE, _DRAWS = 64, 3


_INTEGERS = (torch.int64, torch.int32)
#: Tokens of a text that are computed at once: drafts that a model confirms.
MOST_TOKENS = 16


class _Kind(NamedTuple):
    """A kind of step, each of which is compared with the model.

    Attributes:
        masked: places of the cache are hidden.
        several: there are several texts.
        counted: the model itself counts the positions of texts with hidden places: some leave those out.
        drafted: there are several tokens of each text.
    """

    masked: bool
    several: bool
    counted: bool
    drafted: bool

    def __str__(self) -> str:
        """Return it in words."""
        what = f"{'several tokens of ' * self.drafted}{'batches' if self.several else 'one text'}"
        return what + ", some places hidden" * self.masked + ", positions not given" * self.counted


#: What outputs of steps hold.
_GIVEN = ("logits", "encoder_last_hidden_state", *CACHE_NAMES)
#: Tokens that are compared: what a plan would keep wrongly from one token to the next is not seen in one.
_COMPARED = 3


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """What computes a token.

    Attributes:
        model: runs the graph.
        inputs: names of its inputs, see `nc.generation.step.INPUTS`.
    """

    model: Callable[..., Sequence[torch.Tensor]]
    inputs: tuple[str, ...]

    @property
    def reads_source_mask(self) -> bool:
        """Whether a mask hides places of what an encoder has read."""
        return "source_mask" in self.inputs


@dataclasses.dataclass(frozen=True, slots=True)
class _Compared:
    """A step that was compared with the model.

    Attributes:
        step: what computes it.
        db: the worst agreement.
        tokens: how many were compared.
    """

    step: _Step
    db: float = math.inf
    tokens: int = 0


class Decoder:
    """Called as `forward` is.

    Args:
        model: a language model of transformers.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        functools.update_wrapper(self, model.forward)  # transformers reads its signature
        self._model, self._forward = weakref.ref(model), model.forward
        self.__code__ = getattr(model.forward, "__code__", None)  # and torch.export where that is from
        self._of, self._names = Snapshot(model), step_names(model)
        #: For each kind of step what computes it, or why it is left to the model.
        self._found: dict[_Kind, _Compared | Unavailable] = {}
        #: By whether places are hidden, and whether there are several tokens.
        self._steps: dict[tuple[bool, bool], _Step] = {}
        self._memories: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model gives."""
        if args or not self._is_step(kwargs):
            return self._forward(*args, **kwargs)
        cache, kind, tokens = cache_of(kwargs), _kind(kwargs, self._names), kwargs[self._names.ids].shape[1]
        count, memory = cache.get_seq_length(), self._memories.get(cache)
        if memory is None or count + tokens > memory.places or not memory.is_of(cache):
            # another text, or more of it
            self._follow()
            memory = None
        found = self._found.get(kind)
        if found is None or (isinstance(found, _Compared) and found.tokens < _COMPARED):
            return self._compare(kind, kwargs, strict=False)
        if isinstance(found, Unavailable) or (memory is None and why_unknown(cache)):
            return self._forward(**kwargs)
        memory = memory or memory_of(cache, tokens, fills=found.step.reads_source_mask)
        try:
            logits = _run(found.step, kwargs, memory, count, self._names)
        except (
            RuntimeError,
            IndexError,
            ValueError,
        ) as error:  # of a kernel, or of an operator with sizes that the graph is not for
            output = self._forward(
                **kwargs
            )  # an index that is out of range is torch's error, as without plans
            self._leave(kind, f"a plan failed: {str(error).splitlines()[0]}")
            return output
        memory.show(cache, count + tokens)
        self._memories[cache] = memory
        return _output(logits, cache, kwargs)

    @property
    def layers(self) -> Sequence[QuantLinear]:
        """The low-bit linears of the model."""
        return self._of.layers

    @property
    def hooked(self) -> bool:
        """Whether modules in the model have hooks, which plans do not call."""
        return self._of.hooked

    def prove(self, kwargs: Mapping[str, Any]) -> None:
        """Capture a decoding step, and compare some tokens with the model's.

        Args:
            kwargs: arguments of a first step; the cache grows.

        Raises:
            CaptureError, BackendError, BackendUnavailableError, UnsupportedError: there can be no plan.
            VerificationError: it computes something else.
        """
        for _ in range(_COMPARED):
            self._compare(_kind(kwargs, self._names), kwargs, strict=True)

    def status(self) -> str:
        """Return what computes tokens, in words."""
        lines = []
        for kind, found in sorted(self._found.items()):
            how = (
                f"the model itself ({found})"
                if isinstance(found, Unavailable)
                else f"by a plan, {found.db:.0f} dB to the model"
            )
            lines.append(f"{kind}: {how}")
        return "; ".join(lines)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy that computes by itself."""
        return _own_forward(memo.get(id(self._model()), self._model()))

    def __reduce__(self) -> Any:
        """So does one that comes from a file."""
        return _own_forward, (self._model(),)

    def _is_step(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call computes few tokens that follow others, and asks for nothing else."""
        ids, cache, model = kwargs.get(self._names.ids), cache_of(kwargs), self._model()
        if cache is None or not _are_few_tokens(ids):
            return False
        if model is None or model.training or _is_watched(ids):
            return False
        layers = getattr(own_part(cache), "layers", None)
        if (
            ids.dtype not in _INTEGERS
            or _asks_for_more(kwargs, model.config, self._names)
            or self._of.hooked
            or not layers
        ):
            return False
        if getattr(getattr(layers[0], "keys", None), "shape", ())[:1] != ids.shape[:1]:
            return False
        if self._names.source_mask and not _reads_something(kwargs, self._names):
            return False
        return _follows(kwargs, cache.get_seq_length(), ids.shape, self._names)

    def _follow(self) -> None:
        """Forget what was proved of a model that has other weights or modules now."""
        model = self._model()
        assert model is not None
        if not self._of.is_of(model):
            with self._lock:
                self._of = Snapshot(model)
                self._steps, self._found = {}, {}

    def _compare(self, kind: _Kind, kwargs: Mapping[str, Any], strict: bool) -> Any:
        """Compute a step of a kind that is not proved yet by the model and by a plan."""
        with self._lock:
            cache = cache_of(kwargs)
            why = why_unknown(cache)
            memory = (
                None if why else self._memory_to_compare(cache, kind, kwargs[self._names.ids].shape[1])
            )  # before the model runs: layers with a window forget
            before = copy.deepcopy(cache) if memory is not None and self._is_rounded() else None
            output = self._forward(**kwargs)
            try:
                if memory is None:
                    msg = f"{type(self._model()).__name__} can't decode by a plan: {why}."
                    raise UnsupportedError(msg)
                self._found[kind] = self._agreement(kind, kwargs, output, memory, before)
            except NCError as error:
                if strict:
                    raise
                self._leave(kind, str(error).splitlines()[0])
            return output

    def _memory_to_compare(self, cache: Any, kind: _Kind, tokens: int) -> Memory:
        """Return memory for a step; what an encoder has read has the places that a plan gives it."""
        step = self._steps.get((kind.masked, kind.drafted))
        return memory_of(cache, tokens, fills=step is not None and step.reads_source_mask)

    def _leave(self, kind: _Kind, why: str) -> None:
        """Leave such steps to the model."""
        self._found[kind] = Unavailable(why)
        warn(f"Tokens are computed by the model itself: {why}")

    def _agreement(
        self, kind: _Kind, kwargs: Mapping[str, Any], output: Any, memory: Memory, cache: Any
    ) -> _Compared:
        """Return a step by a plan, and how it agrees with the model's own output.

        `cache` is a copy of the cache before this step, where the model rounds; else None.
        """
        name = type(self._model()).__name__
        more = sorted(key for key, value in output.items() if value is not None and key not in _GIVEN)
        if more:
            msg = f"{name} gives {', '.join(more)} too, which plans don't."
            raise UnsupportedError(msg)
        of_kind = kind.masked, kind.drafted
        if of_kind not in self._steps:
            self._steps[of_kind] = self._step(memory, *of_kind)
        before = self._found.get(kind)
        before = before if isinstance(before, _Compared) else _Compared(self._steps[of_kind])
        tokens = kwargs[self._names.ids].shape[1]
        count = cache_of(kwargs).get_seq_length() - tokens
        try:
            logits = _run(before.step, kwargs, memory, count, self._names)
        except (
            RuntimeError,
            IndexError,
            ValueError,
        ) as error:  # of an operator, with sizes that the graph is not for
            msg = f"A token of {name} can't be computed by a plan: {error}"
            raise BackendError(msg) from error
        expected = [output.logits, *_last(cache_of(kwargs), tokens)]
        owns = chain(*zip(memory.keys, memory.values, strict=True))
        new = [
            own[:, :, count : count + tokens][:, :, -side.shape[2] :]
            for side, own in zip(expected[1:], owns, strict=True)
        ]
        found = worst_sqnr_db(expected, [logits, *new])
        required = _EXACT_DB if cache is None else _ROUNDED_DB
        if cache is not None and not found >= required:
            own = min(self._own_db(kwargs, expected, copy.deepcopy(cache), seed) for seed in range(_DRAWS))
            required = min(required, max(_LEAST_DB, own - _MARGIN_DB))
        if not found >= required:
            msg = (
                f"A token by a plan differs from {name}'s own: {found:.1f} dB, expected at least "
                f"{required:.0f}."
            )
            raise VerificationError(msg)
        return _Compared(before.step, min(before.db, found), before.tokens + 1)

    def _is_rounded(self) -> bool:
        """Return whether the model rounds activations, so that last bits move codes."""
        model = self._model()
        assert model is not None
        return model.dtype != torch.float32 or any(layer.act_dtype != "fp32" for layer in self.layers)

    def _own_db(
        self, kwargs: Mapping[str, Any], expected: Sequence[torch.Tensor], cache: Any, seed: int
    ) -> float:
        """Return how the model agrees with itself when its cache has a little noise.

        Args:
            kwargs: of the step.
            expected: what it gave: logits, and keys and values of the tokens.
            cache: as before the step; changed here.
            seed: of the noise.
        """
        generator = torch.Generator().manual_seed(seed)
        for part in filter(None, (own_part(cache), source_part(cache))):
            for layer in part.layers:
                for name in ("keys", "values"):
                    side = getattr(layer, name)
                    noise = torch.randn(side.shape, generator=generator, dtype=torch.float32, device="cpu")
                    by = 1 + _NOISE * torch.finfo(side.dtype).eps * noise
                    setattr(layer, name, (side * by).to(side.dtype))
        name = next(name for name in CACHE_NAMES if kwargs.get(name) is not None)
        again = self._forward(**{**kwargs, name: cache})
        tokens = kwargs[self._names.ids].shape[1]
        return worst_sqnr_db(expected, [again.logits, *_last(cache, tokens)])

    def _step(self, memory: Memory, masked: bool, drafted: bool) -> _Step:
        """Return what computes a step.

        Some models can be captured only with a mask, which hides nothing then.
        """
        model = self._model()
        assert model is not None
        try:
            module = captured(model, memory, masked, drafted)
        except CaptureError as error:
            if masked:
                raise
            try:
                module = captured(model, memory, True, drafted)
            except CaptureError:
                raise error from None
        inputs = tuple(str(node.target) for node in module.graph.nodes if node.op == "placeholder")
        return _Step(plan_token(module, self.layers), inputs)


def _last(cache: Any, tokens: int) -> list[torch.Tensor]:
    """Return keys and values of the last tokens, layer by layer; layers with a short window keep fewer."""
    layers = own_part(cache).layers
    return [side[:, :, -tokens:] for layer in layers for side in (layer.keys, layer.values)]


def _kind(kwargs: Mapping[str, Any], names: StepNames) -> _Kind:
    mask = kwargs.get(names.mask)
    masked = mask is not None and not bool(mask.all())
    texts, tokens = kwargs[names.ids].shape
    return _Kind(masked, texts > 1, masked and kwargs.get("position_ids") is None, tokens > 1)


def _are_few_tokens(ids: Any) -> TypeGuard[torch.Tensor]:
    """Return whether ids are those of few tokens of each text, on the CPU."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.device.type != "cpu":
        return False
    return 1 <= ids.shape[1] <= MOST_TOKENS


def _is_watched(ids: torch.Tensor) -> bool:
    """Return whether torch records or changes what is computed, which it does not see in a plan."""
    return torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or in_trace(ids)


def _follows(kwargs: Mapping[str, Any], count: Any, shape: Sequence[int], names: StepNames) -> bool:
    """Whether tokens directly follow the `count` tokens in the cache, as far as their positions are given.

    `shape`: of the ids, [batch, tokens].
    """
    if not isinstance(count, int) or count <= 0:
        return False
    batch, tokens = shape
    mask, positions, place = map(kwargs.get, (names.mask, "position_ids", "cache_position"))
    fit = (batch, tokens), (1, tokens)
    return (
        (mask is None or _is_plain(mask, (batch, count + tokens), tokens))
        and (positions is None or (positions.dtype in _INTEGERS and positions.shape in fit))
        and (place is None or place.tolist() == list(range(count, count + tokens)))
    )


def _reads_something(kwargs: Mapping[str, Any], names: StepNames) -> bool:
    """Return whether there is an encoder's result that holds no mask, and a part of each text is seen.

    A text of which a mask hides all gets the mean of all places, and a plan has more of them.
    """
    read, mask = kwargs.get("encoder_outputs"), kwargs.get(names.source_mask)
    if read is None or getattr(read, "attention_mask", None) is not None:
        return False
    return mask is None or bool(mask.any(-1).all())


def _is_plain(mask: Any, shape: tuple[int, int], tokens: int) -> bool:
    """Return whether a mask hides places of the cache, but not the tokens themselves.

    In some models a text that sees nothing gets the mean of all places, and a plan has more of them.
    """
    if not isinstance(mask, torch.Tensor) or mask.shape != shape:
        return False
    return not mask.is_floating_point() and bool(mask[:, -tokens:].all())


def _asks_for_more(kwargs: Mapping[str, Any], config: Any, names: StepNames) -> bool:
    """Whether arguments, or the model's configuration, ask for another output than logits and the cache."""
    known = _KNOWN | {names.ids, names.mask, names.source_mask}
    if any(value is not None and value is not False for name, value in kwargs.items() if name not in known):
        return True
    if any(
        (getattr(config, name, True) if kwargs.get(name) is None else kwargs[name]) is False
        for name in ("use_cache", "return_dict")
    ):
        return True
    if type(kwargs.get("logits_to_keep", 0)) is not int:
        return True
    return any(
        getattr(config, name, False) and kwargs.get(name) is None
        for name in ("output_hidden_states", "output_attentions")
    )


def _run(
    step: _Step, kwargs: Mapping[str, Any], memory: Memory, count: int, names: StepNames
) -> torch.Tensor:
    """Return the logits [batch, tokens, vocabulary]; keys and values of the tokens are written to `memory`.

    There are those of the last tokens alone, as far as the call says so.
    """
    ids, positions, mask = kwargs[names.ids], kwargs.get("position_ids"), kwargs.get(names.mask)
    tokens, keep = ids.shape[1], kwargs.get("logits_to_keep", 0)
    place = torch.arange(count, count + tokens, dtype=torch.int64, device="cpu")
    given = {"ids": ids.long(), "place": place, "keys": memory.keys, "values": memory.values}
    given["positions"] = (place if positions is None else positions.long()).expand(ids.shape)
    if "mask" in step.inputs:
        seen = (
            torch.ones(len(ids), count + tokens, dtype=torch.int64, device="cpu")
            if mask is None
            else mask.bool().long()
        )
        given["mask"] = torch.nn.functional.pad(seen, (0, memory.places - count - tokens))
    if memory.source is not None:
        given |= {"source_keys": memory.source.keys, "source_values": memory.source.values}
        if step.reads_source_mask:
            given["source_mask"] = _source_mask(kwargs.get(names.source_mask), memory.source)
    with torch.no_grad():
        (logits,) = step.model(*(given[name] for name in step.inputs))
    return logits[:, -keep:] if 0 < keep < tokens else logits


def _source_mask(mask: torch.Tensor | None, source: SourceMemory) -> torch.Tensor:
    """Return a mask [batch, places] of what an encoder has read."""
    batch, read = len(source.keys[0]), source.shown[0][0].shape[2]
    seen = torch.ones(batch, read, dtype=torch.int64, device="cpu") if mask is None else mask.bool().long()
    return torch.nn.functional.pad(seen, (0, source.places - read))


def _own_forward(model: Any) -> Any:
    return types.MethodType(type(model).forward, model)


def _output(logits: torch.Tensor, cache: Any, kwargs: Mapping[str, Any]) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast, Seq2SeqLMOutput

    read = kwargs.get("encoder_outputs")
    if read is not None:
        held = {cache_field(Seq2SeqLMOutput): cache}
        return Seq2SeqLMOutput(logits=logits, encoder_last_hidden_state=read[0], **held)
    return CausalLMOutputWithPast(logits=logits, **{cache_field(CausalLMOutputWithPast): cache})
