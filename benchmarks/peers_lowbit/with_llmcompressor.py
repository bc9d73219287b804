"""llm-compressor 0.14.

`oneshot` with `QuantizationModifier`, `GPTQModifier` and `AWQModifier`, at its own defaults.
"""

from __future__ import annotations

import torch
from common import Made, Task, changed, refuse, serve


def make(task: Task) -> Made:
    """Its modules hold weight, scale and zero point.

    What they compute with is the weight after both roundings.
    """
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    subject, form = task.subject, task.form
    if form.kind == "nf":
        refuse("NF4")
    if subject.folder is None:
        refuse("models that are not from transformers")
    before = {k: v.clone() for k, v in subject.model.state_dict().items()}
    weights = QuantizationArgs(
        num_bits=form.bits,
        type="int",
        symmetric=form.symmetric,
        strategy="channel" if form.group == -1 else "group",
        group_size=None if form.group == -1 else task.group,
    )
    inside = set(subject.layers)
    scheme = {
        "config_groups": {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)},
        "ignore": [
            n for n, m in subject.model.named_modules() if isinstance(m, torch.nn.Linear) and n not in inside
        ],
    }
    recipe = {
        "RTN": [QuantizationModifier(**scheme)],
        "GPTQ": [GPTQModifier(**scheme)],
        "AWQ": [AWQModifier(), QuantizationModifier(**scheme)],
    }[task.method]
    rows = [r.tolist() for b in subject.calibration for r in b["input_ids"]]
    data = task.method != "RTN"
    more = {}
    if data:
        texts = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(r) for r in rows]})
        more = {"dataset": texts, "num_calibration_samples": len(rows), "max_seq_length": len(rows[0])}
    oneshot(model=subject.model, recipe=recipe, **more)
    found = changed(subject.model, before)
    for name in subject.layers:
        module = subject.model.get_submodule(name)
        args = module.quantization_scheme.weights
        found[f"{name}.weight"] = fake_quantize(
            module.weight, module.weight_scale, getattr(module, "weight_zero_point", None), args
        )
    # the scale's type is the model's; files of models in bf16 hold 16 bits
    return Made(found, data, 16, 0 if form.symmetric else form.bits)


if __name__ == "__main__":
    with torch.no_grad():
        serve(make)
