"""Neural Compressor 3.10 (neural-compressor-pt): RTN, GPTQ, AWQ and HQQ with its own names of options."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from common import Made, Task, changed, refuse, serve


def config_of(task: Task) -> Any:
    """Its configuration: every linear outside the blocks stays fp32."""
    from neural_compressor.torch.quantization import AWQConfig, GPTQConfig, HQQConfig, RTNConfig

    form = task.form
    kind, _, option = task.method.partition(" ")
    basic = {
        "dtype": "nf4" if form.kind == "nf" else "int",
        "bits": form.bits,
        "use_sym": form.symmetric,
        "group_size": task.group,
    }
    more = {
        "mse": {"use_mse_search": True},
        "full range": {"use_full_range": True},
        "hybrid order": {"hybrid_order": True},
        "": {},
    }[option]
    float_: Any
    if kind == "HQQ":
        if form.symmetric or form.group == -1:
            refuse("HQQ without zero points")
        config, float_ = (
            HQQConfig(bits=form.bits, group_size=task.group, quant_zero=False),
            HQQConfig(dtype="fp32"),
        )
    else:
        if form.kind == "nf" and kind != "RTN":
            refuse(f"NF4 with {kind}")
        cls = {"RTN": RTNConfig, "GPTQ": GPTQConfig, "AWQ": AWQConfig}[kind]
        basic |= {"use_layer_wise": False}
        if kind == "AWQ":
            more |= {"folding": True}
        if kind == "GPTQ" and task.subject.folder is None:
            refuse("GPTQ of models that are not from transformers")
        if kind == "GPTQ":  # it looks for a folder even where it reads none
            basic |= {"model_path": str(task.subject.folder)}
        config, float_ = cls(**basic, **more), cls(**{**basic, "dtype": "fp32"})
    names = {n for n, m in task.subject.model.named_modules() if isinstance(m, torch.nn.Linear)} - set(
        task.subject.layers
    )
    for name in names:
        config.set_local(name, float_)
    return config


def make(task: Task) -> Made:
    """Modules with packed weights, recovered."""
    from neural_compressor.torch.quantization import convert, prepare

    subject = task.subject
    before = {k: v.clone() for k, v in subject.model.state_dict().items()}
    config = config_of(task)
    example = subject.calibration[0]
    data = not task.method.startswith(("RTN", "HQQ"))
    model = copy.deepcopy(subject.model)
    prepared = prepare(
        model, config, example_inputs=next(iter(example.values())) if task.method.startswith("AWQ") else None
    )
    if data:
        rows = [
            {k: v[i : i + 1] for k, v in b.items()}
            for b in subject.calibration
            for i in range(len(next(iter(b.values()))))
        ]
        for row in rows:  # its GPTQ keeps samples of one sequence
            with (
                torch.no_grad(),
                contextlib.suppress(ValueError),
            ):  # it stops the model behind the first block in this way
                prepared(**row)
    done = convert(prepared)
    weights = changed(done, before)
    for name in subject.layers:
        module = done.get_submodule(name)
        inner = getattr(module, "linear", module)
        weights[f"{name}.weight"] = recovered(inner)
        if inner is not module:
            weights[f"{name}.input_scale"] = module.input_scale
    stored = done.get_submodule(subject.layers[0])
    stored = getattr(stored, "linear", stored)
    scale = getattr(stored, "scales", None)
    bits = 32 if scale is None else scale.element_size() * 8
    zero = 0 if task.form.symmetric else 32 if task.method == "HQQ" else task.form.bits
    return Made(weights, data, bits, zero)


def recovered(module: Any) -> torch.Tensor:
    """Return the fp32 weight."""
    if hasattr(module, "recover"):
        return module.recover()
    if hasattr(module, "dequantize_weight"):
        return module.dequantize_weight()
    return module.weight


if __name__ == "__main__":
    serve(make)
