"""Losses of a quantized model's outputs, as transformers models return them where labels are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nc.errors import InputError

#: Arguments of `forward` that are labels.
LABELS = ("labels", "start_positions", "end_positions")
#: Class of outputs → the name by which transformers knows the loss.
_KINDS = {
    "SequenceClassifierOutput": "ForSequenceClassification",
    "ImageClassifierOutput": "ForImageClassification",
    "ImageClassifierOutputWithNoAttention": "ForImageClassification",
    "TokenClassifierOutput": "ForTokenClassification",
    "QuestionAnsweringModelOutput": "ForQuestionAnswering",
    "MaskedLMOutput": "ForMaskedLM",
}


def with_loss(outputs: Any, labels: Mapping[str, torch.Tensor], config: Any) -> Any:
    """Return outputs with the loss that transformers computes for their kind.

    Args:
        outputs: of the model.
        labels: by the names in `LABELS`.
        config: transformers' configuration of the model.

    Raises:
        InputError: the loss for such outputs is not known, or other labels belong to them.
    """
    from transformers.loss.loss_utils import LOSS_MAPPING

    kind = _KINDS.get(type(outputs).__name__, "")
    expected = LABELS[1:] if kind == "ForQuestionAnswering" else LABELS[:1]
    if not kind or set(labels) != set(expected):
        what = f"the labels are {' and '.join(expected)}" if kind else "no loss is known"
        msg = (
            f"{', '.join(labels)}: {what} for outputs of {type(outputs).__name__}. Call the model without "
            "them, and compute the loss from the outputs."
        )
        raise InputError(msg)
    given: dict[str, Any] = {"config": config, **labels}
    if kind == "ForQuestionAnswering":
        given |= {name: outputs[name] for name in ("start_logits", "end_logits")}
    elif kind in ("ForSequenceClassification", "ForImageClassification"):
        given["pooled_logits"] = outputs["logits"]
    else:
        given["logits"] = outputs["logits"]
    if kind == "ForMaskedLM":
        given["vocab_size"] = config.vocab_size
    loss: Any = LOSS_MAPPING[kind]
    return type(outputs)(loss=loss(**given), **outputs)
