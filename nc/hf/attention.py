"""`attn_implementation="nc_flash"`: models of transformers without padding and matrices of scores.

transformers loads attentions whose names have "flash" in them by functions that are not public. This module
is the only one that uses them, and says which of them another version of transformers lacks.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import torch
import transformers
from transformers import masking_utils, modeling_flash_attention_utils, modeling_utils

from nc.errors import BackendUnavailableError, UnsupportedError
from nc.kernels import flash

#: What models call it. transformers asks whether a name has "flash" in it: then masks have two dimensions, or
#: are left out, and continuous batching makes none.
NAME = "nc_flash"
#: Names of transformers that are used here, by module.
_USED = {
    masking_utils: ("AttentionMaskInterface", "flash_attention_mask"),
    modeling_utils: ("AttentionInterface",),
    modeling_flash_attention_utils: (
        *("_lazy_imports", "_flash_attention_forward", "lazy_import_flash_attention"),
        *("_pad_input", "_unpad_input", "_flash_fn", "_flash_varlen_fn"),
    ),
}
#: In versions whose attentions may read a cache in pages.
_OF_CACHES = "_flash_with_kvcache_fn"
_MARK = "_nc_flash"
#: The oldest major version of transformers.
_OLDEST = 5
_LOCK = threading.Lock()


def register_attention() -> str:
    """Let models of transformers use attention of variable lengths, by the name that is returned.

    It computes nothing for padding and holds no matrix of scores. Texts that are padded, or packed with
    position ids or `cu_seq_lens_q`, use it, and from transformers 5.20 on continuous batching. It is for
    inference, in fp32 and bf16. Several calls, also on several threads, do the same as one.

    Returns:
        "nc_flash", for `attn_implementation=` or `model.set_attn_implementation`.

    Raises:
        BackendUnavailableError: there is no C code here, or the CPU has no AVX2.
        UnsupportedError: this version of transformers lacks what is needed; says what.
    """
    if why := flash.why_unavailable():
        msg = f'attn_implementation="{NAME}" is a function in C: {why}.'
        raise BackendUnavailableError(msg)
    _check_version(transformers.__version__, _USED)
    with _LOCK:
        _lend_functions(modeling_flash_attention_utils)
        modeling_utils.AttentionInterface.register(NAME, _attend)
        masking_utils.AttentionMaskInterface.register(NAME, masking_utils.flash_attention_mask)
    return NAME


def _check_version(version: str, used: dict[ModuleType, tuple[str, ...]]) -> None:
    """Raise UnsupportedError for a version of transformers that lacks names, or is too old."""
    names = [(module, name) for module, found in used.items() for name in found]
    missing = [f"{module.__name__}.{name}" for module, name in names if not hasattr(module, name)]
    why = f"it has no {', '.join(missing)}" if missing else ""
    if int(version.partition(".")[0]) < _OLDEST:
        why = "its encoders take no registered attention, and windows are one key too wide"
    if why:
        msg = (
            f'attn_implementation="{NAME}" does not work with transformers {version}: {why}. Install '
            f'transformers {_OLDEST} or newer, tested with 5.23, or use "sdpa".'
        )
        raise UnsupportedError(msg)


def _lend_functions(utils: Any) -> None:
    """Let transformers find the functions where it would import a package for the name."""
    real = utils._lazy_imports
    if hasattr(real, _MARK):
        return
    attentions = [flash.flash_attn_func, flash.flash_attn_varlen_func]
    if hasattr(utils, _OF_CACHES):
        attentions.append(flash.flash_attn_with_kvcache)

    def imports(implementation: Any, *args: Any, **kwargs: Any) -> Any:
        if implementation == NAME:
            return (*attentions, utils._pad_input, utils._unpad_input)
        return real(implementation, *args, **kwargs)

    setattr(imports, _MARK, True)
    utils._lazy_imports = imports


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention as transformers' models expect it: [texts, rows, heads, width], and no weights.

    transformers' own function for flash-attn reads the dtype of a module's first `torch.nn.Linear`, which
    quantized models may not have.

    Args:
        module: of the model.
        query: [texts, heads, rows, width].
        key: likewise, with heads of keys.
        value: likewise.
        attention_mask: [texts, keys], true for tokens that are not padding; None: there is no padding.
        dropout: 0.
        scaling: factor of the scores; 1 / sqrt(width) by default.
        sliding_window: keys that a row sees, its own among them.
        softcap: c of c * tanh(score / c).
        is_causal: whether a row sees no later one; as the module says by default.
        s_aux: attention sinks.
        cache: of continuous batching.
        kwargs: where texts begin, and others.

    Raises:
        UnsupportedError: attention sinks, weights as a result, a gradient, or a model that is captured.
        InputError: another dtype, or dropout.
    """
    if torch.compiler.is_exporting():
        msg = f'attn_implementation="{NAME}" is not a graph operator: capture the model with "sdpa".'
        raise UnsupportedError(msg)
    if s_aux is not None:
        who = type(module).__name__
        msg = f'attn_implementation="{NAME}" has no attention sinks, which {who} uses: use "eager".'
        raise UnsupportedError(msg)
    if kwargs.get("output_attentions"):
        msg = f'attn_implementation="{NAME}" holds no weights for output_attentions=True: use "eager".'
        raise UnsupportedError(msg)
    if cache is not None:
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=getattr(module, "layer_idx", None), kwargs=kwargs
        )
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if attention_mask is not None:
        scores: dict[str, Any] = {"softmax_scale": scaling, "causal": is_causal, "softcap": softcap or 0.0}
        scores |= {"window_size": (sliding_window - 1,) * 2} if sliding_window else {}
        return _attend_padded(module, query, key, value, attention_mask, dropout_p=dropout, **scores), None
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if isinstance(kwargs.get(name), torch.Tensor):
            kwargs[name] = kwargs[name].to(torch.int32)
    result = modeling_flash_attention_utils._flash_attention_forward(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        None,
        query_length=query.shape[2],
        is_causal=is_causal,
        dropout=dropout,
        softmax_scale=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        attn_implementation=NAME,
        **kwargs,
    )
    return result, None


def _attend_padded(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Return the attention to keys that are not padding; queries of padding get 0, if they are known.

    transformers' own function treats queries as padded where the last keys are. That is wrong for attention
    to the texts of an encoder.

    Args:
        module: of the model.
        query: [texts, heads, rows, width].
        key: likewise.
        value: likewise.
        mask: [texts, keys].
        options: of `flash_attn_varlen_func`.

    Raises:
        UnsupportedError: a mask of other dimensions.
    """
    if mask.dim() != 2:
        msg = (
            f'attn_implementation="{NAME}" takes attention_mask as [texts, keys], not {list(mask.shape)}: '
            'leave it to the model, or use "sdpa".'
        )
        raise UnsupportedError(msg)
    shown, (texts, _, rows, _) = mask.bool(), query.shape
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    keys = shown.shape[1]  # a static cache is longer
    starts = torch.nn.functional.pad(shown.sum(1).cumsum(0), (1, 0)).int()
    packed = k[:, :keys][shown], v[:, :keys][shown]
    is_other = not options["causal"] and (
        getattr(module, "is_decoder", False) or "Cross" in type(module).__name__
    )
    if rows == keys and not is_other:
        y = q.new_zeros(texts, rows, q.shape[2], v.shape[3])
        y[shown] = flash.flash_attn_varlen_func(q[shown], *packed, starts, starts, **options)
        return y
    # the last query is beside the last key: those of padding before it see no key
    each = torch.arange(texts + 1, dtype=torch.int32) * rows
    y = flash.flash_attn_varlen_func(q.flatten(0, 1), *packed, each, starts, **options)
    return y.view(texts, rows, *y.shape[1:])
