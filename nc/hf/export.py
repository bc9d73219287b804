"""Write quantized models as folders that other tools load without `nc`."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nc._version import __version__
from nc.api.artefact import load
from nc.api.exports import exported
from nc.api.quantized import QuantizedModel
from nc.backends.onnx import OnnxReport
from nc.errors import ConfigError, StateError
from nc.formats.checks import checked_path
from nc.hf import checksums
from nc.hf.folder import ARTEFACT, CONFIG, is_result, read_by_others, replaceable, written
from nc.hf.low_bit_files import check_target, write_low_bit
from nc.hf.model import QuantizedTransformer
from nc.interchange import FORMATS
from nc.storage.atomic import resolved

#: What an export says of itself, and by which it is known.
RECORD = "nc_export.json"
#: Format → the file in which its readers look for the program.
PROGRAMS = {"onnx": "onnx/model.onnx", "openvino": "openvino/openvino_model.xml"}


@dataclasses.dataclass(frozen=True, slots=True)
class Exported:
    """What `export` wrote; `print` shows it.

    Attributes:
        folder: where.
        format: of the program or the weights.
        runtime: what ran the program once, and its version; "" where nothing did.
        int8: names of the operators that ran in int8.
        others: names of the other quantized operators → why they did not run in int8.
        sqnr_db: outputs of the program against those of the quantized graph, in dB; None: not compared.
        layers: names of the layers in files of weights.
        notes: what the folder lacks, and for whom.
    """

    folder: Path
    format: str
    runtime: str = ""
    int8: tuple[str, ...] = ()
    others: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sqnr_db: float | None = None
    layers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a line on what runs, one for each reason why something does not, and the notes."""
        if self.layers:
            return "\n".join([f"{self.format}: {len(self.layers)} low-bit layers.", *self.notes])
        where = f" on {self.runtime}" if self.runtime else ""
        agree = "" if self.sqnr_db is None else f", {self.sqnr_db:.0f} dB to the quantized graph"
        total = len(self.int8) + len(self.others)
        lines = [f"{self.format}: {len(self.int8)} of {total} quantized operators in int8{where}{agree}."]
        for reason in dict.fromkeys(self.others.values()):
            names = [name for name, why in self.others.items() if why == reason]
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            lines.append(
                f"Not in int8, {reason or 'for a reason that is not known'}: {', '.join(names[:2])}{more}."
            )
        return "\n".join([*lines, *self.notes])


def export(
    model: Any,
    out: str | os.PathLike[str],
    format: str = "onnx",
    *,
    target: str = "",
    processor: Any = None,
    verify: str = "raise",
    trust_remote_code: bool = False,
) -> Exported:
    """Write a quantized model as a folder that other tools load without `nc`.

    Args:
        model: for "onnx" and "openvino" a folder of `nc.hf.quantize` or `quantize_sentence_transformer`, or
            what these returned; for files of weights a model with low-bit weights.
        out: the folder; an earlier export is replaced.
        format: "onnx" (`onnx/model.onnx`: ONNX Runtime, fastembed, text-embeddings-inference, Optimum),
            "openvino" (`openvino/openvino_model.xml`: Optimum Intel, sentence-transformers, OpenVINO Model
            Server), or weights: "compressed-tensors", "gptq", "awq", "quark". Configuration, tokenizer and
            the other modules are beside it, under the names that these tools know.
        target: "vllm-cpu" refuses weights for which vLLM has no kernel on CPUs.
        processor: tokenizer to save beside weights; None: the one in the model's folder.
        verify: see `export_onnx`.
        trust_remote_code: run Python code in the model's folder, for its tokenizer.

    Returns:
        What runs in int8 there, and what does not, with the reason.

    Raises:
        ConfigError: no such format or target, or one that does not belong to the format.
        StateError: no quantized model that this format takes.
        ArtefactError: `out` exists and is not an earlier export, or the folder is damaged.
        UnsupportedError: the format, or the target, cannot hold or run a layer.
        BackendUnavailableError: a package that writes the format is missing.
        BackendError, VerificationError: as `export_onnx` and `export_openvino`.
    """
    if format not in (*PROGRAMS, *FORMATS):
        msg = f"There is no format {format!r}; there are {', '.join((*PROGRAMS, *FORMATS))}."
        raise ConfigError(msg)
    check_target(target, format)
    destination = replaceable(resolved(checked_path("out", out)), RECORD)
    with written(destination, RECORD) as staged:
        if format in PROGRAMS:
            with _folder_of(model) as (source, quantized):
                shutil.copytree(source, staged, ignore=_without_artefact(source))
                made = _PROGRAM_WRITERS[format](quantized, staged, verify, trust_remote_code)
        else:
            staged.mkdir()
            layers = write_low_bit(model, staged, format, target, processor, trust_remote_code)
            made = Exported(staged, format, layers=layers)
        made = dataclasses.replace(made, folder=destination)
        record = {**dataclasses.asdict(made), "folder": ".", "nc": __version__, "target": target}
        (staged / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return made


@contextlib.contextmanager
def _folder_of(model: Any) -> Iterator[tuple[Path, QuantizedModel]]:
    """Give the folder of a quantized model, and the model."""
    if isinstance(model, torch.nn.Sequential) and len(model):  # a SentenceTransformer
        model = next((part for part in model[0].children() if isinstance(part, QuantizedTransformer)), model)
    if isinstance(model, QuantizedTransformer) and model.folder is None:
        with tempfile.TemporaryDirectory(prefix="nc-") as folder:
            model.save_pretrained(folder)
            yield Path(folder), model.quantized
        return
    if isinstance(model, QuantizedTransformer):
        yield Path(str(model.folder)), model.quantized
        return
    if isinstance(model, (str, os.PathLike)) and is_result(Path(model), CONFIG, ARTEFACT):
        checksums.check(Path(model))
        found = load(Path(model) / ARTEFACT)
        if isinstance(found, QuantizedModel):
            yield Path(model), found
            return
    named = repr(str(model)) if isinstance(model, (str, os.PathLike)) else f"a {type(model).__name__}"
    msg = (
        f"export() expects a folder that nc.hf.quantize or quantize_sentence_transformer wrote, or what they "
        f"returned, but got {named}. nc.export_onnx and nc.export_openvino take what nc.quantize returned; "
        'models with low-bit weights go into files of weights, format="compressed-tensors".'
    )
    raise StateError(msg)


def _without_artefact(source: Path) -> Callable[[str, list[str]], set[str]]:
    """Return what `shutil.copytree` leaves out: the artefact at the top of the folder, and checksums."""
    left_out = {ARTEFACT, checksums.TABLE}
    return lambda folder, names: left_out & set(names) if Path(folder) == source else set()


def _onnx(model: QuantizedModel, folder: Path, verify: str, trust_remote_code: bool) -> Exported:
    report = exported(model, folder / PROGRAMS["onnx"], "onnx", "export", verify=verify)
    return Exported(
        folder,
        "onnx",
        report.runtime,
        tuple(op.operator for op in report.operators if op.int8),
        {op.operator: op.reason for op in report.operators if not op.int8},
        report.sqnr_db,
        notes=_saturating(report),
    )


def _saturating(report: OnnxReport) -> tuple[str, ...]:
    """Return what can go wrong on CPUs without VNNI; a warning says what to do."""
    if not report.saturating:
        return ()
    here = "" if report.saturated_db is None else f" Here they leave {report.saturated_db:.0f} dB."
    count = len(report.saturating)
    return (f"On CPUs without VNNI sums of {count} operators can saturate in ONNX Runtime.{here}",)


def _openvino(model: QuantizedModel, folder: Path, verify: str, trust_remote_code: bool) -> Exported:
    file = folder / PROGRAMS["openvino"]
    report = exported(model, file, "openvino", "export", verify=verify)
    notes = _tokenizer(folder, file.parent, trust_remote_code)
    if report is None:
        return Exported(folder, "openvino", notes=notes)
    asked = {decision.operator for decision in model.graph.plan.quantized}
    ops = [op for op in report.ops if op.operator in asked]
    return Exported(
        folder,
        "openvino",
        f"OpenVINO {report.details['OpenVINO']}",
        tuple(op.operator for op in ops if op.ran == "int8"),
        {op.operator: op.reason for op in ops if op.ran != "int8"},
        report.sqnr_db,
        notes,
    )


def _tokenizer(folder: Path, out: Path, trust_remote_code: bool) -> tuple[str, ...]:
    """Write the tokenizer as OpenVINO Model Server reads it; returns what prevents that."""
    if not (folder / "tokenizer_config.json").is_file():
        return ()
    if importlib.util.find_spec("openvino_tokenizers") is None:
        return (
            "OpenVINO Model Server also needs openvino_tokenizer.xml: install openvino-tokenizers and export "
            "again.",
        )
    import openvino
    import transformers
    from openvino_tokenizers import convert_tokenizer

    with read_by_others(folder, trust_remote_code):
        of = transformers.AutoTokenizer
        tokenizer = of.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    made = convert_tokenizer(tokenizer)
    openvino.save_model(made, out / "openvino_tokenizer.xml")
    return ()


_PROGRAM_WRITERS: dict[str, Callable[[QuantizedModel, Path, str, bool], Exported]] = {
    "onnx": _onnx,
    "openvino": _openvino,
}
