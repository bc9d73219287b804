"""AutoRound 0.16.

RTN, RTN with its search of scales ("opt RTN"), and "light": 50 steps with a learning rate of 5e-3.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from common import Made, Task, changed, outside, refuse, serve


def make(task: Task) -> Made:
    """Layers hold the dequantized weights when it is done."""
    from auto_round import AutoRound

    subject, form = task.subject, task.form
    if form.kind == "nf":
        refuse("NF4")
    if subject.folder is None:
        refuse("models that are not from transformers")
    before = {k: v.clone() for k, v in subject.model.state_dict().items()}
    length = min(
        b["input_ids"].shape[1] for b in subject.calibration
    )  # it joins samples, and drops shorter ones
    rows = [
        b["input_ids"][i : i + 1, :length] for b in subject.calibration for i in range(len(b["input_ids"]))
    ]
    light = task.method == "light"
    options: dict[str, Any] = (
        {"iters": 50, "lr": 5e-3} if light else {"iters": 0, "disable_opt_rtn": task.method == "RTN"}
    )
    tuner = AutoRound(
        subject.model,
        Tokens(),
        bits=form.bits,
        group_size=task.group,
        sym=form.symmetric,
        dataset=[{"input_ids": row} for row in rows],
        nsamples=len(rows),
        seqlen=length,
        batch_size=8,
        device_map="cpu",
        amp=False,
        enable_torch_compile=False,
        disable_model_free=True,
        to_quant_block_names=subject.blocks,
        layer_config={n: {"bits": 16, "data_type": "float"} for n in outside(subject)},
        **options,
    )
    model, _ = tuner.quantize()
    weights = changed(model, before)
    for name in subject.layers:
        module = model.get_submodule(name)
        weights[f"{name}.weight"] = getattr(module, "orig_layer", module).weight
    return Made(weights, task.method != "RTN", 16, 0 if form.symmetric else form.bits)


class Tokens:
    """Stands for a tokenizer: the data are token ids already."""

    pad_token_id = eos_token_id = None
    model_max_length = 512
    name_or_path = ""

    def save_pretrained(self, folder: str | Path) -> None:
        """Nothing to save."""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory():
        serve(make)
