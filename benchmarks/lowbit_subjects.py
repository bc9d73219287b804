"""Models, texts and formats for the comparison of low-bit weights.

See lowbit.py, which writes the data, and peers_lowbit, which reads it.

* `smollm2`: SmolLM2-135M of examples/smollm2.py, a causal language model. The reference is the fp32 model of
  its dequantized weights.
* `antiberty`: a masked language model of antibody sequences with fp32 weights (package `antiberty`), 8 BERT
  layers.
* `lm`: the byte-level language model of task_lm.py.
* `minilm`: the sentence encoder of task_minilm.py. It has no vocabulary to choose from: what is judged is a
  distribution over the other texts of a batch, the softmax of 20 times the cosine, which is what such
  encoders are trained with.

Reading needs torch, transformers and safetensors only, so that every environment can do it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent))

from lowbit_formats import BLOCKS

Batch = dict[str, torch.Tensor]
#: Positions that are not judged.
IGNORED = -100


@dataclass
class Subject:
    """A model and its data.

    Attributes:
        name: of the subject.
        model: fp32, eval mode.
        calibration: keyword inputs, batch by batch.
        evaluation: likewise, each with `labels`: what is right at each position of the logits, `IGNORED`
            where nothing is judged.
        folder: what `from_pretrained` reads; None for a model that is not from transformers.
        blocks: the module list of the blocks.
        kept: what the judge keeps of the fp32 model's outputs.
    """

    name: str
    model: Any
    calibration: list[Batch]
    evaluation: list[Batch]
    folder: Path | None
    blocks: str
    kept: list[torch.Tensor] = field(default_factory=list)

    @property
    def layers(self) -> list[str]:
        """The layers that are quantized: all linears of the blocks. Embeddings and heads stay float."""
        return [
            n
            for n, m in self.model.named_modules()
            if isinstance(m, torch.nn.Linear) and n.startswith(f"{self.blocks}.")
        ]


def load(data: Path, name: str) -> Subject:
    """Read what `lowbit.py prepare` wrote.

    Args:
        data: its folder.
        name: one of `BLOCKS`.
    """
    folder = data / name
    tensors = load_file(folder / "data.safetensors")
    calibration, evaluation = (_batches(tensors, part) for part in ("calibration", "evaluation"))
    model: Any
    if name == "lm":
        from task_lm import LanguageModel, Transformer

        model = Transformer(width=128, heads=4, layers=4, positions=LanguageModel.positions)
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return Subject(name, model.eval(), calibration, evaluation, None, BLOCKS[name])
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

    auto: Any = {"smollm2": AutoModelForCausalLM, "antiberty": AutoModelForMaskedLM, "minilm": AutoModel}[
        name
    ]
    model = auto.from_pretrained(folder, local_files_only=True, attn_implementation="eager").float().eval()
    return Subject(name, model, calibration, evaluation, folder, BLOCKS[name])


def logits(model: Any, batch: Batch) -> torch.Tensor:
    """Return the model's logits for a batch, without its `labels`.

    Of an encoder: 20 cosine of each text with each other one.
    """
    output = model(**{k: v for k, v in batch.items() if k != "labels"})
    if isinstance(output, torch.Tensor):
        return output
    if hasattr(output, "logits"):
        return output.logits  # type: ignore[no-any-return]
    unit = torch.nn.functional.normalize(output.last_hidden_state.mean(1), dim=-1)
    return (20 * unit @ unit.T).fill_diagonal_(-1e4)


def settings(data: Path) -> dict[str, Any]:
    """Return what `lowbit.py prepare` was told."""
    return dict(json.loads((data / "settings.json").read_text(encoding="utf-8")))


def _batches(tensors: Batch, part: str) -> list[Batch]:
    found: dict[int, Batch] = {}
    for key, tensor in tensors.items():
        owner, number, name = key.split(".", 2)
        if owner == part:
            found.setdefault(int(number), {})[name] = tensor
    return [found[i] for i in sorted(found)]
