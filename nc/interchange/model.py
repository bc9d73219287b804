"""What of a model goes into a file of another tool, and how such a file's content is put into a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from nc.algorithms.transforms import Rotation
from nc.errors import ArtefactError, UnsupportedError
from nc.interchange.folder import CONFIG, KEY
from nc.interchange.layer import StoredLayer
from nc.modules.layers import layers_of, memory_of, names_of
from nc.nn import QuantEmbedding, QuantLinear
from nc.numerics.packed_weight import PackedWeight
from nc.storage import pretrained_class
from nc.text.json_text import parsed
from nc.weights.experts import Experts
from nc.weights.history import history_of
from nc.weights.swap import refuse_save_pretrained

Contents = tuple[dict[str, StoredLayer], list[str], dict[str, torch.Tensor]]


def contents_of(model: torch.nn.Module | Mapping[str, PackedWeight]) -> Contents:
    """Return low-bit layers by name, names of the float linears, and all other tensors by name.

    Of tied tensors only the first is there.
    """
    if not isinstance(model, torch.nn.Module):
        return {name: StoredLayer(weight) for name, weight in model.items()}, [], {}
    stack = next((name for name, module in model.named_modules() if isinstance(module, Experts)), None)
    if stack is not None:
        msg = (
            f"{stack!r} holds experts that transformers keeps in one tensor, with a separate weight for "
            "each. Tools look for these under names that differ from model to model, so this one can't be "
            "exported; nc.save stores it."
        )
        raise UnsupportedError(msg)
    _refuse_new_biases(model)
    modules = model.named_modules(remove_duplicate=False)
    packed = {name: module for name, module in modules if isinstance(module, (QuantLinear, QuantEmbedding))}
    own = {f"{name}.{part}" for name, module in packed.items() for part in module.packed.tensors()}
    floats = [layer.name for layer in layers_of(model) if layer.kind == "linear"]
    return _layers(packed), floats, _other_tensors(model, own)


def _layers(packed: Mapping[str, QuantLinear | QuantEmbedding]) -> dict[str, StoredLayer]:
    """Return low-bit layers, those with several names under the first."""
    first: dict[QuantLinear | QuantEmbedding, str] = {}
    for name, module in packed.items():
        first.setdefault(module, name)
    layers: dict[str, StoredLayer] = {}
    for module, name in first.items():
        act_dtype = str(module.act_dtype) if isinstance(module, QuantLinear) else "fp32"
        layers[name] = StoredLayer(module.packed, act_dtype, embedding=isinstance(module, QuantEmbedding))
    return layers


def _other_tensors(model: torch.nn.Module, own: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model by name, of tied ones the first, but for its `own` packed ones."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if name in own or (tensor.numel() and place in seen):
            continue
        seen.add(place)
        tensors[name] = tensor.detach()
    return tensors


def _refuse_new_biases(model: torch.nn.Module) -> None:
    """Raise UnsupportedError if a rotation gave linears biases.

    Tools build the model from its configuration, and pass over these.
    """
    rotated = any(applied.algorithm == Rotation.name for applied in history_of(model).applied)
    described = pretrained_class.description(model) if rotated else None
    if described is None:
        return
    plain = {
        name
        for name, _ in pretrained_class.build(described, len(model.state_dict())).named_parameters(
            remove_duplicate=False
        )
    }
    new = [
        name
        for name, _ in model.named_parameters()
        if name.rpartition(".")[2] == "bias" and name not in plain
    ]
    if new:
        msg = (
            f"Rotation() moved the bias of a norm to {new[0]!r}, which a {type(model).__name__} has not: "
            "other tools would leave it out. Quantize without Rotation(), or store the model with nc.save."
        )
        raise UnsupportedError(msg)


def settings_of(
    model: torch.nn.Module | Mapping[str, PackedWeight], config: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the JSON files of a folder, by name.

    They are transformers' files of a model that has them, with the `quantization_config`.
    """
    files: dict[str, dict[str, Any]] = {CONFIG: {}}
    for attribute, name in (("config", CONFIG), ("generation_config", "generation_config.json")):
        as_text = getattr(getattr(model, attribute, None), "to_json_string", None)
        if callable(as_text):
            files[name] = parsed(as_text(), finite=False)
    if files[CONFIG]:
        files[CONFIG]["architectures"] = [type(model).__name__]
        if isinstance(_head(model), QuantLinear):
            files[CONFIG]["tie_word_embeddings"] = (
                False  # or readers would put the embedding in the head's place
            )
    files[CONFIG][KEY] = dict(config)
    return files


def _head(model: Any) -> Any:
    get = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else None


def put(
    model: torch.nn.Module, layers: Mapping[str, StoredLayer], tensors: Mapping[str, torch.Tensor], path: str
) -> torch.nn.Module:
    """Replace the layers of a model and load its other tensors; see `nc.interchange.import_weights`."""
    rest = dict(tensors)
    found = {
        name: _module(model, name, layer, rest.pop(f"{name}.bias", None), path)
        for name, layer in layers.items()
    }
    names = {name: several for several in names_of(model).values() for name in several}
    made = {name: module for first, module in found.items() for name in names[first]}
    _check_rest(model, made, rest, path)
    for name, module in made.items():
        model.set_submodule(name, module)
        refuse_save_pretrained(model, name)
    model.load_state_dict(rest, strict=False)
    return model.eval()


def _module(
    model: torch.nn.Module, name: str, layer: StoredLayer, bias: torch.Tensor | None, path: str
) -> torch.nn.Module:
    """Return the module that takes the place of the model's."""
    try:
        old = model.get_submodule(name)
    except AttributeError:
        old = torch.nn.Module()
    known = {found.name: (found.kind, found.shape) for found in layers_of(model)}
    kind, shape = known.get(name, ("", (0, 0)))
    if isinstance(old, (QuantLinear, QuantEmbedding)):
        kind, shape = "linear" if isinstance(old, QuantLinear) else "embedding", old.packed.shape
    if not kind:
        msg = (
            f"{path!r} holds a low-bit weight of {name!r}, and the model has no linear or embedding of this "
            "name."
        )
        raise ArtefactError(msg)
    if shape != layer.weight.shape:
        msg = (
            f"{path!r}: the weight of {name!r} has shape {list(layer.weight.shape)}, in the model "
            f"{list(shape)}."
        )
        raise ArtefactError(msg)
    if kind == "embedding":
        kept = old.result_dtype if isinstance(old, QuantEmbedding) else old.weight.dtype
        return QuantEmbedding(layer.weight, getattr(old, "padding_idx", None), kept)  # type: ignore[arg-type]
    if (bias is None) != (getattr(old, "bias", None) is None):
        there, here = ("no bias", "has one") if bias is None else ("a bias", "has none")
        msg = f"{path!r}: {name!r} has {there} in the files, and the model {here}."
        raise ArtefactError(msg)
    if bias is not None and tuple(bias.shape) != (shape[0],):
        msg = f"{path!r}: the bias of {name!r} has shape {list(bias.shape)} instead of {[shape[0]]}."
        raise ArtefactError(msg)
    kept = old.result_dtype if isinstance(old, QuantLinear) else old.weight.dtype
    return QuantLinear(layer.weight, bias, layer.act_dtype, result_dtype=kept)  # type: ignore[arg-type]


def _check_rest(
    model: torch.nn.Module, made: Mapping[str, torch.nn.Module], rest: Mapping[str, torch.Tensor], path: str
) -> None:
    """All other tensors must be those of the model; of tied ones one is enough.

    Raises:
        ArtefactError: one is missing, superfluous or of another shape, or tied ones differ.
    """
    inside = tuple(f"{name}." for name in made)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(inside)}
    there = {state[name].data_ptr() for name in rest if name in state}
    missing = [
        name
        for name, tensor in state.items()
        if name not in rest and not (tensor.numel() and tensor.data_ptr() in there)
    ]
    extra = [name for name in rest if name not in state]
    wrong = [name for name, tensor in rest.items() if name in state and state[name].shape != tensor.shape]
    for names, what in (
        (missing, "is missing in the files"),
        (extra, "is not in the model"),
        (wrong, "has another shape in the model"),
    ):
        if names:
            msg = f"{path!r} does not fit this model: tensor {names[0]!r} {what} ({len(names)} in all)."
            raise ArtefactError(msg)
    _check_ties(state, rest, path)


def _check_ties(state: Mapping[str, torch.Tensor], rest: Mapping[str, torch.Tensor], path: str) -> None:
    """Raise ArtefactError if the files have two values for what is one tensor in the model."""
    first: dict[Any, str] = {}
    for name, tensor in rest.items():
        other = first.setdefault(memory_of(state[name]) if tensor.numel() else name, name)
        if other != name and not torch.equal(rest[other], tensor):
            msg = (
                f"{path!r} does not fit this model: {other!r} and {name!r} are one tensor in the model and "
                "two in the files. Build the model with a separate weight for each (in transformers: "
                "tie_word_embeddings=False)."
            )
            raise ArtefactError(msg)
