"""One file for each trial: found again, never half written, never of another trial."""

import json

import pytest

from nc.api.tune.trials import Result, Trials
from nc.errors import ArtefactError, NCWarning

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
    with pytest.raises(ArtefactError, match="is no folder that can be written"):
        Trials(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
