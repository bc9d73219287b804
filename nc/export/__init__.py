"""Capture as a separate step, for scripts that export a model before they prepare it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from nc.backends import precautions
from nc.capture.capture import Graph, capture
from nc.graph.fixed_module import FixedModule
from nc.graph.fx_utils import call_graph, copy_module
from nc.graph.signature import call_error
from nc.process.lock import LOCK


class ExportedModel(FixedModule):
    """A captured fp32 model, called like the original. `prepare` takes it without example inputs.

    Attributes:
        graph: the captured graph.
    """

    what = "A captured model"
    saved_by = "save the fp32 model, or what convert() makes of it with nc.save()"

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return outputs in the user's structure; raises InputError for inputs that do not fit."""
        tensors = self.graph.signature.bind(args, kwargs)
        try:
            with torch.no_grad():
                outputs = call_graph(self.graph.module, tensors)
        except Exception as error:
            raise call_error(error, "The captured model", tensors, self.graph.example) from error
        return self.graph.signature.result(outputs, args, kwargs)

    def own_graph(self) -> Graph:
        """Return a copy of the graph that can be changed; constants are shared."""
        return dataclasses.replace(self.graph, module=copy_module(self.graph.module)[0])


def export(model: torch.nn.Module, example_inputs: Any = None, dynamic_shapes: Any = None) -> ExportedModel:
    """Capture a model.

    Args:
        model: an fp32 model on the CPU; captured in eval mode, and not changed.
        example_inputs: as for `prepare`.
        dynamic_shapes: as for `prepare`.

    Raises:
        InputError, CaptureError: as `prepare`.

    Example:
        >>> exported = export(torch.nn.Linear(4, 4), torch.randn(2, 4))
        >>> tuple(exported(torch.randn(3, 4)).shape)
        (3, 4)
    """
    with LOCK:
        return ExportedModel(capture(model, example_inputs, dynamic_shapes, precautions=precautions()))
