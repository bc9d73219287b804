"""Writes the models and the data of lowbit.py: `python benchmarks/lowbit_prepare.py --data DIR`.

Needs no network.

Calibration and evaluation never share a file of text, nor a generated sequence. Settings: "fast" is 4 k
tokens to calibrate and 2 k to judge, "long" 4 k and 16 k, "full" 64 k and 16 k.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from lowbit_subjects import IGNORED, Batch, logits
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

#: (calibration sequences, their tokens, evaluation sequences, their tokens)
SIZES = {"fast": (16, 256, 8, 256), "long": (16, 256, 64, 256), "full": (128, 512, 64, 256)}
_MASKED = 0.15
#: Pinned in requirements/common.txt. Not what else is installed: one more package gives other texts, and rows
#: that cannot be compared.
PACKAGES = {
    "click",
    "hypothesis",
    "ml_dtypes",
    "numpy",
    "packaging",
    "psutil",
    "pytest",
    "pytest-timeout",
    "rich",
    "ruff",
    "safetensors",
}


def smollm2(folder: Path, setting: str) -> None:
    """Return the model, and English texts.

    What some packages say about themselves, and Python's documentation.
    """
    import smollm2 as source

    source.load_model().save_pretrained(folder)
    tokenizer = source.load_tokenizer()
    tokenizer.save_pretrained(folder)
    count, length, held, held_length = SIZES[setting]
    pieces: dict[str, list[list[int]]] = {"calibration": [], "evaluation": []}
    for i, text in enumerate(texts()):
        part, size = (("calibration", length), ("evaluation", held_length))[i % 2]
        ids = tokenizer(text)["input_ids"]
        pieces[part] += [ids[j * size : (j + 1) * size] for j in range(min(len(ids) // size, 32))]
    order = torch.Generator().manual_seed(0)
    chosen = {
        part: torch.tensor([pieces[part][i] for i in torch.randperm(len(pieces[part]), generator=order)[:n]])
        for part, n in (("calibration", count), ("evaluation", held))
    }
    evaluation = [{"input_ids": ids, "labels": shifted(ids)} for ids in chosen["evaluation"].split(2)]
    write(folder, [{"input_ids": ids} for ids in chosen["calibration"].split(2)], evaluation)


def texts() -> list[str]:
    """Long texts, one per file, in a fixed order."""
    found = {}
    for package in map(importlib.metadata.distribution, sorted(PACKAGES)):
        found[package.name.lower()] = str(
            package.metadata.get_payload() or package.metadata.get("Description") or ""
        )
        for file in package.files or ():
            if re.search(r"(LICENSE|COPYING|NOTICE)[^/]*$", file.name) and file.locate().is_file():
                found[f"{package.name.lower()} {file.name}"] = Path(str(file.locate())).read_text(
                    encoding="utf-8", errors="replace"
                )[:6000]
    found |= {f"topic {name}": text for name, text in topics.items()}
    seen: set[str] = set()
    kept = []
    for _, text in sorted(
        found.items()
    ):  # licences and topics repeat each other: each paragraph is taken once
        fresh = [
            p
            for p in re.split(r"\n\s*\n", text)
            if (key := " ".join(p.lower().split())) not in seen and not seen.add(key)
        ]  # type: ignore[func-returns-value]
        kept.append("\n\n".join(fresh))
    return [text for text in kept if len(text) > 1500]


def shifted(ids: torch.Tensor) -> torch.Tensor:
    """Return the next token at each position."""
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORED)], 1)


def antiberty(folder: Path, setting: str) -> None:
    """Return the model, and sequences that it makes from those in its package's description.

    It makes them by masking and drawing again and again.
    """
    from transformers import BertConfig, BertForMaskedLM

    spec = importlib.util.find_spec("antiberty")
    if spec is None or not spec.submodule_search_locations:
        msg = "The weights are missing: pip install --no-deps antiberty==0.1.3 (`make demo` does it)."
        raise SystemExit(msg)
    trained = Path(spec.submodule_search_locations[0]) / "trained_models"
    source = trained / "AntiBERTy_md_smooth"
    model: Any = BertForMaskedLM(BertConfig.from_json_file(str(source / "config.json")))
    weights = torch.load(source / "pytorch_model.bin", weights_only=True, map_location="cpu")
    missing, _ = model.load_state_dict(
        weights, strict=False
    )  # its heads for species and chain, and a pooler, are left out
    if missing:
        msg = f"the file lacks {missing}"
        raise SystemExit(msg)
    model.eval().save_pretrained(folder)
    letters = (trained / "vocab.txt").read_text(encoding="utf-8").split()
    description = str(
        importlib.metadata.metadata("antiberty").get_payload()
        or importlib.metadata.metadata("antiberty")["Description"]
    )
    found = sorted(set(re.findall(r'"([A-Z]{100,})"', description)))
    batch = 8
    calibrate, judge = {"fast": (4, 16), "long": (4, 64), "full": (32, 64)}[
        setting
    ]  # batches of 8 sequences of about 120 residues
    start = [torch.tensor([[2, *(letters.index(c) for c in s), 3]]).repeat(batch, 1) for s in found]
    random = torch.Generator().manual_seed(0)
    made = [
        resampled(model, start[i % len(start)], letters.index("[MASK]"), random)
        for i in range(calibrate + judge)
    ]
    masked = [mask(ids, letters.index("[MASK]"), random) for ids in made]
    write(folder, [{"input_ids": b["input_ids"]} for b in masked[:calibrate]], masked[calibrate:])


@torch.no_grad()
def resampled(
    model: Any, ids: torch.Tensor, hole: int, random: torch.Generator, rounds: int = 20
) -> torch.Tensor:
    """Sequences after rounds in which a part is masked and drawn from the model's distribution."""
    for _ in range(rounds):
        batch = mask(ids, hole, random)
        chosen = batch["labels"] != IGNORED
        scores = model(input_ids=batch["input_ids"]).logits[chosen][:, 5:]  # residues only
        ids = ids.masked_scatter(chosen, torch.multinomial(scores.softmax(-1), 1, generator=random)[:, 0] + 5)
    return ids


def mask(ids: torch.Tensor, hole: int, random: torch.Generator) -> Batch:
    """Return inputs with some residues masked, and these residues as labels."""
    chosen = torch.rand(ids.shape, generator=random) < _MASKED
    chosen[:, 0] = chosen[:, -1] = False
    return {"input_ids": ids.masked_fill(chosen, hole), "labels": ids.masked_fill(~chosen, IGNORED)}


def lm(folder: Path, setting: str) -> None:
    """Return the byte-level model of task_lm.py: trained once, then read."""
    from task_lm import LanguageModel

    task = LanguageModel(folder / "task")
    save_file({k: v.contiguous() for k, v in task.model.state_dict().items()}, folder / "model.safetensors")
    some = 4 if setting == "full" else 2
    held = task.evaluation[: 2 if setting == "fast" else 8]
    write(folder, task.calibration[:some], [{**b, "labels": shifted(b["tokens"])} for b in held])


def minilm(folder: Path, setting: str) -> None:
    """Return the sentence encoder, and paragraphs of Python's documentation cut to 64 tokens.

    Shorter ones are left out.

    Texts are judged 64 at a time: which other one of them is nearest. What is right is fp32's nearest.
    """
    import minilm as source

    model: Any = source.load_model()
    model.save_pretrained(folder)
    tokenizer = source.load_tokenizer()
    ids = [
        i
        for text in source.paragraphs()
        if len(i := tokenizer(text, truncation=True, max_length=64)["input_ids"]) == 64
    ]
    calibrate, judge = (256 if setting == "full" else 64, 256)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))[: calibrate + judge]
    found = torch.tensor(ids)[order]
    evaluation = [{"input_ids": part} for part in found[calibrate:].split(64)]
    with torch.no_grad():
        evaluation = [{**batch, "labels": logits(model, batch).argmax(-1)} for batch in evaluation]
    write(folder, [{"input_ids": part} for part in found[:calibrate].split(16)], evaluation)


def write(folder: Path, calibration: list[Batch], evaluation: list[Batch]) -> None:
    """Return the data file of a subject."""
    parts = (("calibration", calibration), ("evaluation", evaluation))
    named = {
        f"{part}.{i}.{k}": v.contiguous()
        for part, some in parts
        for i, batch in enumerate(some)
        for k, v in batch.items()
    }
    save_file(named, folder / "data.safetensors")
    judged = sum(int((b["labels"] != IGNORED).sum()) for b in evaluation)
    print(
        f"{folder.name}: {sum(next(iter(b.values())).numel() for b in calibration)} tokens calibrate, "
        f"{judged} are judged",
        flush=True,
    )


SUBJECTS = {"smollm2": smollm2, "antiberty": antiberty, "lm": lm, "minilm": minilm}


def main() -> None:
    """Write what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--setting", choices=list(SIZES), default="fast")
    parser.add_argument("--subject", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    options = parser.parse_args()
    setting = options.setting
    options.data.mkdir(parents=True, exist_ok=True)
    (options.data / "settings.json").write_text(json.dumps({"setting": setting}), encoding="utf-8")
    for name in options.subject:
        if not (options.data / name / "data.safetensors").exists():
            (options.data / name).mkdir(exist_ok=True)
            SUBJECTS[name](options.data / name, setting)


if __name__ == "__main__":
    main()
