"""`nc bench --lengths 5-128`: what a real token costs in mixes of lengths."""

import json

import pytest
import torch
from click.testing import CliRunner

import nc
from nc.cli import lengths
from nc.cli.inputs import RequestError
from nc.cli.main import main


class Encoder(torch.nn.Module):
    """Tokens with a mask; padding must not count."""

    def __init__(self):
        super().__init__()
        self.table, self.linear = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 16)

    def forward(self, input_ids, attention_mask):
        return self.linear(self.table(input_ids) * attention_mask[..., None])


class Pictures(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x)


def saved(model, example, folder):
    call = (lambda m: m(**example)) if isinstance(example, dict) else (lambda m: m(*example))
    nc.save(
        nc.quantize(model.eval(), nc.StaticQuantConfig(), call, example_inputs=example, measure=False), folder
    )
    return folder


@pytest.fixture(scope="module", params=["names", "positions"])
def folder(request, tmp_path_factory):
    example = {"input_ids": torch.randint(0, 50, (2, 8)), "attention_mask": torch.ones(2, 8)}
    if request.param == "positions":
        example = tuple(example.values())
    return saved(Encoder(), example, tmp_path_factory.mktemp("lengths") / "m")


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(*words):
    return CliRunner().invoke(main, ["bench", *map(str, words)])


def test_a_range_has_texts_of_its_lengths_and_a_list_has_its_own():
    found = lengths.lengths_of("5-128")
    assert len(found) == lengths.TEXTS
    assert found == lengths.lengths_of("5-128")
    assert min(found) >= 5
    assert max(found) <= 128
    assert len(set(found)) > 20
    assert lengths.lengths_of("7") == [7]
    assert lengths.lengths_of("7,40,7") == [7, 40, 7]


@pytest.mark.parametrize("text", ["", "5-", "9-5", "0-5", "0", "3,0", "a", "1.5", "no/such/file.txt"])
def test_what_is_no_mix_is_an_error(text):
    with pytest.raises(RequestError, match="expected a range"):
        lengths.lengths_of(text)


def test_padding_and_time_of_each_way(folder):
    done = run(folder, "--lengths", "2,6,4,1,3,5,8,8,2", "--rounds", 2, "--threads", 1, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["texts"], told["tokens"], told["rounds"]) == (9, 39, 2)
    shown = {(each["batch"], each["order"]): each for each in told["mixes"]}
    assert list(shown) == [(1, "random"), (8, "random"), (8, "sorted"), (9, "random"), (9, "sorted")]
    assert shown[1, "random"]["padded_share"] == 0
    assert shown[1, "random"]["calls"] == 9
    assert shown[8, "random"]["padded_share"] == pytest.approx(1 - 39 / (8 * 8 + 2))
    assert shown[8, "sorted"]["padded_share"] == pytest.approx(1 - 39 / (8 * 8 + 8))
    assert shown[9, "random"]["padded_share"] == pytest.approx(1 - 39 / 72)
    assert all(each["us_per_token"] > 0 for each in shown.values())


def test_the_table_has_a_line_for_each_way(folder):
    done = run(folder, "--lengths", "3-9", "--rounds", 1, "--threads", 1)
    assert done.exit_code == 0, done.output
    head, columns, *rows = done.stdout.splitlines()
    assert head.startswith("40 texts of 3 to 9 tokens, ")
    assert columns.split("  ")[0] == "texts in a call"
    assert [row.split()[:2] for row in rows] == [
        ["1", "random"], ["8", "random"], ["8", "sorted"], ["32", "random"], ["32", "sorted"],
    ]  # fmt: skip


def test_the_mask_has_the_real_tokens(folder, monkeypatch):
    q_model, seen = nc.load(folder), []
    forward = type(q_model).forward

    def noted(self, *args, **kwargs):
        seen.append([*args, *kwargs.values()][1])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(q_model), "forward", noted)
    lengths.measured(q_model, [2, 3, 1], 1)
    masks = {tuple(map(tuple, mask.tolist())) for mask in seen if len(mask) == 3}
    assert masks == {
        ((1, 1, 0), (1, 1, 1), (1, 0, 0)),
        ((1, 0, 0), (1, 1, 0), (1, 1, 1)),
    }


def test_models_that_take_no_texts_are_an_error(tmp_path):
    place = saved(Pictures(), (torch.randn(2, 16),), tmp_path / "m")
    done = run(place, "--lengths", "3-9")
    assert done.exit_code == 2
    assert "is for models over texts" in done.stderr


@pytest.mark.parametrize("option", ["--cores", "--instances"])
def test_ways_to_share_cores_take_a_file(folder, option):
    done = run(folder, "--lengths", "3-9", option, 1)
    assert done.exit_code == 2
    assert "expected a file with requests" in done.stderr
