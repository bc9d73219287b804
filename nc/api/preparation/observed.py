"""The captured model with observers in it, and what it has seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from nc.algorithms.base import Bound
from nc.backends.rewrites.ragged.rewrite import Ragged, ragged
from nc.calibration.accuracy import Spread
from nc.calibration.observe import Padding, Watch, observed_module
from nc.calibration.statistics import Samples, Statistics
from nc.capture.capture import Graph
from nc.errors import CalibrationError, NCError
from nc.graph.fx_utils import call_graph, sizes_of
from nc.graph.signature import call_error


class Observed(torch.nn.Module):
    """Runs the captured model, and collects what was asked for; preparations of one graph can share it.

    Attributes:
        graph: the captured model.
        observers: by node and statistic.
        samples: calibration inputs that are kept for algorithms.
        spread: some of them, from all over the calibration, to judge by.
    """

    def __init__(self, graph: Graph, watches: Iterable[Watch], room: Bound | None) -> None:
        super().__init__()
        self.graph = graph
        self._module, self.observers = observed_module(graph.module, list(watches), _padding_of(graph))
        self.samples = Samples(0, 0) if room is None else Samples(room.rows, room.size)
        self.spread = Spread(graph.signature)
        self._calls = 0

    @property
    def statistics(self) -> Statistics:
        """What was collected so far, to save, load or merge."""
        return Statistics(self.graph.module, self.observers, self.samples)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the fp32 model's outputs for one calibration batch, in its own structure.

        Raises:
            InputError: the inputs do not fit what was captured.
            CalibrationError: NaN or Inf reached an operator that is to be quantized.
        """
        signature = self.graph.signature
        inputs = signature.bind(args, kwargs)
        return self.see(inputs, lambda outputs: signature.result(outputs, args, kwargs))

    def see(self, inputs: Sequence[torch.Tensor], result: Callable[[Sequence[Any]], Any]) -> Any:
        """Return what `result` makes of the flat outputs for flat inputs; raises as `forward`."""
        self._calls += 1
        before = {key: (o.state, o.seen) for key, o in self.observers.items()}
        kept, spread = len(self.samples.batches), self.spread.state
        try:
            with torch.no_grad():
                outputs = call_graph(self._module, inputs)
            self.samples.keep(inputs)  # before the model's own writes change them
            self.spread.keep(inputs)
            return result(outputs)
        except BaseException as error:
            for key, (state, seen) in before.items():  # a batch counts whole or not at all
                self.observers[key].state, self.observers[key].seen = state, seen
            del self.samples.batches[kept:]
            self.spread.state = spread
            if isinstance(error, CalibrationError):
                msg = f"Calibration batch {self._calls}: {error}"
                raise CalibrationError(msg) from None
            if isinstance(error, NCError) or not isinstance(error, Exception):
                raise
            raise call_error(error, "The captured model", inputs, self.graph.example) from error


def _padding_of(graph: Graph) -> Padding | None:
    """Return which tokens are padding, where that is known: what the model gives for others is not read."""
    form = ragged(graph.module, graph.signature)
    if not isinstance(form, Ragged) or form.mask is None:
        return None
    inputs = [node for node in graph.module.graph.nodes if node.op == "placeholder"]
    return Padding(inputs[form.mask].name, frozenset(sizes_of(node)[0] for node in inputs), form.length)
