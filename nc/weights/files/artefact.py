"""A model with low-bit weights ↔ a directory of safetensors, JSON and checksums.

See docs/concepts/the-artefact.md.

The directory holds every parameter and buffer, how each packed weight is to be read, and what the report
says. The model's class is not in it: of a model of transformers its name and configuration are, for other
models `load` is given one.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nc.algorithms.transforms import Rotation
from nc.errors import ArtefactError
from nc.formats.tensor_format import SCALE_DTYPES, TensorFormat
from nc.graph.plan import Applied
from nc.modules.copies import sharing
from nc.modules.layers import Layer, layers_of, memory_of, settle_layers
from nc.nn import QuantEmbedding, QuantLinear
from nc.nn.origin import QuantizationRun
from nc.nn.result import LayerResult
from nc.numerics.low_bit import ACT_DTYPES
from nc.numerics.packed_weight import PackedWeight, check_parts
from nc.planning.layer_plan import LayerDecision
from nc.storage import folder, json_values, pretrained_class
from nc.storage.json_file import json_object
from nc.storage.tensor_file import Source, StoredTensor, stored_in
from nc.weights.encoders import zeros_at_padding
from nc.weights.experts import separated, stacked_names
from nc.weights.history import history_of, note
from nc.weights.swap import replace

FORMAT = "nc-weights"
SCHEMA = folder.FORMATS[FORMAT]
_PARTS = tuple(f.name for f in dataclasses.fields(PackedWeight) if f.name not in ("form", "shape"))


def write(
    model: torch.nn.Module,
    directory: str | os.PathLike[str],
    files: Mapping[str, Source] | None = None,
    card: str = "",
) -> None:
    """Write a model; the same model gives the same bytes.

    Args:
        model: holds at least one `QuantLinear` or `QuantEmbedding`.
        directory: created with its parents; an artefact that is there is replaced as a whole.
        files: names of tensors whose values are not in the model, but in files.
        card: the text of README.md; "": no such file.

    Raises:
        ArtefactError: something else is there, or the model holds something that an artefact can't; the
            message names it.
    """
    target = folder.replaceable(directory)
    described = (
        pretrained_class.description(model) if type(model).__module__.startswith("transformers.") else None
    )
    names, tensors = _tensors(model, files or {})
    document = {
        "format": FORMAT,
        "schema": SCHEMA,
        "versions": folder.versions(transformers=described is not None),
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "transformers": described,
        "record": _record(model),
        "layers": {name: _layer(name, module) for name, module in _packed_of(model)},
        "tensors": names,
    }
    try:
        json.dumps(document, allow_nan=False)
    except (TypeError, ValueError) as error:
        msg = f"The model's configuration or record holds a value that JSON can't store: {error}."
        raise ArtefactError(msg) from error
    folder.write(target, document, tensors, card)


def read(
    content: folder.FolderContent,
    model: torch.nn.Module | None = None,
    check: Callable[[torch.nn.Module], object] | None = None,
) -> torch.nn.Module:
    """Build the model.

    Args:
        content: the files.
        model: a float model that has the class; it stays as it is. None: transformers has the class.
        check: reads what the files say of the model, and fails where it is malformed.

    Raises:
        ArtefactError: the class is needed and not given, or the model given is another one.
        ArtefactCorruptError: the files agree with their checksums, but are not what `write` writes.
    """
    document = content.document
    with folder.malformed(content.directory / folder.MODEL):
        names = _names(document["tensors"])
        described = document["transformers"]
        if model is None and described is None:
            msg = (
                f"{str(content.directory)!r} holds the weights of a {document['class']}, but not the class. "
                "Give a model of it, e.g. a fresh one: nc.load(directory, model=MyModel()). Its own weights "
                "are not used."
            )
            raise ArtefactError(msg)
        built = pretrained_class.build(described, len(names)) if model is None else sharing(model)
        settle_layers(built, document["layers"])
        stored = content.tensors()
        if set(names.values()) != set(stored):
            msg = f"{folder.WEIGHTS} holds other tensors than are listed"
            raise ValueError(msg)
        built = separated(
            built,
            inplace=model is None,
            names={name for name in stacked_names(built) if f"{name}.0" in _modules(names)},
        )
        layers = {layer.name: layer for layer in layers_of(built)}
        for name, data in document["layers"].items():
            parts = {part: stored[names[f"{name}.{part}"]] for part in _PARTS if f"{name}.{part}" in names}
            _put(built, layers.get(name), name, data, parts)
        rotated = any(applied["algorithm"] == Rotation.name for applied in document["record"]["applied"])
        _fill(built, {name: stored[key] for name, key in names.items()}, names, rotated=rotated)
        note(built, _run_from(document["record"]))
        zeros_at_padding(built)
        if check is not None:
            check(built)
    return built.eval()


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return where the tensors of an artefact are stored, by all their names."""
    found = stored_in(directory / folder.WEIGHTS)
    document = json_object(directory / folder.MODEL)
    return {name: found[key] for name, key in _names(document["tensors"]).items()}


# ---- tensors ----


def _all_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _tensors(
    model: torch.nn.Module, files: Mapping[str, Source]
) -> tuple[dict[str, str], dict[str, torch.Tensor | Source]]:
    """For each tensor the name under which it is stored, that of the first where several are one.

    What is stored is returned too.
    """
    for name, module in model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            msg = (
                f"Module {name!r} ({type(module).__name__}) has its own extra state, which an artefact "
                "can't store."
            )
            raise ArtefactError(msg)
    names: dict[str, str] = {}
    stored: dict[str, torch.Tensor | Source] = {}
    first: dict[Any, str] = {}
    memory: set[int] = set()
    scales = {f"{name}.scale" for name, _ in _packed_of(model)}
    for name, tensor in _all_tensors(model):
        elsewhere = files.get(name)
        if (
            type(tensor.data) is not torch.Tensor
            or tensor.layout is not torch.strided
            or (not elsewhere and tensor.device.type != "cpu")
        ):
            msg = (
                f"{name!r} is a {type(tensor.data).__name__} on {tensor.device}, {tensor.layout}; an "
                "artefact holds dense CPU tensors."
            )
            raise ArtefactError(msg)
        names[name] = first.setdefault(memory_of(tensor) if tensor.numel() else name, name)
        if names[name] == name and elsewhere:
            stored[name] = elsewhere
        elif names[name] == name:
            is_e8m0 = (
                name in scales and tensor.dtype == torch.float8_e8m0fnu
            )  # for which safetensors has no name
            stored[name] = _storable(name, tensor.view(torch.uint8) if is_e8m0 else tensor, memory)
    return names, stored


def _storable(name: str, tensor: torch.Tensor, memory: set[int]) -> torch.Tensor:
    """Return the tensor, contiguous and in its own memory."""
    json_values.dtype_name(tensor.dtype, name)
    tensor = tensor.detach().contiguous()
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.numel() * tensor.element_size() or storage.data_ptr() in memory:
        tensor = tensor.clone()
    memory.add(tensor.untyped_storage().data_ptr())
    return tensor


def _fill(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], names: Mapping[str, str], *, rotated: bool
) -> None:
    """Put tensors in their places; those that were stored once become one.

    A `rotated` model can have biases that its class has not.
    """
    expected = {name for name, _ in _all_tensors(model)}
    biases = {
        name
        for name, p in tensors.items()
        if rotated and name not in expected and _is_new_bias(model, name, p)
    }
    _check_names(model, expected, [name for name in tensors if name not in biases])
    parameters: dict[str, torch.nn.Parameter] = {}
    for name, tensor in tensors.items():
        prefix, _, leaf = name.rpartition(".")
        owner = model.get_submodule(prefix)
        old = owner._parameters.get(leaf)  # there is no other way to leave ties as they are
        there = old if old is not None else owner._buffers.get(leaf)
        if there is not None and there.shape != tensor.shape:
            raise ArtefactError(
                _other_model(
                    model, f"its {name!r} has shape {tuple(there.shape)} instead of {tuple(tensor.shape)}"
                )
            )
        if name in biases:
            learns = tensor.is_floating_point() and not isinstance(owner, QuantLinear)
            owner._parameters[leaf] = parameters.setdefault(names[name], torch.nn.Parameter(tensor, learns))
        elif old is None:
            owner._buffers[leaf] = (
                tensor if there is None or there.is_meta or not _holds(owner, leaf) else there
            )
        else:
            fresh = torch.nn.Parameter(
                tensor,
                requires_grad=old.requires_grad and (tensor.is_floating_point() or tensor.is_complex()),
            )
            owner._parameters[leaf] = parameters.setdefault(names[name], fresh)
    _check_values(model)


def _check_names(model: torch.nn.Module, expected: set[str], names: Sequence[str]) -> None:
    """Raise ArtefactError if a tensor was not saved or a saved one has no place in the model."""
    missing = sorted(expected - set(names))
    unknown = [name for name in names if name not in expected and not _is_free(model, name)]
    if missing or unknown:
        what = f"it has {missing[0]!r}, which was not saved" if missing else f"it has no {unknown[0]!r}"
        raise ArtefactError(_other_model(model, what))


def _check_values(model: torch.nn.Module) -> None:
    """Raise ArtefactError if a module keeps a tensor without values, which an artefact can't give."""
    for name, module in model.named_modules():
        meta = [
            key for key, value in vars(module).items() if isinstance(value, torch.Tensor) and value.is_meta
        ]
        if meta:
            raise ArtefactError(
                _other_model(
                    model, f"module {name!r} keeps a tensor {meta[0]!r} that is not a parameter or buffer"
                )
            )


def _holds(owner: torch.nn.Module, leaf: str) -> bool:
    """Return whether a buffer is a part of a packed weight, which was put there already."""
    return isinstance(owner, (QuantLinear, QuantEmbedding)) and leaf in _PARTS


def _is_new_bias(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor is the bias of a linear that has none: `Rotation` moves the biases of norms there."""
    prefix, _, leaf = name.rpartition(".")
    owner = dict(model.named_modules(remove_duplicate=False)).get(prefix)
    return (
        leaf == "bias"
        and isinstance(owner, torch.nn.Linear)
        and owner.bias is None
        and tuple(tensor.shape) == (owner.out_features,)
    )


def _is_free(model: torch.nn.Module, name: str) -> bool:
    """Return whether a model has a buffer of this name that holds nothing yet."""
    prefix, _, leaf = name.rpartition(".")
    owner = dict(model.named_modules()).get(prefix)
    return owner is not None and owner._buffers.get(leaf, owner) is None


def _other_model(model: torch.nn.Module, what: str) -> str:
    return (
        f"This {type(model).__name__} is not the model that was saved: {what}. Give model=…, a float model "
        "built as the saved one was."
    )


def _modules(names: Mapping[str, str]) -> set[str]:
    return {name.rpartition(".")[0] for name in names}


def _names(data: Mapping[str, str]) -> dict[str, str]:
    if not all(isinstance(key, str) and isinstance(value, str) for key, value in data.items()):
        msg = "names of tensors"
        raise TypeError(msg)
    return dict(data)


# ---- layers ----


def _packed_of(model: torch.nn.Module) -> Iterator[tuple[str, QuantLinear | QuantEmbedding]]:
    return (
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (QuantLinear, QuantEmbedding))
    )


def _layer(name: str, module: QuantLinear | QuantEmbedding) -> dict[str, Any]:
    result = (
        None
        if module.result is None
        else {k: json_values.encode(v, name) for k, v in module.result.to_dict().items()}
    )
    return {
        "kind": "linear" if isinstance(module, QuantLinear) else "embedding",
        "shape": list(module.packed.shape),
        "form": module.form.to_dict(),
        "act_dtype": module.act_dtype if isinstance(module, QuantLinear) else "fp32",
        "result_dtype": json_values.dtype_name(module.result_dtype, name),
        "result": result,
    }


def _put(
    model: torch.nn.Module,
    layer: Layer | None,
    name: str,
    data: dict[str, Any],
    parts: dict[str, torch.Tensor],
) -> None:
    """Put a layer with a packed weight in the place of a float one."""
    form, shape = TensorFormat.from_dict(data["form"]), tuple(data["shape"])
    if layer is None or (layer.kind, layer.shape) != (data["kind"], shape):
        is_there = (
            "it has none"
            if layer is None
            else f"there it is a {layer.kind} of {layer.shape[0]} x {layer.shape[1]}"
        )
        raise ArtefactError(
            _other_model(
                model, f"{name!r} is a {data['kind']} of {' x '.join(map(str, shape))}, and {is_there}"
            )
        )
    if form.scale_dtype == "e8m0" and form.double_quant is None:
        parts = {**parts, "scale": parts["scale"].view(SCALE_DTYPES["e8m0"])}
    packed = PackedWeight(form=form, shape=layer.shape, **parts)
    check_parts(packed)
    result = (
        None
        if data["result"] is None
        else LayerResult.from_dict({k: json_values.decode(v) for k, v in data["result"].items()})
    )
    if data["act_dtype"] not in ACT_DTYPES:
        msg = f"act_dtype {data['act_dtype']!r}"
        raise ValueError(msg)
    base: dict[str, Any] = {
        "operator": name,
        "kind": layer.kind,
        "module_type": layer.module_type,
        "shape": layer.shape,
    }
    replace(model, layer, LayerDecision(**base, form=form, act_dtype=data["act_dtype"]), packed, result)
    new = model.get_submodule(name)
    if isinstance(new, (QuantLinear, QuantEmbedding)):
        new.result_dtype = json_values.DTYPES[data["result_dtype"]]


# ---- what the report says ----


def _record(model: torch.nn.Module) -> dict[str, Any]:
    record = history_of(model)
    applied = [
        {"algorithm": a.algorithm, "operators": list(a.operators), "text": a.text} for a in record.applied
    ]
    return {"plan": record.plan, "applied": applied, "config": record.config}


def _run_from(data: dict[str, Any]) -> QuantizationRun:
    applied = tuple(
        Applied(str(a["algorithm"]), tuple(a["operators"]), str(a["text"])) for a in data["applied"]
    )
    return QuantizationRun(plan=data["plan"], applied=applied, config=dict(data["config"]))
