"""A quantized model with the surface of a transformers model."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from nc.api.artefact import load, save
from nc.api.quantized import QuantizedModel
from nc.api.warm import inputs_of, warm_up
from nc.errors import ArtefactError, InputError, StateError
from nc.hf import checksums
from nc.hf.folder import ARTEFACT, CONFIG, ENCODER, read_by_others
from nc.hf.loss import LABELS, with_loss
from nc.numerics.metrics import sqnr_db
from nc.storage.atomic import check_ours, replaced, resolved
from nc.storage.folder import is_artefact

#: Lengths are filled up to a multiple of it, so that a few plans serve texts of any length.
MULTIPLE = 16
#: Outputs that agree so well are the same but for the order of sums, in dB.
SAME_DB = 60.0
#: Outputs with a value for each token; others for each text. Logits are either, by their dimensions.
_OF_TOKENS = frozenset({"last_hidden_state", "start_logits", "end_logits"})
_OTHERS = frozenset({"pooler_output", "logits"})
#: What transformers models take for arguments of texts that are left out.
_DEFAULTS = {"attention_mask": 1, "token_type_ids": 0}
#: What forward of transformers models takes beside tensors, with the value that changes nothing.
_IDLE = {
    "return_dict": (None, True),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}


def refuse_push() -> NoReturn:
    """Raise StateError: transformers would push a folder without the artefact."""
    msg = (
        "A quantized graph is not pushed by itself: save it with save_pretrained(folder), and upload the "
        "folder with huggingface_hub.upload_folder."
    )
    raise StateError(msg)


class QuantizedTransformer(torch.nn.Module):
    """A quantized model that is called, configured and saved as a transformers model.

    Attributes:
        quantized: the model, without the surface.
        config: transformers' configuration of the model that was quantized.
        folder: that it was loaded from; None: it was not.
        lengths: texts are filled up to the next one of these numbers of tokens; longer ones, and all without
            it, to a multiple of 16.
    """

    def __init__(
        self,
        quantized: QuantizedModel,
        config: Any,
        folder: str | None = None,
        lengths: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.quantized, self.config, self.folder = quantized, config, folder
        self.lengths = sorted_lengths(lengths)
        self._again: Any = None  # opens the folder again, for other processes
        self._fills: bool | None = None  # not known until a text could be filled up
        self.main_input_name = self._names()[0]
        self.eval()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        return_dict: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        cu_seq_lens_k: torch.Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
    ) -> Any:
        """Return what the model returned for the example inputs: outputs by attribute, key and index.

        Where the engine computes the rows of real tokens only, padding costs nothing, and its rows are zeros
        in outputs. With others, texts are filled up with tokens that the attention mask leaves out, see
        `lengths`. The first text is computed alone, too: where that gives something else, as for models with
        convolutions over tokens, or has other outputs than are known here, no text is filled up.

        Texts may follow each other in one row, as transformers' `DataCollatorWithFlattening` gives them:
        `cu_seq_lens_q` says where they begin, int32 [texts + 1]. Outputs of tokens are one row then.

        Labels add the loss that transformers computes for outputs of that kind.

        Raises:
            InputError: an argument that the example inputs lacked, and that would change the result; labels
                where no loss is known.
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        if cu_seq_lens_q is not None:
            return self.quantized(**{name: value for name, value in given.items() if value is not None})
        inputs = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        labels_given = {name: inputs.pop(name) for name in LABELS if name in inputs}
        for name, allowed in _IDLE.items():
            if given[name] not in allowed:
                msg = f"{name}={given[name]!r}: the quantized model has no such output."
                raise InputError(msg)
        for name in sorted(set(inputs) - set(self._names())):
            if name != "token_type_ids" or bool(inputs[name].any()):
                msg = (
                    f"{name} was not among the example inputs ({', '.join(self._names())}), so the quantized "
                    "model has no place for it."
                )
                raise InputError(msg)
            del inputs[name]
        if input_ids is not None:
            for name in set(_DEFAULTS) & set(self._names()) - set(inputs):
                inputs[name] = torch.full_like(input_ids, _DEFAULTS[name])
        outputs = self._computed(inputs)
        return with_loss(outputs, labels_given, self.config) if labels_given else outputs

    def _computed(self, inputs: dict[str, torch.Tensor]) -> Any:
        """Return the outputs for inputs of the right names, filled up where that changes nothing."""
        any_size = self._fills is False or self.quantized.engine.texts is not None
        more = 0 if any_size else self._missing(inputs)
        if more and self._fills:
            return _cut(self.quantized(**self._filled(inputs, more)), more)
        outputs = self.quantized(**inputs)
        if more:
            self._fills = _is_known(outputs) and _is_alike(
                outputs, _cut(self.quantized(**self._filled(inputs, more)), more), inputs["attention_mask"]
            )
        return outputs

    def settle(self) -> None:
        """Find out whether texts may be filled up, so that no request waits for it.

        Raises:
            InputError: the inputs are not texts.
        """
        if self.main_input_name != "input_ids":
            msg = f"lengths={self.lengths}: numbers of tokens are for models over texts."
            raise InputError(msg)
        graph = self.quantized.graph
        between = graph.example[0].shape[1:-1]  # e.g. the number of choices
        args, kwargs = inputs_of(graph, (1, *between, max(self.lengths[0] - 1, 1)))
        with torch.no_grad():
            self(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of inputs and outputs other than token ids."""
        return torch.float32

    def can_generate(self) -> bool:
        """Return False: it has no cache of keys and values."""
        return False

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **_: Any
    ) -> None:
        """Write config.json and, in the folder `nc`, the artefact, and checksums of both; other files stay.

        Raises:
            ArtefactError: a config.json is there without an artefact of nc, or `nc` is something else; or
                they cannot be written.
            StateError: it is to be pushed.
        """
        if push_to_hub:
            refuse_push()
        folder = resolved(save_directory)
        earlier = is_artefact(folder / ARTEFACT)
        check_ours(folder / CONFIG, lambda _: earlier)
        check_ours(folder / checksums.TABLE, checksums.is_table)
        if (folder / ENCODER).exists():
            msg = f"{folder} holds a model with an encoder and a decoder. Choose another folder."
            raise ArtefactError(msg)
        save(self.quantized, folder / ARTEFACT)
        with replaced(folder / CONFIG, lambda _: earlier) as staged:
            self.config.to_json_file(staged)
        checksums.write(folder, [folder / CONFIG, *(folder / ARTEFACT).iterdir()])

    def push_to_hub(self, *_: Any, **__: Any) -> None:
        """Refuse.

        Raises:
            StateError: always.
        """
        refuse_push()

    def __reduce__(self) -> tuple[Any, ...]:
        """Give the folder that it was loaded from, for other processes; refuse without one."""
        if self._again is None:
            return self.quantized.__reduce_ex__(2)
        return self._again, ()

    def _names(self) -> tuple[str, ...]:
        """Return the names of the inputs that the example had."""
        return tuple(p.name for p in self.quantized.graph.signature.parameters if p.captured)

    def _missing(self, inputs: dict[str, torch.Tensor]) -> int:
        """Return how many tokens are to be filled up; 0 where the inputs are more than ids and masks."""
        texts = {"input_ids", "attention_mask", "token_type_ids"}
        if not {"input_ids", "attention_mask"} <= set(inputs) <= texts:
            return 0
        length = inputs["input_ids"].shape[-1]  # choices come before it
        most = getattr(self.config, "max_position_embeddings", None)
        known = next((each for each in self.lengths if each >= length), length + -length % MULTIPLE)
        more = known - length
        return more if most is None or length + more <= most else 0

    def _filled(self, inputs: dict[str, torch.Tensor], more: int) -> dict[str, torch.Tensor]:
        padding = {"input_ids": getattr(self.config, "pad_token_id", None) or 0}
        return {
            name: torch.nn.functional.pad(value, (0, more), value=padding.get(name, 0))
            for name, value in inputs.items()
        }


def sorted_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return numbers of tokens in their order.

    Raises:
        InputError: something else.
    """
    if not isinstance(lengths, Sequence) or not all(type(n) is int and n > 0 for n in lengths):
        msg = f"lengths={lengths!r}: give a list of numbers of tokens, such as [32, 128]."
        raise InputError(msg)
    return tuple(sorted(lengths))


def load_model(
    folder: str | os.PathLike[str],
    warm: Sequence[Any] = (),
    lengths: Sequence[int] = (),
    *,
    trust_remote_code: bool = False,
    expected: str = "",
    **options: Any,
) -> QuantizedTransformer:
    """Return what `QuantizedTransformer.save_pretrained` wrote; its other files are checked already.

    Its class has the name of the float model's class: `pipeline` logs an error for other names.

    Args:
        folder: the folder that was written.
        warm: as for `nc.load`.
        lengths: as in `QuantizedTransformer`.
        trust_remote_code: as in transformers, for the configuration.
        expected: `checksums.identity` of the artefact; "": any.
        options: options of `nc.load`.

    Raises:
        ArtefactError: a file is missing or damaged, or the artefact is not the expected one.
    """
    from transformers import AutoConfig

    lengths, place = sorted_lengths(lengths), Path(folder).resolve()
    found = checksums.identity(place / ARTEFACT)
    if expected not in ("", found):
        msg = f"{place} holds another model than it did when this one was loaded. Load it again."
        raise ArtefactError(msg)
    with read_by_others(place / CONFIG, trust_remote_code):
        config = AutoConfig.from_pretrained(str(place), trust_remote_code=trust_remote_code)
        name = str((config.architectures or [QuantizedTransformer.__name__])[0])
    kind: Any = type(name, (QuantizedTransformer,), {"__doc__": QuantizedTransformer.__doc__})
    loaded = load(place / ARTEFACT, **options)
    if not isinstance(loaded, QuantizedModel):
        msg = f"{place / ARTEFACT} holds a {type(loaded).__name__}, and {CONFIG} is for a quantized graph."
        raise ArtefactError(msg)
    model: QuantizedTransformer = kind(loaded, config, str(place), lengths)
    model._again = functools.partial(
        load_model,
        str(place),
        (),
        lengths,
        trust_remote_code=trust_remote_code,
        expected=found,
        **options,
    )
    warm_up(model, warm, model.quantized.graph)
    if model.lengths:
        model.settle()
    return model


def _is_alike(alone: Mapping[str, Any], filled: Mapping[str, Any], mask: torch.Tensor) -> bool:
    """Whether texts have the same outputs alone and filled up; what the mask leaves out does not count."""

    def kept(value: torch.Tensor) -> torch.Tensor:
        return value[mask.bool()] if mask.dim() == 2 and value.shape[:2] == mask.shape else value

    return all(sqnr_db(kept(alone[name]), kept(filled[name])) >= SAME_DB for name in alone)


def _is_known(outputs: object) -> bool:
    """Return whether it is known which of the outputs have a value for each token."""
    return isinstance(outputs, Mapping) and set(outputs) <= _OF_TOKENS | _OTHERS


def _cut(outputs: Any, more: int) -> Any:
    """Return outputs without the values of tokens that were filled up."""
    for name, value in list(outputs.items()):
        if name in _OF_TOKENS or (name == "logits" and value.dim() == 3):
            outputs[name] = value[:, :-more].contiguous()  # users and losses call `view`
    return outputs
