"""A folder of a transformers model → an artefact with low-bit weights, block by block.

Neither model need fit into memory.

Finished blocks are kept in a folder beside the result. A run that was stopped continues after the last of
them, and gives the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nc._version import __version__
from nc.api.preparation.weights import without_cache
from nc.backends.low_bit.engine import set_backend
from nc.config import AnyConfig
from nc.errors import ArtefactCorruptError, ArtefactError, ArtefactMissingError, InputError, UnsupportedError
from nc.modules.block_calls import Sample, block_lists
from nc.modules.layers import layers_of
from nc.nn.origin import QuantizationRun
from nc.planning.layer_plan import WeightPlan
from nc.planning.layer_rules import plan_layers
from nc.process.malloc import give_back_large_pieces
from nc.process.progress import Progress
from nc.reports.weight_report import WeightReport, weight_report
from nc.storage import folder, pretrained_class
from nc.storage.json_file import json_object
from nc.storage.tensor_file import Source
from nc.weights.driver import Driver
from nc.weights.experts import separated, stacked_names
from nc.weights.files import artefact
from nc.weights.files.streamed import StreamedWeights, shards, take_values_from
from nc.weights.files.transformers_files import experts_of, sources_of
from nc.weights.history import note


def quantize_folder(
    source: Path,
    config: AnyConfig,
    out: Path,
    samples: Sequence[torch.Tensor] = (),
    *,
    progress: Progress | None = None,
    strict: bool = True,
) -> WeightReport:
    """Quantize the weights of a saved transformers model and save the result.

    Args:
        source: a folder with config.json and safetensors files, as `save_pretrained` writes it.
        config: weight-only.
        out: the artefact; `out` with ".partial" appended holds finished blocks until it is complete.
        samples: token ids, each of shape [batch, length].
        progress: see `nc.convert`.
        strict: as for `nc.prepare`.

    Returns:
        The report. The model is in the files only.

    Raises:
        ArtefactMissingError, ArtefactCorruptError: the folder lacks a file or a tensor, or a file cannot be
        read.
        ArtefactError: the class of the model is not one of transformers' auto classes; or `out` exists
            and is not an artefact.
        UnsupportedError: a transform needs the whole model.
        InputError: the configuration needs data, and there is none.
    """
    folder.replaceable(out)
    files = shards(source)
    stored = {name: found for tensors in files.values() for name, found in tensors.items()}
    model = _empty(source, len(stored))
    where = take_values_from(model, sources_of(model, stored))
    plan = plan_layers(config, separated(model), strict=strict)
    where = _with_experts_apart(model, plan, where)
    _check_plan(plan, samples)
    job = {
        "nc": __version__,
        "torch": torch.__version__,
        "transformers": folder.versions(transformers=True).get("transformers"),
        "config": config.to_dict(),
        "source": [
            [path.name, path.stat().st_size, path.stat().st_mtime_ns]
            for path in (*files, source / "config.json")
        ],
        "samples": _digest(samples),
    }
    blocks = [name for names in block_lists(model, [d.operator for d in plan.quantized]) for name in names]
    heads = [
        layer.name
        for layer in layers_of(model)
        if layer.head and not layer.name.startswith(tuple(f"{name}." for name in blocks))
    ]
    store = StreamedWeights(model, where, (*blocks, *heads), out.with_name(out.name + ".partial"), job)
    driver = Driver(model, plan, [Sample(((ids,), {})) for ids in samples], progress, store)
    give_back_large_pieces()
    with without_cache(model):
        driver.run()
    note(model, QuantizationRun(plan=plan.to_dict(), applied=tuple(driver.applied), config=config.to_dict()))
    artefact.write(model.eval(), out, store.files)
    store.remove()
    return weight_report(set_backend(model))  # the kernels that `load` will take here


def _with_experts_apart(model: Any, plan: WeightPlan, where: Mapping[str, Source]) -> dict[str, Source]:
    """Give each quantized stacked expert its own weight, in place; return where all tensors are."""
    found = dict(where)
    asked = {d.operator.rpartition(".")[0] for d in plan.quantized}
    for name in [
        name for name in stacked_names(model) if name in asked
    ]:  # in the model's order, as files are the same in each run
        experts, transposed = (
            found.pop(name),
            bool(model.get_submodule(name.rpartition(".")[0]).is_transposed),
        )
        found |= {
            f"{name}.{i}.weight": one for i, one in enumerate(experts_of(experts, transposed=transposed))
        }
        separated(model, inplace=True, names=(name,))
    return found


def _check_plan(plan: WeightPlan, samples: Sequence[torch.Tensor]) -> None:
    """Raise UnsupportedError for a plan that needs the whole model at once.

    Where data that the plan needs is missing, raise InputError.
    """
    whole = next((t.name for t in plan.transforms if t.level == "model"), None)
    if whole is not None:
        msg = (
            f"Transform {whole!r} changes the whole model at once, which a run block by block does not have. "
            "Use nc.prepare in Python."
        )
        raise UnsupportedError(msg)
    if plan.needs_data and not samples:
        names = ", ".join(dict.fromkeys(step.algorithm for step in plan.algorithms))
        msg = f"{names} needs calibration data; give some texts."
        raise InputError(msg)


def _empty(source: Path, tensors: int) -> Any:
    """Return the model of a folder's config.json, without weights."""
    path = source / "config.json"
    if not path.is_file():
        msg = f"{source} has no config.json; give a folder that transformers' save_pretrained wrote."
        raise ArtefactMissingError(msg)
    data = json_object(path)
    classes = data.get("architectures") or []
    if len(classes) != 1:
        msg = f"{path} names no single class under 'architectures', but {classes}."
        raise ArtefactError(msg)
    generation = source / "generation_config.json"
    description = {
        "class": classes[0],
        "config": data,
        "generation_config": json_object(generation) if generation.is_file() else None,
        "attention": None,
    }
    try:
        return pretrained_class.build(description, tensors)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ArtefactError):
            raise
        msg = f"{path} describes no model that can be built ({type(error).__name__}: {error})."
        raise ArtefactCorruptError(msg) from error


def _digest(samples: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for ids in samples:
        digest.update(str(tuple(ids.shape)).encode() + ids.to(torch.int64).contiguous().numpy().tobytes())
    return digest.hexdigest()
