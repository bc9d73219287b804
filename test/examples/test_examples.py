"""Examples and documents: what a newcomer sees who runs them, and the protocol that benchmarks share."""

import contextlib
import importlib
import io
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nc.observers import ALGORITHMS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


BRACKETS = "[red] a[0] [/] :smile: pip install 'nc-quant[ipex]'"


@pytest.fixture
def example(monkeypatch):
    """Import a module of the examples folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def run(folder, name, *options):
    """Run an example as a newcomer does, from some other directory; returns what it prints."""
    work = folder / "work"
    work.mkdir()
    command = [sys.executable, str(EXAMPLES / name), "--out", str(folder / "out"), *options]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert list(work.iterdir()) == []  # nothing is written to the working directory
    return done.stdout


def numbers(pattern, text):
    return [float(group) for group in re.search(pattern, text).groups()]


@pytest.mark.ipex
def test_quickstart_prints_what_a_newcomer_wants_to_know(tmp_path):
    text = run(tmp_path, "quickstart.py", "--calibrate", "32", "--evaluate", "64")
    ran, products = numbers(r" on native: (\d+) of (\d+) products run in int8", text)
    # six layers of six Linears and the pooler; attention, two products each, where that is as accurate
    assert products == 49 >= ran >= 37
    assert not re.search(r" int8 +fp32 ", text)  # asked and ran: what was asked to be int8 is
    assert re.search(r"layer_norm +fp32 +fp32 +normalisation stays fp32", text)
    assert "Accuracy on 64 paragraphs that were not used for calibration" in text
    mean, worst = numbers(r"cosine to fp32 embeddings: mean (\S+), worst (\S+)\n", text)
    assert 0.95 < worst < mean < 1
    assert numbers(r"nearest other paragraph stays the same: (\S+)%", text)[0] > 75
    fp32, int8, gain = numbers(r"fp32 \(eager PyTorch\) (\S+) ms, int8 (\S+) ms: (\S+) × as fast", text)
    assert min(fp32, int8, gain) > 0  # how fast depends on what else the machine does
    before, after = numbers(r"fp32 safetensors (\S+) MB, int8 artefact (\S+) MB", text)
    assert 0.6 * before < after < 0.7 * before  # the embedding table stays fp32
    assert f"Saved in {tmp_path / 'out'}" in text.replace("\n", "")
    assert "Loaded in a new process, 64 paragraphs: the same numbers" in text
    mean, worst = numbers(r"64 sentences, cosine to fp32: mean (\S+), worst (\S+)$", text.strip())
    assert 0.9 < worst < mean < 1


@pytest.mark.exhaustive
@pytest.mark.ipex
def test_resnet50_prints_which_rule_decided(tmp_path):
    text = run(tmp_path, "resnet50.py")
    assert "RANDOM weights" in text
    assert re.search(r"^conv1 +conv2d +name 'conv1' +fp32", text, re.MULTILINE)
    assert re.search(r"^fc +linear +type 'Linear' +fp32", text, re.MULTILINE)
    assert re.search(r"^layer1\.0\.conv1 +conv2d +global +int8", text, re.MULTILINE)
    ran, products = numbers(r" on native: (\d+) of (\d+) products run in int8", text)
    # conv1 and fc stay fp32 by rules
    assert 0.95 * (products - 2) < ran <= products - 2
    before, after = numbers(r"fp32 safetensors (\S+) MB, int8 artefact (\S+) MB", text)
    assert after < 0.4 * before
    assert "Loaded in a new process: the same numbers" in text


@pytest.mark.exhaustive
@pytest.mark.ipex
def test_serve_torchscript_needs_torch_and_ipex_only(tmp_path):
    text = run(tmp_path, "serve_torchscript.py")
    assert "served without importing nc: True" in text
    assert "the same numbers" in text


@pytest.mark.exhaustive
@pytest.mark.ipex
def test_distributed_calibration_starts_its_own_processes(tmp_path):
    text = run(tmp_path, "distributed_calibration.py")
    assert "each of 2 ranks calibrated with 32 of 64 batches" in text
    assert "the same bytes on every rank" in text
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["rank0", "rank1"]


def test_no_paragraph_is_in_calibration_and_evaluation(example):
    minilm = example("minilm")
    calibration, evaluation = minilm.split()
    assert (len(calibration), len(evaluation)) == (96, 640)
    assert len({*calibration, *evaluation}) == 96 + 640
    assert (calibration, evaluation) == minilm.split()
    assert all(80 < len(text) < 600 and text == " ".join(text.split()) for text in calibration)


def test_batches_are_cut_to_128_tokens(example):
    asked = {}

    def tokenizer(texts, **options):
        asked.update(options)
        return {"input_ids": torch.zeros(len(texts), 3)}

    sizes = [len(batch["input_ids"]) for batch in example("minilm").batches(["text"] * 20, tokenizer)]
    assert sizes == [16, 4]
    assert asked == {"padding": True, "truncation": True, "max_length": 128, "return_tensors": "pt"}


def test_embeddings_are_unit_vectors_and_ignore_padding(example):
    states = torch.tensor([[[3.0, 0.0], [0.0, 4.0], [9.0, 9.0]]])

    def model(attention_mask):
        return SimpleNamespace(last_hidden_state=states)

    got = example("minilm").embed(model, [{"attention_mask": torch.tensor([[1, 1, 0]])}])
    torch.testing.assert_close(got, torch.tensor([[0.6, 0.8]]))


def test_agreement_counts_neighbours_that_stay(example):
    angles = torch.tensor([0.0, 0.1, 1.0, 1.2])
    fp32 = torch.stack([angles.cos(), angles.sin()], dim=1)
    moved = torch.tensor([0.0, 0.1, 0.25, 1.2])  # the third now stands nearest to the second
    int8 = torch.stack([moved.cos(), moved.sin()], dim=1)
    figures = example("minilm").agreement(fp32, int8)
    assert figures["same_neighbour"] == 0.75
    assert figures["worst_cosine"] == pytest.approx(float(torch.tensor(0.75).cos()), abs=1e-6)
    assert figures["mean_cosine"] == pytest.approx((3 + figures["worst_cosine"]) / 4, abs=1e-6)


def test_what_reports_say_is_printed_as_it_is(example, capsys):
    show = example("show")
    op = SimpleNamespace(operator=BRACKETS, kind="linear", asked="int8", ran="fp32", reason=BRACKETS)
    show.console.width = 200

    class Report(SimpleNamespace):
        __str__ = lambda _: BRACKETS  # noqa: E731 - as print shows it

    show.operators(Report(ops=[op]))
    show.heading(BRACKETS)
    assert capsys.readouterr().out.count(BRACKETS) == 4


def test_other_numbers_end_an_example_with_an_error(example, capsys):
    show = example("show")
    one = torch.ones(4)
    show.same_numbers([one], [one + 1e-6], "again")
    assert "again: the same numbers" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        show.same_numbers([one], [one + 1e-2], "again")
    assert "OTHER NUMBERS" in capsys.readouterr().out


IPEX, EXHAUSTIVE = pytest.mark.ipex, pytest.mark.exhaustive
ONNX = pytest.mark.skipif(not find_spec("onnxruntime"), reason="needs nc-quant[onnx]")
DOCUMENTS = [
    "README.md",
    "docs/start/quickstart-int8.md",
    pytest.param("docs/start/quickstart-4-bit.md", marks=EXHAUSTIVE),
    "docs/how-to/quantize-a-cnn.md",
    pytest.param("docs/how-to/quantize-an-encoder.md", marks=IPEX),
    pytest.param("docs/how-to/quantize-an-llm.md", marks=EXHAUSTIVE),
    pytest.param("docs/how-to/quantize-without-data.md", marks=IPEX),
    pytest.param("docs/how-to/keep-layers-float.md", marks=IPEX),
    pytest.param("docs/how-to/calibrate.md", marks=IPEX),
    pytest.param("docs/how-to/speed-is-not-there.md", marks=IPEX),
    pytest.param("docs/how-to/generate-text.md", marks=EXHAUSTIVE),
    "docs/how-to/deploy.md",
    "docs/how-to/containers.md",
    "docs/how-to/tune.md",
    pytest.param("docs/how-to/export.md", marks=ONNX),
    pytest.param("docs/how-to/exchange-weights.md", marks=EXHAUSTIVE),
    "docs/how-to/compare-engines.md",
    pytest.param("docs/how-to/migrate-from-neural-compressor.md", marks=IPEX),
    "docs/how-to/migrate-from-torchao.md",
    pytest.param("docs/how-to/migrate-from-quark.md", marks=EXHAUSTIVE),
    "docs/contribute/extending.md",
]


def test_every_document_with_python_blocks_is_run():
    named = {getattr(document, "values", (document,))[0] for document in DOCUMENTS}
    pages = (ROOT / "README.md", *(ROOT / "docs").glob("*/*.md"))
    assert {
        str(page.relative_to(ROOT)) for page in pages if "\n```python\n" in page.read_text(encoding="utf-8")
    } == named


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_python_block_runs_and_prints_the_text_below_it(name, tmp_path, monkeypatch, request):
    """Blocks of a document share their names; "…" in a text stands for anything."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nc.backends._REGISTERED", {})
    request.addfinalizer(lambda own=set(ALGORITHMS): [ALGORITHMS.pop(name) for name in set(ALGORITHMS) - own])
    content = (ROOT / name).read_text(encoding="utf-8")
    if re.search(r"^(?:import|from) .*torchvision", content, re.MULTILINE):
        pytest.importorskip("torchvision", reason="torchvision is not installed: its models can't be tested")
    names, printed, ran = {"__name__": "document"}, "", 0
    for kind, block in re.findall(r"^```(python|text)\n(.*?)^```$", content, re.MULTILINE | re.DOTALL):
        if kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block, name, "exec"), names)
            printed, ran = out.getvalue(), ran + 1
        else:
            pattern = ".*".join(map(re.escape, block.strip().split("…")))
            assert re.fullmatch(pattern, printed.strip(), re.DOTALL), f"{name} says\n{block}\nbut\n{printed}"
    assert ran
