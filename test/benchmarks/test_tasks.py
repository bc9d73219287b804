"""What the tasks of accuracy.py share: standard errors, times, ranks, and data that is never used twice."""

import json
import math
import types
from pathlib import Path

import pytest
import torch

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def module(monkeypatch):
    """Import a module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return pytest.importorskip


@pytest.fixture
def toy(module):
    """A task with 200 answers, of which 150 are right; its model adds nothing."""

    class Toy(module("task").Task):
        name, figures, known = "toy", {"accuracy": ("%", 2)}, ("labels", "head")

        def architecture(self):
            return torch.nn.Linear(1, 1)

        def make(self):
            with torch.no_grad():
                self.model.weight.fill_(1.0)
                self.model.bias.fill_(0.0)
            self.calibration = [{"input": torch.zeros(1, 1)}]
            self.evaluation = [{"input": torch.arange(200.0)[:, None]}]
            self.labels = torch.arange(200) < 150
            self.head = torch.ones(3)

        def samples(self, fp32, got):
            return self.labels & (got[:, 0] >= 0)

    return Toy


@pytest.mark.parametrize("right", [50, 150, 190])
def test_the_standard_error_of_a_share_is_that_of_the_binomial(module, right):
    data = (torch.arange(200) < right).double().numpy()
    found = module("bootstrap").deviation(lambda chosen: data[chosen].mean(), 200)
    share = right / 200
    assert found == pytest.approx(math.sqrt(share * (1 - share) / 200), rel=0.1)


def test_units_that_are_alike_count_once(module):
    data = (torch.arange(200) < 100).double().repeat_interleave(10).numpy()
    found = module("bootstrap").deviation(lambda chosen: data[chosen].mean(), 2000, block=10)
    assert found == pytest.approx(math.sqrt(0.25 / 200), rel=0.15)


def test_a_row_has_the_errors_of_the_figure_and_of_its_difference_to_fp32(toy):
    task = toy()
    fp32 = task.outputs(task.model)
    worse = fp32.clone()
    worse[:30] = -1
    same, found = task.row(fp32, fp32), task.row(fp32, worse)
    assert (same["accuracy"].value, same["difference to fp32"].value) == (75.0, "+0.00 ± 0.00")
    assert same["standard error"].value == pytest.approx(100 * math.sqrt(0.75 * 0.25 / 200), rel=0.1)
    more, error = found["difference to fp32"].value.split(" ± ")
    assert (found["accuracy"].value, more) == (60.0, "-15.00")
    assert float(error) == pytest.approx(100 * math.sqrt(0.15 * 0.85 / 200), rel=0.1)


def test_what_a_task_knows_is_kept_with_its_data(toy, tmp_path, monkeypatch):
    first = toy(tmp_path)
    monkeypatch.delattr(toy, "make")
    toy.__abstractmethods__ = frozenset()
    again = toy(tmp_path)
    assert torch.equal(first.labels, again.labels)
    assert torch.equal(first.head, again.head)
    assert torch.equal(first.model.weight, again.model.weight)
    assert torch.equal(first.evaluation[0]["input"], again.evaluation[0]["input"])


def test_calls_take_turns(module, monkeypatch):
    turns = module("turns")
    monkeypatch.setattr(turns, "REST", 0)
    monkeypatch.setattr(turns, "SPAN", 0)
    called = []
    found = turns.timings({name: lambda name=name: called.append(name) for name in ("fp32", "int8")}, 3)
    assert called == ["fp32", *["fp32", "fp32", "int8", "int8"] * 3]
    assert [len(times) for times in found.values()] == [3, 3]
    assert turns.speed([2.0, 6.0, 9.0], [1.0, 2.0, 9.0]).value == 2.0
    assert turns.duration([0.002, 0.001, 0.004]).value == 2.0


def test_equal_values_share_a_rank(module):
    ranks = module("ranks")
    values = torch.tensor([3.0, 1.0, 3.0, 2.0])
    assert ranks.ranks(values).tolist() == [3.5, 1.0, 3.5, 2.0]
    assert ranks.spearman(values, values.exp()) == pytest.approx(1)
    assert ranks.spearman(torch.tensor([1.0, 2, 3, 4, 5]), torch.tensor([2.0, 1, 4, 3, 5])) == pytest.approx(
        0.8
    )
    scores, true = torch.tensor([0.9, 0.5, 0.5, 0.1]), torch.tensor([True, True, False, False])
    assert ranks.area(scores, true) == pytest.approx(3.5 / 4)


def test_a_package_that_is_missing_is_named_with_its_command(module, tmp_path, monkeypatch):
    packages = module("packages")
    with pytest.raises(LookupError, match=r"no_such is missing: pip install --no-deps no-such==1 pillow"):
        packages.folder("no_such", "no-such==1", "pillow")
    monkeypatch.setenv("NODE_PATH", str(tmp_path))
    with pytest.raises(
        LookupError, match=r"npm pack @a/b@1.0 && .* -xzf a-b-1.0.tgz .* -C node_modules/@a/b"
    ):
        packages.npm("@a/b", "1.0")
    (tmp_path / "@a" / "b").mkdir(parents=True)
    (tmp_path / "@a" / "b" / "package.json").write_text("{}", encoding="utf-8")
    assert packages.npm("@a/b", "1.0") == tmp_path / "@a" / "b"


def values(batches, name):
    """The first number of each sample."""
    return torch.cat([batch[name].flatten(1)[:, 0] for batch in batches])


def apart(task, name, count):
    """Whether all samples differ, in calibration and evaluation together."""
    numbers = torch.cat([values(task.calibration, name), values(task.evaluation, name)])
    return len(numbers) == count == len(numbers.unique())


def test_digits_calibrate_or_are_evaluated(module, tmp_path, monkeypatch):
    mnist = module("task_mnist")
    folder = tmp_path / "mnist" / "src" / "digits"
    folder.mkdir(parents=True)
    (tmp_path / "mnist" / "package.json").write_text("{}", encoding="utf-8")
    for digit in range(10):  # each image is of one grey, which tells the digit and its number
        pixels = [(digit + n / 10) / 10 for n in range(10) for _ in range(784)]
        (folder / f"{digit}.json").write_text(json.dumps({"data": [*pixels, 0.5]}), encoding="utf-8")
    monkeypatch.setenv("NODE_PATH", str(tmp_path))
    monkeypatch.setattr(mnist.Mnist, "architecture", lambda self: mnist.Network())
    monkeypatch.setattr(mnist.Mnist, "calibrating", 20)
    monkeypatch.setattr(mnist.Mnist, "evaluated", 80)
    task = mnist.Mnist()
    assert apart(task, "images", 100)
    grey = values(task.evaluation, "images") * mnist._DEVIATION + mnist._MEAN
    assert torch.equal((10 * grey + 1e-3).long(), task.labels)


def test_faces_calibrate_or_are_evaluated(module, tmp_path, monkeypatch):
    faces, numpy = module("task_faces"), pytest.importorskip("numpy")
    (tmp_path / "data").mkdir()
    greys = numpy.arange(200.0)[:, None, None].repeat(25, 1).repeat(25, 2) / 200
    numpy.save(tmp_path / "data" / "lfw_subset.npy", greys)
    monkeypatch.setattr(faces.packages, "folder", lambda *_: tmp_path)
    monkeypatch.setattr(faces.Faces, "architecture", lambda self: faces.RNet())
    monkeypatch.setattr(faces.Faces, "noise", 0.0)
    task = faces.Faces()
    assert apart(task, "images", 200)
    dark = values(task.evaluation, "images") < 0  # the first half is dark, and these are the faces
    logits = torch.stack((-dark.float(), dark.float()), 1)
    assert task.judge(logits, logits) == (100.0,)
    assert task.judge(logits, -logits) == (0.0,)


def test_mails_calibrate_or_are_learned_or_are_evaluated(module, tmp_path, monkeypatch):
    spam = module("task_spam")
    data = tmp_path / "@stdlib" / "datasets-spam-assassin"
    for number in [*range(40), *range(10)]:  # some twice, which must not be in two parts
        folder = "spam" if number % 2 else "easy-ham"
        file = data / "data" / f"{folder}-1" / f"{number}.json"
        file = file if not file.exists() else data / "data" / f"{folder}-2" / f"{number}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        mail = f"From: a\nSubject: {number + 1}\n\n<b>body</b> &amp; more"
        file.write_text(json.dumps({"text": mail}), encoding="utf-8")
    (data / "package.json").write_text("{}", encoding="utf-8")
    monkeypatch.setenv("NODE_PATH", str(tmp_path))
    seen = []

    class Model(torch.nn.Module):
        """An embedding that tells odd numbers from even ones."""

        def forward(self, input_ids, attention_mask):
            odd = (input_ids % 2).float()[..., None]
            return types.SimpleNamespace(last_hidden_state=torch.cat((odd, 1 - odd), -1))

    def tokenizer(texts, **_):
        assert all(text.endswith("body & more") for text in texts)
        numbers = torch.tensor([[int(text.split()[0])] for text in texts])
        seen.extend(numbers.flatten().tolist())
        return {"input_ids": numbers, "attention_mask": torch.ones_like(numbers)}

    monkeypatch.setattr(spam.minilm, "load_tokenizer", lambda: tokenizer)
    monkeypatch.setattr(spam.Spam, "architecture", lambda self: Model())
    for name, count in {"calibrating": 8, "fitted": 16, "evaluated": 16}.items():
        monkeypatch.setattr(spam.Spam, name, count)
    task = spam.Spam()
    assert sorted(seen) == list(range(1, 41))
    ids = values(task.evaluation, "input_ids")
    assert sum(len(batch["input_ids"]) for batch in task.calibration) == 8
    assert torch.equal(task.labels, ids % 2 == 0)  # numbers in mails begin with 1
    outputs = task.read(
        {"last_hidden_state": task.model(ids[:, None], None).last_hidden_state},
        {"attention_mask": torch.ones(16, 1)},
    )
    assert task.judge(outputs, outputs)[0] == 100.0
    assert task.score(torch.tensor([[True, True], [True, False], [False, True], [False, False]])) == 50.0


def test_a_pitch_is_right_within_50_cents(module, monkeypatch):
    pitch = module("task_pitch")
    monkeypatch.setattr(pitch.Pitch, "architecture", lambda self: pitch.Crepe())
    monkeypatch.setattr(pitch.Pitch, "evaluated", 100)
    task = pitch.Pitch()
    assert apart(task, "frames", pitch.Pitch.calibrating + 100)
    frames = task.evaluation[0]["frames"]
    assert torch.allclose(frames.std(1), torch.ones(100), atol=1e-5)
    bins = torch.arange(pitch.BINS) * pitch.CENTS + pitch.FIRST

    def answers(cents):
        logits = -((bins - cents[:, None]) / 25).square()
        return task.judge(logits, logits)[0]

    assert answers(task.labels) == 100.0
    assert answers(task.labels + 30) == 100.0
    assert answers(task.labels + 80) == 0.0
    assert task.model(frames[:2]).shape == (2, pitch.BINS)
