"""A whole engine in one file: nothing of nc knows it but the table, or the call, that registers it."""

import torch

from nc.backends.base import VERIFY, Backend, EngineModel, EngineReport, Exporter, OpRun, Option
from nc.backends.verify import verify_outputs
from nc.formats import Capabilities, OpSupport
from nc.graph.fx_utils import call_graph


def write(graph, engine, file, *, verify="raise", upper=False):
    """Two files: the names of the quantized operators, and how many bytes their codes have."""
    names = "\n".join(decision.operator for decision in graph.plan.quantized)
    file.write_text(names.upper() if upper else names)
    file.with_suffix(".size").write_text(
        str(sum(b.nbytes for b in graph.module.buffers() if b.dtype is torch.int8))
    )
    return f"{len(graph.plan.quantized)} operators, verify={verify}"


class ToyEngine(Backend):
    """Runs the quantized graph by torch, and takes linears alone."""

    name = "toy"
    options = {"isolate": Option(("auto", "never"))}
    exports = {
        "names": Exporter(
            write, ".names", {"verify": VERIFY, "upper": Option((False, True))}, from_graph=True
        )
    }
    packages = ("click",)
    remark = "a toy"

    def capabilities(self):
        ops = (OpSupport(kind="linear", activations=("uint8", "int8"), weights=("int8",)),)
        return Capabilities(backend=self.name, ops=ops)

    def lower(self, graph, *, verify="raise", isolate="auto"):
        def run(inputs):
            with torch.no_grad():
                return call_graph(graph.module, inputs)

        sqnr = verify_outputs(graph, run(graph.example), verify, "Toy")

        def report():
            ops = tuple(
                OpRun(operator=d.operator, ran="fp32", reason=d.reason or "toys compute in fp32")
                for d in graph.plan.decisions
            )
            return EngineReport(backend=self.name, ops=ops, sqnr_db=sqnr, details={"isolate": isolate})

        return EngineModel(run=run, report=report)
