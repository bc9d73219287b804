"""One file for each trial: found again, never half written, never of another trial."""

import functools
import json

import pytest
import torch

from nc.errors import ArtefactError, NCWarning
from nc.tuning.identity import described, hash_of
from nc.tuning.trials import Result, Trials

RESULT = Result(metric=0.9, sqnr_db=31.5, fp32_ratio=2.0, ms=1.5, spread=(1.9, 2.1), weight_bytes=100)
KEY = {"model": "a", "config": {"x": [1, 2]}, "threads": 2}


def test_a_trial_is_found_by_all_that_determines_it(tmp_path):
    trials = Trials(tmp_path / "new" / "folder")
    assert trials.find(KEY) is None
    trials.keep(KEY, RESULT)
    assert Trials(tmp_path / "new" / "folder").find(dict(reversed(KEY.items()))) == RESULT
    assert trials.find({**KEY, "threads": 4}) is None
    assert trials.find({**KEY, "config": {"x": [1, 3]}}) is None
    assert len(list((tmp_path / "new" / "folder").iterdir())) == 1


def test_without_a_folder_nothing_is_kept():
    trials = Trials(None)
    trials.keep(KEY, RESULT)
    assert trials.find(KEY) is None


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": {}, "result": {}}', "other key", "no metric"])
def test_damaged_files_are_measured_again(tmp_path, damage):
    trials = Trials(tmp_path)
    trials.keep(KEY, RESULT)
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_text())
    if damage == "other key":
        document["key"]["model"] = "b"
        damage = json.dumps(document)
    elif damage == "no metric":
        del document["result"]["metric"]
        damage = json.dumps(document)
    path.write_text(damage)
    with pytest.warns(NCWarning, match="is damaged, and is measured again"):
        assert trials.find(KEY) is None
    trials.keep(KEY, RESULT)
    assert trials.find(KEY) == RESULT


def test_a_folder_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ArtefactError, match="is not a folder that can be written"):
        Trials(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def accuracy(model, k=1, data=None):
    return float(k)


class Evaluator:
    def __init__(self, k):
        self.k = k

    def __call__(self, model):
        return float(self.k)


def test_metrics_are_told_apart_by_what_they_hold():
    def made(k):
        return lambda model: float(k)

    one, other = torch.zeros(3), torch.ones(3)
    pairs = [
        (functools.partial(accuracy, k=1), functools.partial(accuracy, k=2)),
        (Evaluator(1), Evaluator(2)),
        (made(1), made(2)),
        (functools.partial(accuracy, data=one), functools.partial(accuracy, data=other)),
        (Evaluator(1).__call__, Evaluator(2).__call__),
    ]
    for first, second in pairs:
        assert described(first) != described(second)
        assert "0x" not in described(first)  # another process says the same
    assert described(functools.partial(accuracy, k=1)) == described(functools.partial(accuracy, k=1))


def test_inputs_are_told_apart_by_names_and_numbers():
    x = torch.zeros(2)
    calls = [((x,), {}), ((), {"a": x}), ((), {"b": x}), ((x,), {"scale": 1.0}), ((x,), {"scale": 2.0})]
    assert len({hash_of(call) for call in calls}) == len(calls)
    assert hash_of(((x.clone(),), {})) == hash_of(calls[0])


def test_files_can_be_read_by_others(tmp_path):
    trials = Trials(tmp_path)
    trials.keep({"a": 1}, RESULT)
    (file,) = tmp_path.iterdir()
    (tmp_path / "plain").write_text("")
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode
