"""Export to ONNX.

The file has quantize and dequantize nodes (QDQ) around fp32 operators, and int8 weights. ONNX Runtime checks
it. The extra `onnx` is needed.
"""

from __future__ import annotations

from collections.abc import Mapping

from nc.backends.base import VERIFY, Backend, Exporter, Option
from nc.backends.onnx.report import OnnxOperator as OnnxOperator
from nc.backends.onnx.report import OnnxReport as OnnxReport
from nc.backends.onnx.write import SUFFIX, write
from nc.formats import Capabilities

NAME = "onnx"


class OnnxBackend(Backend):
    """See the module text.

    It only writes files: which packages that needs depends on the options, so `write` asks for them.
    """

    name = NAME
    runs_models = False
    exports: Mapping[str, Exporter] = {
        "onnx": Exporter(
            write, SUFFIX, {"verify": VERIFY, "without_vnni": Option((False, True))}, from_graph=True
        )
    }

    def capabilities(self) -> Capabilities:
        """Return that the graph is written as it is, with what it rounds to bf16.

        `without_vnni` changes weights, and no CPU here.
        """
        return Capabilities(backend=NAME, ops=(), why_no_bf16="")
