"""Write a model for nc-run: plans of functions in C as JSON, and their constants as bytes.

plan.json has what runner/nc_run/document.py describes and checks; data.bin has constants and arrays of
probes, each at a multiple of 64 bytes; checksums.json has the SHA-256 of both.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nc._version import __version__
from nc.backends.base import EngineModel
from nc.backends.native.only_c import PlanOfC, model_of_c
from nc.backends.native.plans.affine import Affine
from nc.backends.native.plans.arena import aligned
from nc.backends.native.plans.family import FamilyCall, FamilyTensor
from nc.backends.native.prelude import Prelude
from nc.backends.rewrites.ragged.rewrite import Ragged
from nc.errors import BackendError, UnsupportedError
from nc.graph.output_names import output_names
from nc.graph.qdq import QDQGraph
from nc.kernels.c_code import abi
from nc.kernels.onednn.descriptions import Desc
from nc.storage.json_values import DTYPES
from nc.text.json_text import MOST_BYTES

FORMAT, SCHEMA = "nc-run", 1
PLAN, DATA, CHECKSUMS = "plan.json", "data.bin", "checksums.json"
#: Dtypes of inputs and outputs, which numpy has too.
_DTYPES = {
    dtype: name
    for name, dtype in DTYPES.items()
    if name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}


def write(
    graph: QDQGraph,
    engine: EngineModel | None,
    folder: Path,
    *,
    threads: Sequence[int] | None = None,
    verify: str = "raise",
) -> None:
    """Write the folder; its plans were run, and compared with the graph.

    Args:
        graph: the quantized model.
        engine: not needed.
        folder: it exists, and is empty.
        threads: numbers of threads, for each of which there is a plan; None: 1, and those of torch.
        verify: see `nc.backends.verify`.

    Raises:
        UnsupportedError: the model has operators that functions in C do not compute, or inputs or outputs
            that numpy does not have; says which.
        VerificationError: the plans compute something else than the graph.
        BackendError: plans for several threads compute different bits.
    """
    counts = sorted({1, torch.get_num_threads()} if threads is None else set(threads))
    model = model_of_c(graph, counts, verify)
    with torch.no_grad():
        found = [[value.clone() for value in run(graph.example)] for run in model.runs]
    for plan, outputs in zip(model.plans, found, strict=True):
        if any(_differ(a, b) for a, b in zip(outputs, found[0], strict=True)):
            msg = f"The plan for {plan.threads} threads has other bits than that for {counts[0]}."
            raise BackendError(msg)
    data = _Data()
    document = {
        "format": FORMAT,
        "schema": SCHEMA,
        "nc": __version__,
        "c_code": hashlib.sha256(abi.header().encode()).hexdigest()[:16],
        "inputs": [
            {"name": leaf.path, "dtype": _dtype(leaf.dtype, leaf.path)}
            for leaf in graph.signature.leaves
            if leaf.used
        ],
        "outputs": output_names(graph.signature),
        "texts": None if model.form is None else _texts(model.form, model.prelude),
        "plans": [_plan(plan, data) for plan in model.plans],
        "probes": [
            {
                "inputs": [data.array(tensor) for tensor in graph.example],
                "outputs": [data.array(tensor) for tensor in found[0]],
            }
        ],
    }
    files = {PLAN: (json.dumps(document) + "\n").encode(), DATA: bytes(data.content)}
    if len(files[PLAN]) > MOST_BYTES:
        msg = f"nc-run can't take this model: its plan has {len(files[PLAN])} bytes."
        raise UnsupportedError(msg)
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    files[CHECKSUMS] = (json.dumps({"format": FORMAT, "sha256": sums}, indent=1) + "\n").encode()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape != b.shape or _bytes(a.flatten()) != _bytes(b.flatten())


class _Data:
    """The bytes of data.bin."""

    def __init__(self) -> None:
        self.content = bytearray()
        self._constants: dict[bytes, list[int]] = {}

    def constant(self, tensor: torch.Tensor) -> list[int]:
        """Return where the memory of a constant is, and its bytes; equal ones are written once."""
        count = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        content = _bytes(tensor.as_strided((count if tensor.numel() else 0,), (1,)))
        key = hashlib.sha256(content).digest()
        if key not in self._constants:
            self._constants[key] = self._put(content)
        return self._constants[key]

    def array(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Return what says where the values of a tensor are."""
        return {
            "dtype": _dtype(tensor.dtype, "an output"),
            "sizes": list(tensor.shape),
            "at": self._put(_bytes(tensor.contiguous().flatten())),
        }

    def _put(self, content: bytes) -> list[int]:
        self.content += bytes(aligned(len(self.content)) - len(self.content))
        at = [len(self.content), len(content)]
        self.content += content
        return at


def _bytes(flat: torch.Tensor) -> bytes:
    return flat.detach().view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _dtype(dtype: torch.dtype | None, name: str) -> str:
    if dtype not in _DTYPES:
        msg = f"nc-run can't take this model: {name} is {dtype}, which numpy does not have."
        raise UnsupportedError(msg)
    return _DTYPES[dtype]


def _texts(form: Ragged, prelude: Prelude) -> dict[str, Any]:
    """Return what nc_run/texts.py has to know of padded texts."""
    names = ("mask", "firsts", "longest", "positions", "together", "from_begin")
    steps = [
        {"op": step.op, "values": step.values, "number": step.number, "dtype": _dtype(step.dtype, "a step")}
        for step in prelude.steps
    ]
    found = {name: getattr(form, name) for name in names}
    return found | {"of_tokens": form.of_tokens, "steps": steps, "results": prelude.results}


def _plan(plan: PlanOfC, data: _Data) -> dict[str, Any]:
    slots = {slot: number for number, slot in enumerate(plan.family.inputs)}

    def place(ref: FamilyTensor | torch.Tensor) -> dict[str, Any]:
        if isinstance(ref, torch.Tensor):
            return {"constant": data.constant(ref)}
        root = {"block": ref.root.block} if ref.root.slot is None else {"input": slots[ref.root.slot]}
        return root | {"offset": _number(ref.offset)}

    return {
        "threads": plan.threads,
        "blocks": [_number(size) for size, *_ in plan.family.blocks],
        "inputs": [_array(desc) for desc in plan.inputs],
        "calls": [
            {
                "operator": call.where,
                "function": call.function.row.takes.name,
                "fields": _fields(call),
                "tensors": [place(ref) for ref in call.tensors],
            }
            for call in plan.family.entries
            if isinstance(call, FamilyCall)
        ],
        "outputs": [_array(ref.desc) | place(ref) for ref in plan.family.outputs],
    }


def _array(desc: Desc) -> dict[str, Any]:
    return {
        "dtype": _dtype(desc.dtype, "an input or output"),
        "sizes": [_number(size) for size in desc.sizes],
        "strides": [_number(stride) for stride in desc.strides],
    }


def _number(value: int | Affine) -> Any:
    """Return an integer, or what it is for no row and text, and more for each row and each text."""
    return [*dataclasses.astuple(value)] if isinstance(value, Affine) else value


def _fields(call: FamilyCall) -> dict[str, Any]:
    """Return the fields of a call by name, arrays as flat lists, doubles in hexadecimal."""
    found: dict[str, Any] = {}
    at = 1  # after the size
    for field in call.function.row.takes.fields:
        count = struct.calcsize(f"<{field.format}") // 8
        values = [_word(call, i, field) for i in range(at, at + count)]
        found[field.name] = values if field.shape else values[0]
        at += count
    return found


def _word(call: FamilyCall, index: int, field: abi.Field) -> Any:
    base = call.base[index : index + 1]
    if field.kind == "double":
        return float(base.view("float64")[0]).hex()
    of_row, of_text = int(call.of_row[index]), int(call.of_text[index])
    return [int(base[0]), of_row, of_text] if of_row or of_text else int(base[0])
