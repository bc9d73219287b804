"""`python -m nc quantize DIR`: a saved transformers model gets low-bit weights."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import torch

from nc.api.pretrained import quantize_folder
from nc.cli import inputs
from nc.config import WeightOnlyConfig, parts_of
from nc.config.auto import AutoConfig
from nc.text.plain import plain


def quantize_pretrained(
    source: Path,
    calib: Path | None,
    out: Path,
    config: Path | None,
    fields: dict[str, Any],
    samples: int,
    length: int,
) -> None:
    """Quantize a folder; prints the report.

    Args:
        source: the folder of the model.
        calib: a text file, or None.
        out: the artefact.
        config: a JSON file with a configuration, or None.
        fields: of `WeightOnlyConfig`, instead of `config`.
        samples: most pieces of the text.
        length: tokens of one piece.

    Raises:
        RequestError: both a configuration and fields are given, or a file cannot be used.
        NCError: see `quantize_folder`.
    """
    if config is not None and fields:
        msg = f"Give either --config or {', '.join(sorted(fields))}, not both."
        raise inputs.RequestError(msg)
    chosen = WeightOnlyConfig(**fields) if config is None else inputs.read_config(config)
    if isinstance(chosen, AutoConfig) or not all(
        isinstance(part, WeightOnlyConfig) for part in parts_of(chosen)
    ):
        msg = (
            f"{config}: a folder gets weight-only quantization; use a WeightOnlyConfig, or a FACTORY for "
            "other strategies."
        )
        raise inputs.RequestError(msg)
    texts = [] if calib is None else _pieces(source, calib, samples, length)
    begun = time.perf_counter()

    def progress(done: int, total: int, name: str) -> None:
        passed = time.perf_counter() - begun
        left = f", about {passed / done * (total - done):.0f} s left" if done else ""
        if name:
            click.echo(f"block {done + 1} of {total}: {name} ({passed:.0f} s{left})", err=True)

    report = quantize_folder(source, chosen, out, texts, progress=progress)
    click.echo(str(report))
    click.echo(plain(f"saved to {out}"))


def _pieces(source: Path, calib: Path, samples: int, length: int) -> list[torch.Tensor]:
    """Return the text as token ids in pieces of one length, shape [1, length] each."""
    from transformers import AutoTokenizer

    try:
        text = calib.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        msg = f"{calib} is not UTF-8 text: {error}."
        raise inputs.RequestError(msg) from error
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        msg = (
            f"{source} has no tokenizer that transformers can load ({type(error).__name__}: {error}). Save "
            "the model's tokenizer there."
        )
        raise inputs.RequestError(msg) from error
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
    count = min(samples, len(ids) // length)
    if count == 0:
        msg = (
            f"{calib} has {len(ids)} tokens, fewer than one piece of {length}. Give more text, or a smaller "
            "--length."
        )
        raise inputs.RequestError(msg)
    if count < samples:
        click.echo(
            f"nc: warning: {calib} has text for {count} pieces of {length} tokens, not {samples}; more text "
            "gives better codes.",
            err=True,
        )
    return [ids[i * length : (i + 1) * length].unsqueeze(0) for i in range(count)]
