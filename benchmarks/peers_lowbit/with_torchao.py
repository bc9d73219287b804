"""torchao 0.18.

`quantize_` with `IntxWeightOnlyConfig`, round to nearest, and with scales from HQQ's search.
"""

from __future__ import annotations

import torch
from common import Made, Task, refuse, serve


def make(task: Task) -> Made:
    """`IntxUnpackedToInt8Tensor` weights, dequantized."""
    from torchao.quantization import IntxWeightOnlyConfig, MappingType, PerAxis, PerGroup, quantize_

    if task.form.kind != "int":
        refuse("NF4 as a weight-only format of quantize_")
    search = {"RTN": "affine", "HQQ scale": "hqq_scale_only"}[task.method]
    if search != "affine" and (task.form.group == -1 or not task.form.symmetric):
        refuse("HQQ's scales per row or with zero points")
    config = IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{task.form.bits}"),
        granularity=PerAxis(0) if task.group == -1 else PerGroup(task.group),
        mapping_type=MappingType.SYMMETRIC if task.form.symmetric else MappingType.ASYMMETRIC,
        scale_dtype=torch.float16 if search == "affine" else None,
        intx_choose_qparams_algorithm=search,
    )
    model, layers = task.subject.model, set(task.subject.layers)
    quantize_(
        model, config, filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and name in layers
    )
    weights = {f"{n}.weight": model.get_submodule(n).weight.dequantize() for n in task.subject.layers}
    scale = model.get_submodule(task.subject.layers[0]).weight.scale
    return Made(weights, False, scale.element_size() * 8, 0 if task.form.symmetric else 8)


if __name__ == "__main__":
    serve(make)
