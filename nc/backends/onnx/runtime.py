"""ONNX Runtime: imported here only. It runs a file once and says by which kernels."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nc.text.json_text import parsed

#: The session option by which CPUs without VNNI run kernels that can't saturate; other CPUs take no notice of
#: it.
EXACT = "session.x64quantprecision"
_NODE, _END = "Node", "_kernel_time"


@dataclasses.dataclass(frozen=True, slots=True)
class ExecutedKernel:
    """One kernel that ran.

    Attributes:
        name: of the node in the file, to which ONNX Runtime may append a suffix.
        kind: of the operator that was computed, e.g. "QLinearConv".
        microseconds: duration of this one run.
    """

    name: str
    kind: str
    microseconds: int


def version() -> str:
    """Return the version of ONNX Runtime."""
    import onnxruntime

    return str(onnxruntime.__version__)


def run(
    path: Path, inputs: Sequence[torch.Tensor], *, optimize: bool = True, exact: bool = False
) -> tuple[list[torch.Tensor], tuple[ExecutedKernel, ...]]:
    """Return outputs of a file, and the kernels that computed them, in the order in which they ran.

    Args:
        path: the file.
        inputs: in its order.
        optimize: as it comes; False: each operator as the file has it.
        exact: by kernels that can't saturate on CPUs without VNNI; False: by those that ONNX Runtime takes by
            itself.
    """
    import onnxruntime

    levels = onnxruntime.GraphOptimizationLevel
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
    options.log_severity_level = 3  # errors
    options.enable_profiling = True
    if exact:
        options.add_session_config_entry(EXACT, "1")
    with tempfile.TemporaryDirectory(prefix="nc-") as folder:
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_inputs()]
        given = zip(names, (tensor.detach().contiguous().numpy() for tensor in inputs), strict=True)
        outputs = session.run(None, dict(given))
        events = parsed(Path(session.end_profiling()).read_text(encoding="utf-8"), finite=False)
    return [torch.from_numpy(value) for value in outputs], tuple(
        _kernel(e) for e in events if e.get("cat") == _NODE and _END in e["name"]
    )


def _kernel(event: dict[str, Any]) -> ExecutedKernel:
    return ExecutedKernel(event["name"].removesuffix(_END), event["args"]["op_name"], int(event["dur"]))
