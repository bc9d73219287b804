"""Quantize a real sentence encoder: proof of int8, accuracy, speed, size, and loading in a new process.

    python examples/quickstart.py [--out DIR]   the whole tour
    python examples/quickstart.py --check DIR   only load what an earlier tour saved, and compare its numbers

Nothing is downloaded and nothing is written to the working directory. The model and the text: see minilm.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from pathlib import Path

import minilm
import show
import torch
from safetensors.torch import load_file, save_file

import nc
from nc import convert, prepare

LATENCY_ROUNDS = 40
CHECK_BATCHES = 4


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="new or empty folder for what is saved (default: a temporary one)"
    )
    parser.add_argument("--check", type=Path, metavar="DIR", help="the --out folder of an earlier run")
    parser.add_argument(
        "--calibrate",
        type=int,
        default=minilm.CALIBRATION,
        help="paragraphs to calibrate with (default: %(default)s)",
    )
    parser.add_argument(
        "--evaluate",
        type=int,
        default=minilm.EVALUATION,
        help="paragraphs to judge on (default: %(default)s)",
    )
    options = parser.parse_args()
    if options.check:
        check(options.check)
    else:
        out = options.out or Path(tempfile.mkdtemp(prefix="nc-quickstart-"))
        tour(out, options.calibrate, options.evaluate)


def tour(out: Path, calibrate: int, evaluate: int) -> None:
    """Everything but loading."""
    model, tokenizer = minilm.load_model(), minilm.load_tokenizer()
    calibration_text, evaluation_text = minilm.split()
    calibration_text = calibration_text[:calibrate]
    calibration = list(minilm.batches(calibration_text, tokenizer))
    evaluation = list(minilm.batches(evaluation_text[:evaluate], tokenizer))

    def run_calibration(prepared: torch.nn.Module) -> None:
        for batch in show.progress(calibration, "calibrate"):
            prepared(**batch)

    # ── int8 in four lines ──────────────────────────────────────────────
    prepared = prepare(model, "auto", example_inputs=calibration[0])
    run_calibration(prepared)
    q_model = convert(prepared)
    # ────────────────────────────────────────────────────────────────────

    show.operators(q_model.report())
    embeddings = accuracy(model, q_model, evaluation)
    speed(model, q_model, evaluation_text, tokenizer)

    nc.save(q_model, out / "int8")
    save_file({"embeddings": embeddings}, out / "expected.safetensors")
    fp32_file = minilm.model_folder() / "model.safetensors"
    show.sizes(fp32_file.stat().st_size, show.folder_bytes(out / "int8"))
    show.console.print(
        "Embedding tables stay fp32, because no arithmetic uses them. They are most of the int8 model's size."
    )
    show.heading(f"Saved in {out}")
    show.in_new_process("--check", out)
    in_sentence_transformers(out / "sentence-transformer", calibration_text, evaluation_text[:64])


def in_sentence_transformers(out: Path, texts: list[str], sentences: list[str]) -> None:
    """Show the three lines of a user of sentence-transformers, who sees no graph and no tensor."""
    show.heading("The same in sentence-transformers: three lines")
    if importlib.util.find_spec("sentence_transformers") is None:
        show.console.print("sentence-transformers is not installed here; `make demo-newest` has it.")
        return
    from sentence_transformers import SentenceTransformer

    import nc.hf

    # ── three lines ─────────────────────────────────────────────────────
    model = SentenceTransformer(str(minilm.model_folder()), device="cpu")
    q_model = nc.hf.quantize_sentence_transformer(model, texts, out, nc.StaticQuantConfig())
    embeddings = q_model.encode(sentences)
    # ────────────────────────────────────────────────────────────────────
    expected = model.encode(sentences)
    cosines = torch.nn.functional.cosine_similarity(torch.tensor(embeddings), torch.tensor(expected))
    show.console.print(
        f'model = SentenceTransformer("all-MiniLM-L6-v2")\n'
        f'q_model = nc.hf.quantize_sentence_transformer(model, texts, "out", nc.StaticQuantConfig())\n'
        f"embeddings = q_model.encode(sentences)  # {len(sentences)} sentences, cosine to fp32: mean "
        f"{cosines.mean():.4f}, worst {cosines.min():.4f}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def accuracy(
    model: torch.nn.Module, q_model: torch.nn.Module, evaluation: list[minilm.Batch]
) -> torch.Tensor:
    """Compare embeddings of text that was not used for calibration; returns the int8 embeddings."""
    start = time.perf_counter()
    fp32 = minilm.embed(model, show.progress(evaluation, "evaluate fp32"))
    between = time.perf_counter()
    int8 = minilm.embed(q_model, show.progress(evaluation, "evaluate int8"))
    end = time.perf_counter()
    figures = minilm.agreement(fp32, int8)
    show.heading(f"Accuracy on {len(fp32)} paragraphs that were not used for calibration")
    show.console.print(
        f"all of them, of any length: fp32 {between - start:.1f} s, int8 {end - between:.1f} s with kernels "
        f"for new lengths, {(between - start) / (end - between):.2f} × as fast"
    )
    show.console.print(
        f"cosine to fp32 embeddings: mean {figures['mean_cosine']:.4f}, worst {figures['worst_cosine']:.4f}"
    )
    show.console.print(f"nearest other paragraph stays the same: {figures['same_neighbour']:.1%}")
    return int8


def speed(model: torch.nn.Module, q_model: torch.nn.Module, texts: list[str], tokenizer: object) -> None:
    """Time one sentence of a fixed length."""
    one = next(minilm.batches([max(texts, key=len)], tokenizer))
    tokens = one["input_ids"].shape[1]
    show.latency(lambda: model(**one), lambda: q_model(**one), f"batch 1, {tokens} tokens", LATENCY_ROUNDS)


def check(out: Path) -> None:
    """Load the artefact, without the model's class or its fp32 weights, and embed some paragraphs again."""
    loaded = nc.load(out / "int8")
    expected = load_file(out / "expected.safetensors")["embeddings"][: CHECK_BATCHES * minilm.BATCH]
    _, texts = minilm.split()
    batches = list(minilm.batches(texts[: len(expected)], minilm.load_tokenizer()))
    got = minilm.embed(loaded, show.progress(batches, "embed"))
    show.same_numbers([expected], [got], f"Loaded in a new process, {len(got)} paragraphs")


if __name__ == "__main__":
    main()
