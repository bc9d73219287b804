"""Process-wide settings for the export of a model. They are restored afterwards.

Callers hold `nc.process.lock.LOCK`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO

import torch
from torch.nn.modules import transformer

from nc.capture.recurrent import AnyNumberOfSteps
from nc.capture.state import put_back
from nc.process.modes import PlainPath, evaluating

_NOISY_LOGGERS = (
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch._export.non_strict_utils",
)


@contextlib.contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put every submodule in eval mode.

    Afterwards each has its own mode again, and buffers and attributes are what they were before.
    """
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        with put_back(model), evaluating(model):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                # torch can't compare sparse tensors; their values are a separate tensor
                if buffer.layout is not torch.strided or not torch.equal(buffer, before):
                    buffer.copy_(before)


@contextlib.contextmanager
def usable_tensors(model: torch.nn.Module) -> Iterator[None]:
    """Put copies in the place of tensors that were made under `torch.inference_mode`.

    Export can't take such parameters and buffers.
    """
    with torch.inference_mode(False):
        copies: dict[int, torch.Tensor] = {}
        own: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for module in model.modules():
            held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for tensors in held:
                for name, tensor in tensors.items():
                    if tensor is not None and tensor.is_inference():
                        own.append((tensors, name, tensor))
                        copy = (
                            torch.nn.Parameter(tensor.clone(), False)
                            if isinstance(tensor, torch.nn.Parameter)
                            else tensor.clone()
                        )
                        tensors[name] = copies.setdefault(id(tensor), copy)
        try:
            yield
        finally:
            for tensors, name, tensor in own:
                tensors[name] = tensor


@contextlib.contextmanager
def exportable(oblivious: bool) -> Iterator[None]:
    """Set the process-wide switches that export needs, and put each back afterwards. Callers hold the lock.

    * `oblivious`: sizes 0 and 1 of the example stay symbols. So a batch of 1 does not fix the batch size.
    * The fast path of `nn.MultiheadAttention` is off, because it hides the linears in one operator.
    * transformers builds some masks with vmap, which torch cannot export, or only as control flow.
      Broadcasting gives the same mask.
    * A recurrent layer is traced as one operator, because torch traces its steps, whose number would be that
      of the example.
    * torchvision computes non-maximum suppression in one of two ways, depending on the number of boxes, which
      export does not know. Only the way for few boxes is used. It takes any number and gives the same result.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.fx.experimental._config.patch(backed_size_oblivious=oblivious))  # type: ignore[attr-defined] # installed at run time
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(PlainPath())
        stack.enter_context(_broadcast_masks())
        stack.enter_context(_one_way_of_nms())
        stack.enter_context(AnyNumberOfSteps())
        stack.enter_context(contextlib.redirect_stderr(_OtherThreads(sys.stderr)))
        for name in (
            _NOISY_LOGGERS
        ):  # they print a stack for every attempt that fails, and nc raises an error if all fail
            logger = logging.getLogger(name)
            stack.callback(setattr, logger, "disabled", logger.disabled)
            logger.disabled = True
        yield


@contextlib.contextmanager
def named_keywords(model: torch.nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Let `forward` have a parameter for each argument that it collects in `**kwargs`.

    Torch 2.8 frees no dimension of those otherwise.
    """
    signature = inspect.signature(model.forward)
    kept = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    extra = [name for name in names if name not in signature.parameters]
    if len(kept) == len(signature.parameters) or not extra:
        yield
        return
    original = model.forward
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in extra]
    with other_forward(
        model,
        lambda *args, **kwargs: original(*args, **kwargs),
        signature.replace(parameters=[*kept, *named]),
    ):
        yield


@contextlib.contextmanager
def other_forward(
    model: torch.nn.Module, run: Callable[..., Any], signature: inspect.Signature
) -> Iterator[None]:
    """Put another function with this signature in place of the model's `forward`.

    The model's own is put back afterwards.
    """
    original, own = model.forward, "forward" in vars(model)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    forward.__signature__ = signature  # type: ignore[attr-defined] # `inspect.signature` reads it
    model.forward = forward
    try:
        yield
    finally:
        if own:
            model.forward = original
        else:
            del model.forward


@contextlib.contextmanager
def without_causal_hint() -> Iterator[None]:
    """Keep torch's Transformer encoders and decoders from checking whether a mask is causal.

    The check reads the mask's values, which export can't do. Its result is only a hint for the kernel:
    attention gets the mask in any case.
    """
    original = transformer._detect_is_causal_mask

    def hint(mask: object, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    transformer._detect_is_causal_mask = hint
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = original


class _Weights(list[Any]):
    """A list that export takes for one value, because pytree knows plain lists only."""


@contextlib.contextmanager
def one_list_of_weights(model: torch.nn.Module) -> Iterator[None]:
    """Give a model that is a recurrent layer a list of parameters that export takes as one value.

    Such a layer writes each parameter that it is given into the list. Export gives it fake ones for a while,
    and torch 2.8 refuses tensors that change in attributes of the model itself.
    """
    if not isinstance(model, torch.nn.RNNBase):
        yield
        return
    kept: list[Any] = model._flat_weights
    model._flat_weights = _Weights(kept)
    try:
        yield
    finally:
        model._flat_weights = kept


@contextlib.contextmanager
def zeros_at_padding(model: torch.nn.Module) -> Iterator[None]:
    """Let each `nn.TransformerEncoder` return what its nested tensors return in eval mode.

    It does so on its plain path, which can be exported.

    With nested tensors it leaves padding out, and returns zeros in its place, but only if all padding is
    after the tokens (`mask_check`).
    """
    with contextlib.ExitStack() as stack:
        for encoder in model.modules():
            nests = (
                torch.backends.mha.get_fastpath_enabled()
                and getattr(encoder, "use_nested_tensor", False)
                and type(encoder).forward is torch.nn.TransformerEncoder.forward
            )
            if nests and isinstance(encoder, torch.nn.TransformerEncoder):
                encoder.use_nested_tensor = (
                    False  # torch 2.8 asks whether padding is after the tokens, which it can't export
                )
                stack.callback(setattr, encoder, "use_nested_tensor", True)
                last = encoder.layers[-1]
                run = functools.partial(_without_padding, last.forward, getattr(encoder, "mask_check", True))
                stack.enter_context(other_forward(last, run, inspect.signature(last.forward)))
        yield


def _without_padding(
    layer: Callable[..., torch.Tensor], check: bool, src: torch.Tensor, **options: Any
) -> torch.Tensor:
    return zero_padding(layer(src, **options), src, options, check)


def zero_padding(
    output: torch.Tensor, src: torch.Tensor, options: Mapping[str, Any], check: bool
) -> torch.Tensor:
    """Return the output of an encoder layer with zeros at padding.

    Without a padding mask, with an attention mask, or for an input without batch, return it unchanged.

    Args:
        output: the layer's output, shape [batch, length, features].
        src: the layer's input, same shape.
        options: the layer's other arguments. `src_key_padding_mask` is additive: 0 for tokens.
        check: set no zeros if padding is before a token in any row of the batch.
    """
    mask = options.get("src_key_padding_mask")
    if mask is None or options.get("src_mask") is not None or src.dim() != 3:
        return output
    padding = mask != 0
    if check:
        padding = padding & ~(padding[:, :-1] & ~padding[:, 1:]).any()
    return output.masked_fill(padding[..., None], 0.0)


class _OtherThreads(io.TextIOBase):
    """Standard error for all other threads.

    This one is silent, because export prints the whole graph whenever an attempt fails.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._muted = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._muted else self._stream.write(text)


@contextlib.contextmanager
def _broadcast_masks() -> Iterator[None]:
    masks: Any = sys.modules.get("transformers.masking_utils")
    name = next(
        (name for name in ("_vmap_for_bhqkv", "_vmap_expansion_sdpa") if hasattr(masks, name)), None
    )  # transformers 4 and 5
    if name is None:
        yield
        return
    original = getattr(masks, name)

    def broadcast(mask_function: Callable[..., torch.Tensor], bh_indices: bool = True) -> Any:
        def mask(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            if not bh_indices:
                return mask_function(b, h, q[:, None], k[None, :]).expand(q.shape[0], k.shape[0])
            grid = mask_function(b[:, None, None, None], h[None, :, None, None], q[:, None], k[None, :])
            return grid.expand(b.shape[0], h.shape[0], q.shape[0], k.shape[0])

        return mask

    # it turns indexing into what vmap understands, which torch 2.13 exports as a control-flow operator
    indexing = getattr(masks, "TransformGetItemToIndex", contextlib.nullcontext)
    setattr(masks, name, broadcast)
    masks.TransformGetItemToIndex = contextlib.nullcontext
    try:
        yield
    finally:
        masks.TransformGetItemToIndex = indexing
        setattr(masks, name, original)


@contextlib.contextmanager
def _one_way_of_nms() -> Iterator[None]:
    boxes: Any = sys.modules.get("torchvision.ops.boxes")
    if not hasattr(boxes, "batched_nms"):
        yield
        return
    original = boxes.batched_nms

    def batched_nms(
        boxes_: torch.Tensor, scores: torch.Tensor, idxs: torch.Tensor, iou_threshold: float
    ) -> torch.Tensor:
        """Boxes of different classes are moved apart, as torchvision does for few boxes.

        This is done also where there is no box at all.
        """
        largest = torch.nn.functional.pad(boxes_.flatten(), (0, 1)).max()
        keep: torch.Tensor = boxes.nms(
            boxes_ + (idxs.to(boxes_) * (largest + 1))[:, None], scores, iou_threshold
        )
        return keep

    boxes.batched_nms = batched_nms
    try:
        yield
    finally:
        boxes.batched_nms = original
