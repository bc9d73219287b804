"""NNCF 3.4: `compress_weights` of OpenVINO's form of the model, without the layers outside the blocks."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np
import torch
from common import Made, Task, refuse, serve

OPTIONS: dict[str, dict[str, bool]] = {
    "RTN": {},
    "scale estimation": {"scale_estimation": True},
    "GPTQ": {"gptq": True},
    "scale estimation + GPTQ": {"scale_estimation": True, "gptq": True},
    "AWQ + scale estimation": {"awq": True, "scale_estimation": True},
}


def make(task: Task) -> Made:
    """Return the constants in front of the products, as OpenVINO computes them."""
    import nncf
    import openvino

    subject, form = task.subject, task.form
    if form.bits == 3:
        refuse("3 bits in compress_weights")
    mode = "NF4" if form.kind == "nf" else f"INT{form.bits}_{'SYM' if form.symmetric else 'ASYM'}"
    more: dict[str, Any] = dict(OPTIONS[task.method])
    if form.bits == 8:
        if more:
            refuse("data-aware int8 weights")
    else:
        more |= {"ratio": 1.0, "all_layers": True, "group_size": task.group}
    calls = [dict(batch) for batch in subject.calibration]
    if getattr(getattr(subject.model, "config", None), "use_cache", False):
        # what can't be translated: a cache among the outputs, and the search for several texts in a row
        # without a mask
        subject.model.config.use_cache = False
        calls = [batch | {"attention_mask": torch.ones_like(batch["input_ids"])} for batch in calls]
    if task.method != "RTN":
        rows = [
            {k: v[i : i + 1].numpy() for k, v in b.items()}
            for b in calls
            for i in range(len(next(iter(b.values()))))
        ]
        more |= {"dataset": nncf.Dataset(rows), "subset_size": len(rows)}
    with torch.no_grad():
        model = openvino.convert_model(subject.model, example_input=calls[0])
    products = by_layer(model, subject.layers)
    wanted = {node.get_friendly_name() for node in products.values()}
    others = [
        op.get_friendly_name()
        for op in model.get_ops()
        if op.get_type_name() in ("MatMul", "Gather") and op.get_friendly_name() not in wanted
    ]
    with contextlib.redirect_stdout(sys.stderr):
        done = nncf.compress_weights(
            model,
            mode=nncf.CompressWeightsMode[mode],
            ignored_scope=nncf.IgnoredScope(names=others, validate=False),
            **more,
        )
    weights = {}
    for name, node in by_layer(done, subject.layers).items():
        weights[f"{name}.weight"] = value(node.input_value(1))
        factor = node.input_value(0).get_node()
        if factor.get_type_name() == "Multiply" and "awq" in factor.get_friendly_name().lower():
            weights[f"{name}.input_scale"] = value(factor.input_value(1)).reshape(-1)
    return Made(weights, task.method != "RTN", 16, 0 if form.symmetric else form.bits)


def by_layer(model: Any, layers: list[str]) -> dict[str, Any]:
    """Return the product of each layer: the names of nodes hold those of modules."""
    found = {}
    for op in model.get_ops():
        if op.get_type_name() == "MatMul":
            for layer in layers:
                if f"__module.{layer}/" in op.get_friendly_name():
                    found[layer] = op
    missing = sorted(set(layers) - found.keys())
    if missing:
        msg = f"no product has the names of {missing[:3]}"
        raise RuntimeError(msg)
    return found


def value(output: Any) -> torch.Tensor:
    """Return what a constant expression gives."""
    import openvino

    part = openvino.Model([output], [])
    compiled = openvino.Core().compile_model(part, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(np.array(compiled({})[0], dtype=np.float32, copy=True))


if __name__ == "__main__":
    serve(make)
