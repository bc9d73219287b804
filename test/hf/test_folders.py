"""Folders of nc.hf: damaged ones are typed errors, and no code of a folder runs unless it is trusted."""

import importlib
import json
import pickle
import shutil
import sys

import pytest
import torch
from suites import at_load_models as models

import nc
from nc.errors import ArtefactCorruptError, ArtefactError, InputError, NCError, NCWarning

transformers = pytest.importorskip("transformers")
nc_hf = importlib.import_module("nc.hf")

TABLE = "nc_checksums.json"
IDS = torch.arange(3, 15).reshape(1, 12)
GIVEN = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


def tokenizer():
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds

    words = {f"w{i}" if i > 2 else ("[PAD]", "[UNK]", "[SEP]")[i]: i for i in range(models.WORDS)}
    made = Tokenizer(kinds.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=64, **special)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("hf") / "out"
    sizes = {**models.SHORT, "num_hidden_layers": 1, "hidden_size": 32}
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    texts = [" ".join(f"w{(3 + i * j) % 90 + 3}" for j in range(4, 12)) for i in range(4)]
    config = nc.StaticQuantConfig(post=())
    nc_hf.quantize(model, texts, out, config, processor=tokenizer(), measure=False)
    return out


@pytest.fixture
def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def beside(folder):
    """Files that are not the artefact's."""
    return sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != TABLE)


def test_the_table_has_all_files(folder):
    listed = set(json.loads((folder / TABLE).read_text())["files"])
    assert listed == {*beside(folder), "nc/checksums.json"}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= listed


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "null": lambda path: path.write_text("null"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "a bit": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "empty": lambda path: path.write_bytes(b""),
    "a number": lambda path: path.write_text('{"hidden_size": 1e400, "vocab_size": "many"}'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_found_before_one_is_used(copied, damage, monkeypatch):
    names = beside(copied)
    module = importlib.import_module("nc.hf.quantize")
    monkeypatch.setattr(module, "load_model", lambda *_, **__: pytest.fail("a file was used"))
    for name in (*names, "nc/checksums.json"):
        kept = (copied / name).read_bytes()
        DAMAGE[damage](copied / name)
        with pytest.raises(ArtefactError if damage == "missing" else ArtefactCorruptError):
            nc_hf.load(copied)
        (copied / name).write_bytes(kept)


@pytest.mark.parametrize("damage", [each for each in DAMAGE if each != "missing"])
def test_a_damaged_table(copied, damage):
    DAMAGE[damage](copied / TABLE)
    with pytest.raises(ArtefactCorruptError):
        nc_hf.load(copied)


def test_a_table_that_names_other_places_or_is_newer(copied):
    table = json.loads((copied / TABLE).read_text())
    for change in ({"schema": 2}, {"files": {"../x": {}}}, {"files": {"/etc/passwd": {}}}, {"files": [3]}):
        (copied / TABLE).write_text(json.dumps({**table, **change}, indent=1, sort_keys=True) + "\n")
        with pytest.raises(ArtefactError):
            nc_hf.load(copied)


def test_older_folders_load_with_a_notice_and_others_files_are_fine(copied):
    (copied / "README.md").write_text("mine")
    expected = nc_hf.load(copied)(**GIVEN).last_hidden_state
    (copied / TABLE).unlink()
    with pytest.warns(NCWarning, match="has no nc_checksums"):
        assert torch.equal(nc_hf.load(copied)(**GIVEN).last_hidden_state, expected)


@pytest.mark.parametrize("damage", [each for each in DAMAGE if each != "a bit"])
def test_damaged_older_folders_are_typed_errors(copied, damage):
    (copied / TABLE).unlink()
    DAMAGE[damage](copied / "config.json")
    with pytest.warns(NCWarning) if damage != "missing" else pytest.raises(ArtefactError):
        try:
            nc_hf.load(copied)
        except ArtefactError:
            if damage == "missing":
                raise


@pytest.mark.parametrize("lengths", [16, "16", [0], [True], None, [1e400]])
def test_lengths_of_another_kind(folder, lengths):
    with pytest.raises(InputError, match="numbers of tokens"):
        nc_hf.load(folder, lengths=lengths)


@pytest.mark.parametrize("warm", [16, None, [3]])
def test_sizes_of_another_kind(folder, warm):
    with pytest.raises(InputError, match="warm: expected"):
        nc_hf.load(folder, warm=warm)


def test_another_model_in_the_place_of_the_one_that_was_pickled(copied):
    stored = pickle.dumps(nc_hf.load(copied))
    assert torch.equal(
        pickle.loads(stored)(**GIVEN).last_hidden_state, nc_hf.load(copied)(**GIVEN).last_hidden_state
    )
    sums = copied / "nc" / "checksums.json"
    sums.write_text(sums.read_text() + "\n")
    with pytest.raises(ArtefactError, match="holds another model"):
        pickle.loads(stored)


def test_verify_reaches_load(folder, monkeypatch):
    given = []
    load = importlib.import_module("nc.hf.model").load

    def noted(place, **options):
        given.append(options)
        return load(place, **options)

    monkeypatch.setattr("nc.hf.model.load", noted)
    nc_hf.load(folder, verify="off", verify_sizes=False)
    nc_hf.load(folder, padding="computed")
    assert given == [
        {"verify": "off", "verify_sizes": False, "padding": "skipped"},
        {"verify": "raise", "verify_sizes": True, "padding": "computed"},
    ]


def test_a_quantized_model_is_not_pushed(folder, tmp_path):
    model = nc_hf.load(folder)
    for push in (lambda: model.push_to_hub("x/y"), lambda: model.save_pretrained(tmp_path, push_to_hub=True)):
        with pytest.raises(NCError, match="upload_folder"):
            push()
    assert not list(tmp_path.iterdir())


CODE = """
from transformers import PretrainedConfig
import pathlib
pathlib.Path({mark!r}).write_text("ran")
class Mine(PretrainedConfig):
    model_type = "mine"
"""


def with_code(copied, mark):
    """A folder whose configuration is of no known type, and names code in the folder."""
    settings = json.loads((copied / "config.json").read_text())
    settings |= {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}}
    (copied / "config.json").write_text(json.dumps(settings))
    (copied / "configuration_mine.py").write_text(CODE.format(mark=str(mark)))
    importlib.import_module("nc.hf.checksums").write(copied)
    return copied


@pytest.mark.once  # transformers 4 remembers the folder that the first code of a process came from
def test_code_of_a_folder_runs_only_if_it_is_trusted(copied, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)  # of a test before, with another folder
    mark = tmp_path / "mark"
    with_code(copied, mark)
    for call in (
        lambda: nc_hf.load(copied),
        lambda: nc_hf.quantize(copied, ["w3 w4"], tmp_path / "out", measure=False),
    ):
        with pytest.raises(ArtefactError, match="give trust_remote_code=True"):
            call()
    assert not mark.exists()
    assert nc_hf.load(copied, trust_remote_code=True).config.model_type == "mine"
    assert mark.read_text() == "ran"


def test_choices_are_not_taken_for_the_length(tmp_path):
    name = "BertForMultipleChoice"
    model = models.build(name)
    ids = torch.randint(3, models.WORDS, (2, 3, 20))
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for _ in range(4)]
    config = nc.StaticQuantConfig(post=())
    found = nc_hf.quantize(model, batches, tmp_path / "out", config, measure=False)
    asked, forward = [], type(found.quantized).forward

    class Noted(type(found.quantized)):
        def forward(self, **given):
            asked.append(tuple(given["input_ids"].shape))
            return forward(self, **given)

    found.quantized.__class__ = Noted
    given = {**batches[0]}
    with torch.no_grad():
        logits = found(**given).logits
        again = found(**given).logits
        expected = model(**given).logits
    assert asked[:2] == [(2, 3, 20), (2, 3, 32)]
    assert logits.shape == again.shape == expected.shape
    assert nc.numerics.metrics.sqnr_db(expected, again) > 15
    loaded = nc_hf.load(tmp_path / "out", lengths=[24])
    assert loaded(**given).logits.shape == (2, 3)


sentences = pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None, reason="sentence-transformers is not installed"
)


@pytest.fixture(scope="module")
def sentence_folder(folder, tmp_path_factory):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    floats, out = tmp_path_factory.mktemp("floats"), tmp_path_factory.mktemp("st") / "out"
    torch.manual_seed(0)
    sizes = {**models.SHORT, "num_hidden_layers": 1, "hidden_size": 32}
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(floats)
    tokenizer().save_pretrained(floats)
    modules = [Transformer(str(floats)), Pooling(32), Dense(32, 8, activation_function=torch.nn.Tanh())]
    model = SentenceTransformer(modules=modules, device="cpu")
    texts = [" ".join(f"w{(3 + i * j) % 90 + 3}" for j in range(4, 12)) for i in range(4)]
    config = nc.StaticQuantConfig(post=())
    nc_hf.quantize_sentence_transformer(model, texts, out, config, measure=False)
    return out


@sentences
def test_damaged_files_of_sentence_encoders(sentence_folder, tmp_path):
    copied = shutil.copytree(sentence_folder, tmp_path / "copy")
    listed = json.loads((copied / TABLE).read_text())["files"]
    assert {"tokenizer.json", "1_Pooling/config.json", "2_Dense/model.safetensors", "modules.json"} <= set(
        listed
    )
    for index, name in enumerate(sorted(listed)):
        kept = (copied / name).read_bytes()
        damage = list(DAMAGE)[index % len(DAMAGE)]
        DAMAGE[damage](copied / name)
        with pytest.raises(ArtefactError):
            nc_hf.load_sentence_transformer(copied)
        (copied / name).write_bytes(kept)
    found = nc_hf.load_sentence_transformer(copied, verify="off", verify_sizes=False, lengths=[16])
    assert found.encode(["w5 w6"]).shape == (1, 8)


@sentences
@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("modules.json", [{"type": "evil.Kind", "path": ""}]),
        ("modules.json", [{"type": "sentence_transformers.util.torch", "path": ""}]),
        ("modules.json", [{"type": "sentence_transformers.util.import_from_string", "path": ""}]),
        ("modules.json", [{"type": "sentence_transformers..x", "path": ""}]),
        ("modules.json", [{"type": "sentence_transformers.models.Pooling", "path": "../../.."}]),
        ("modules.json", []),
        ("2_Dense/config.json", {"activation_function": "os.getcwd"}),
        ("2_Dense/config.json", {"activation_function": "torch.hub.list"}),
        ("1_Pooling/router_config.json", {"types": {"a": "evil.Kind"}, "structure": {}}),
        ("1_Pooling/config.json", None),
        ("sentence_bert_config.json", 3),
    ],
)
def test_names_and_places_in_older_sentence_encoders(sentence_folder, tmp_path, file, change, monkeypatch):
    """Without a table, so that others are asked."""
    copied = shutil.copytree(sentence_folder, tmp_path / "copy")
    (copied / TABLE).unlink()
    (copied / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    monkeypatch.syspath_prepend(str(copied))
    path = copied / file
    old = json.loads(path.read_text()) if path.is_file() else {}
    new = {**old, **change} if isinstance(change, dict) else change
    path.write_text(json.dumps(new))
    with pytest.warns(NCWarning, match="has no nc_checksums"), pytest.raises(ArtefactError):
        nc_hf.load_sentence_transformer(copied)
    assert not (tmp_path / "mark").exists()
