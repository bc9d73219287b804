"""Quantized models in the tools that people measure them with, called as their documentation says.

`make test-judges` runs this in the environment of the readers.
"""

import importlib
import math

import numpy as np
import pytest
import torch
from suites.real_minilm import minilm

import nc

mteb = pytest.importorskip("mteb")
pytest.importorskip("lm_eval")
datasets = importlib.import_module("datasets")
evaluate = importlib.import_module("evaluate")
langchain_huggingface = importlib.import_module("langchain_huggingface")
sentence_transformers = importlib.import_module("sentence_transformers")
transformers = importlib.import_module("transformers")
nc_hf = importlib.import_module("nc.hf")

FOLDER = str(minilm.model_folder())
TEXTS = [text for text in minilm.split()[0] if len(text) < 300][:48]
OTHERS = [text for text in minilm.split()[1] if len(text) < 300][:32]
LABELS = [int("e" in text.split()[0]) for text in OTHERS]


def cosines(a, b):
    return torch.nn.functional.cosine_similarity(torch.as_tensor(a), torch.as_tensor(b))


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """(Folder of the quantized model, the float model, the quantized one opened from its folder)."""
    out = tmp_path_factory.mktemp("encoder") / "q"
    model = sentence_transformers.SentenceTransformer(FOLDER, device="cpu")
    config = nc.StaticQuantConfig(act_algo="percentile")
    nc_hf.quantize_sentence_transformer(model, TEXTS, out, config, measure=False)
    return out, model, nc_hf.load_sentence_transformer(out)


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """(Tokenizer, a float classifier, the quantized one): MiniLM's encoder with a head without training."""
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(FOLDER, num_labels=2).eval()
    out = tmp_path_factory.mktemp("classifier") / "q"
    config = nc.StaticQuantConfig(act_algo="percentile")
    nc_hf.quantize(model, TEXTS, out, config, processor=tokenizer, measure=False)
    return tokenizer, model, nc_hf.load(out)


def similarity_task():
    """A task of MTEB with data of this machine: pairs of texts, scored by the words that they share."""

    def shared(a, b):
        a, b = set(a.lower().split()), set(b.lower().split())
        return len(a & b) / len(a | b)

    pairs = [(a, b) for i, a in enumerate(OTHERS) for b in OTHERS[i + 1 : i + 5]]
    rows = {
        "sentence1": [a for a, _ in pairs],
        "sentence2": [b for _, b in pairs],
        "score": [shared(*pair) for pair in pairs],
    }

    class SharedWords(mteb.abstasks.AbsTaskSTS):
        """Similarity of texts."""

        metadata = mteb.TaskMetadata(
            name="SharedWords",
            description="Pairs of texts, scored by the words that they share.",
            reference=None,
            dataset={"path": "local", "revision": "1"},
            type="STS",
            category="t2t",
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="cosine_spearman",
        )
        min_score, max_score = 0, 1

        def load_data(self, *_, **__):
            self.dataset = datasets.DatasetDict({"test": datasets.Dataset.from_dict(rows)})
            self.data_loaded = True

    return SharedWords()


def test_mteb_takes_a_quantized_sentence_transformer(encoders):
    def score(model):
        result = mteb.evaluate(model, similarity_task(), cache=None, show_progress_bar=False)
        return result.task_results[0].get_score()

    fp32, int8 = map(score, encoders[1:])
    assert fp32 > 0.1  # it measures something
    assert int8 != fp32
    assert int8 == pytest.approx(fp32, abs=0.02)


def test_trainer_predicts(classifiers, tmp_path):
    tokenizer, model, q = classifiers
    rows = datasets.Dataset.from_dict({"text": OTHERS, "labels": LABELS})
    rows = rows.map(lambda batch: tokenizer(batch["text"], truncation=True), batched=True)
    rows = rows.remove_columns("text")

    def predictions(of):
        trainer = transformers.Trainer(
            of,
            transformers.TrainingArguments(
                str(tmp_path / "out"), per_device_eval_batch_size=8, report_to=[], use_cpu=True
            ),
            data_collator=transformers.DataCollatorWithPadding(tokenizer),
            compute_metrics=lambda got: {"accuracy": float((got[0].argmax(-1) == got[1]).mean())},
        )
        return trainer.predict(rows)

    expected, got = predictions(model), predictions(q)
    assert got.predictions.shape == expected.predictions.shape == (len(OTHERS), 2)
    difference = np.abs(got.predictions - expected.predictions).max()
    assert 0 < difference < 0.1
    assert set(got.metrics) >= {"test_loss", "test_accuracy"}
    assert got.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], abs=0.05)


class Accuracy(evaluate.Metric):
    """Accuracy; those of the package `evaluate` are downloaded."""

    def _info(self):
        features = datasets.Features(
            {name: datasets.Value("int64") for name in ("predictions", "references")}
        )
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": float(np.mean(np.equal(predictions, references)))}


def test_evaluate_takes_a_pipeline(classifiers, monkeypatch):
    # evaluate 0.4 asks whether a model is one of TensorFlow, which transformers 5 has none of
    monkeypatch.setattr(transformers, "TFPreTrainedModel", type("TFPreTrainedModel", (), {}), raising=False)
    tokenizer, model, q = classifiers
    rows = datasets.Dataset.from_dict({"text": OTHERS, "label": LABELS})

    def result(of):
        pipe = transformers.pipeline("text-classification", of, tokenizer=tokenizer)
        with torch.no_grad():
            logits = of(**tokenizer(OTHERS, padding=True, return_tensors="pt")).logits
        return evaluate.evaluator("text-classification").compute(
            pipe, rows, metric=Accuracy(), label_mapping={"LABEL_0": 0, "LABEL_1": 1}
        )["accuracy"], float((logits.argmax(-1) == torch.tensor(LABELS)).float().mean())

    for of in (model, q):
        by_tool, by_hand = result(of)
        assert by_tool == pytest.approx(by_hand, abs=1 / len(OTHERS))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """Folder of a small language model without training, with MiniLM's tokenizer."""
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER, bos_token="[CLS]", eos_token="[SEP]")
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
    )
    folder = tmp_path_factory.mktemp("decoder")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_harness_scores_a_language_model(decoder):
    """Log likelihoods are those of the model's own logits; texts are those of its own `generate`."""
    huggingface = importlib.import_module("lm_eval.models.huggingface")
    api = importlib.import_module("lm_eval.api.instance")
    tokenizer = transformers.AutoTokenizer.from_pretrained(decoder)
    kind = transformers.AutoModelForCausalLM
    q = kind.from_pretrained(decoder, quantization_config=nc_hf.QuantizationConfig("int4"))
    options = {"tokenizer": tokenizer, "batch_size": 4, "device": "cpu", "add_bos_token": False}
    harness = huggingface.HFLM(q, **options)
    pairs = [(OTHERS[i], " " + OTHERS[i + 1].split(".")[0]) for i in range(6)]

    def requests(kind, arguments):
        return [api.Instance(kind, {}, each, i) for i, each in enumerate(arguments)]

    found = harness.loglikelihood(requests("loglikelihood", pairs))
    for (context, rest), (got, _) in zip(pairs, found, strict=True):
        before, whole = (
            tokenizer.encode(text, add_special_tokens=False) for text in (context, context + rest)
        )
        with torch.no_grad():
            logs = q(torch.tensor([whole])).logits.log_softmax(-1)[0]
        own = sum(logs[i - 1, whole[i]].item() for i in range(len(before), len(whole)))
        assert got == pytest.approx(own, rel=1e-3)
    fp32 = huggingface.HFLM(kind.from_pretrained(decoder), **options)
    others = fp32.loglikelihood(requests("loglikelihood", pairs))
    assert any(not math.isclose(a[0], b[0], abs_tol=1e-3) for a, b in zip(found, others, strict=True))
    (text,) = harness.generate_until(
        requests("generate_until", [(OTHERS[0], {"until": ["zzz"], "max_gen_toks": 8})])
    )
    ids = tokenizer(OTHERS[0], add_special_tokens=False, return_tensors="pt").input_ids
    tokens = q.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert text == tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)


def test_langchain_quantizes_at_load():
    embeddings = langchain_huggingface.HuggingFaceEmbeddings(
        model_name=FOLDER,
        model_kwargs={
            "device": "cpu",
            "model_kwargs": {"quantization_config": nc_hf.QuantizationConfig("int8")},
        },
    )
    own = sentence_transformers.SentenceTransformer(FOLDER, device="cpu").encode(OTHERS)
    got = embeddings.embed_documents(OTHERS)
    assert 0.99 < cosines(got, own).min() < 1 - 1e-6
    assert cosines([embeddings.embed_query(OTHERS[0])], own[:1]) > 0.99


def test_langchain_opens_an_exported_folder(encoders, tmp_path):
    folder, _, q = encoders
    nc_hf.export(folder, tmp_path / "openvino", "openvino")
    embeddings = langchain_huggingface.HuggingFaceEmbeddings(
        model_name=str(tmp_path / "openvino"), model_kwargs={"device": "cpu", "backend": "openvino"}
    )
    assert cosines(embeddings.embed_documents(OTHERS), q.encode(OTHERS)).min() > 0.97
