"""Every public function that takes a path to write: what is there and not of nc stays, byte for byte."""

import contextlib
import dataclasses
import inspect
import re
import resource
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch
import transformers
from click.testing import CliRunner
from models import MLP, prepared_for, quantized

import nc
import nc.hf
import nc.interchange
from nc.api.quantized import QuantizedModel
from nc.calibration.statistics import Statistics
from nc.cli.main import main
from nc.config.document import Document
from nc.hf.model import QuantizedTransformer
from nc.reports.report import Report
from nc.storage.marks import mark, program
from nc.tuning.choices import Choices, Taken
from nc.tuning.front import Front, FrontPoint
from nc.tuning.trials import Result, Trials
from nc.weights.saved_calls import RecordedCalls

#: Files do not depend on torch; OpenVINO is not beside each.
pytestmark = pytest.mark.once

X = torch.randn(4, 16)
RESULT = Result(metric=0.9, sqnr_db=31.5, fp32_ratio=2.0, ms=1.5, spread=(1.9, 2.1), weight_bytes=100)
FRONT = Front(
    measured=(FrontPoint(name="fp32", config=nc.StaticQuantConfig.all_float(), result=RESULT, drop=0.0),)
)
KEY = {"model": "a"}


@pytest.fixture(scope="module")
def made():
    """What is written: a quantized graph, low-bit weights, statistics, an artefact."""
    torch.manual_seed(0)
    low_bit = nc.quantize(MLP().eval(), nc.WeightOnlyConfig("int8", group_size=-1), measure=False)
    prepared = prepared_for(MLP(), X)
    calls = nc.prepare(MLP().eval(), nc.WeightOnlyConfig("int8", group_size=-1))
    calls(X)
    return Made(quantized(MLP().eval(), X, None, "reference"), low_bit, prepared, calls)


@dataclasses.dataclass
class Made:
    graph: QuantizedModel
    low_bit: torch.nn.Module
    prepared: torch.nn.Module
    calls: torch.nn.Module


def command(*words):
    """Run a command; its error is that of an NCError."""
    done = CliRunner().invoke(main, [*map(str, words)], catch_exceptions=False)
    if done.exit_code:
        raise nc.NCError(done.output)


def with_artefact(made, path, *words):
    folder = path.parent.parent / "of the command"
    nc.save(made.graph, folder)
    command(words[0], folder, "--no-profile", *words[1:], path)


def cached(_, path):
    choices = Choices(path)
    choices.find(KEY)
    choices.keep(KEY, Taken(None, "why"))


def tried(_, path):
    trials = Trials(path)
    trials.find(KEY)
    trials.keep(KEY, RESULT)


def checked(made, path):
    """`nc check --html`, without what it measures: the same call writes the page."""
    from nc.cli import check

    assert "write_text(page, text, marks.page)" in inspect.getsource(check)
    made.graph.report().save(path)


def saved_transformer(made, path):
    QuantizedTransformer(made.graph, transformers.BertConfig()).save_pretrained(path)


@dataclasses.dataclass(frozen=True)
class Writer:
    """How a function writes.

    Attributes:
        write: (what is written, path).
        name: of the file or folder.
        folder: it writes a folder.
        document: the file in it that has the schema.
        schema: the text of a newer schema in the place of today's; "" where files have none.
        cheap: it can be called as a whole here; others are only refused.
        says: what an error says, where it does not name the path.
        keeps: a damaged file is kept under another name, or stays, with a warning instead of an error.
    """

    write: Callable[[Made, Path], object]
    name: str
    folder: bool = False
    document: str = "model.json"
    schema: tuple[str, str] = ("", "")
    cheap: bool = True
    keeps: bool = False
    says: str = ""


def _of_model(name, suffix, **fields):
    return Writer(lambda made, path: getattr(nc, name)(made.graph, path), f"m{suffix}", **fields)


WRITERS = {
    "nc.save": Writer(
        lambda made, path: nc.save(made.graph, path), "m", folder=True, schema=('"schema": 1', '"schema": 2')
    ),
    "nc.save, low-bit": Writer(
        lambda made, path: nc.save(made.low_bit, path),
        "m",
        folder=True,
        schema=('"schema": 1', '"schema": 2'),
    ),
    "QuantizedModel.save": Writer(lambda made, path: made.graph.save(path), "m", folder=True),
    "Report.save": Writer(lambda made, path: made.graph.report().save(path), "r.html"),
    "Report.save, json": Writer(
        lambda made, path: made.graph.report().save(path), "r.json", schema=('"schema": 1', '"schema": 2')
    ),
    "Front.save": Writer(lambda _, path: FRONT.save(path), "f.html"),
    "Front.save, json": Writer(
        lambda _, path: FRONT.save(path), "f.json", schema=('"schema": 1', '"schema": 2')
    ),
    "Statistics.save": Writer(
        lambda made, path: made.prepared.statistics.save(path),
        "s.safetensors",
        schema=(r"\"schema_version\": ", r"\"schema_version\": 9"),
    ),
    "RecordedCalls.save": Writer(
        lambda made, path: made.calls.statistics.save(path),
        "c.safetensors",
        schema=(r"\"schema_version\": ", r"\"schema_version\": 9"),
    ),
    "Document.to_json_file": Writer(
        lambda _, path: nc.StaticQuantConfig().to_json_file(path),
        "c.json",
        schema=('"schema_version": 1', '"schema_version": 2'),
    ),
    "nc.export_weights": Writer(
        lambda made, path: nc.export_weights(made.low_bit, path), "w", folder=True, cheap=False
    ),
    "nc.export_weights, gguf": Writer(
        lambda _, path: nc.interchange.write_gguf(path, {"w": torch.zeros(2, 32)}), "w.gguf"
    ),
    "nc.interchange.write_gguf": Writer(
        lambda _, path: nc.interchange.write_gguf(path, {"w": torch.zeros(2, 32)}), "w.gguf"
    ),
    "nc.export_model": Writer(
        lambda made, path: nc.export_model(made.graph, path, "openvino", verify="off"), "m.xml"
    ),
    "nc.export_openvino": _of_model("export_openvino", ".xml", cheap=False),
    "nc.export_onnx": _of_model("export_onnx", ".onnx", cheap=False),
    "nc.export_pt2": _of_model("export_pt2", ".pt2", cheap=False),
    "nc.export_torchscript": _of_model(
        "export_torchscript", ".pt", cheap=False, says="has no form 'torchscript'"
    ),
    "nc.export_runner": Writer(
        lambda made, path: nc.export_runner(made.graph, path),
        "m",
        folder=True,
        document="plan.json",
        schema=('"schema": 1', '"schema": 2'),
    ),
    "nc.autoquant": Writer(cached, "cache.json", schema=('"schema": 1', '"schema": 2'), keeps=True),
    "nc.tune": Writer(tried, "trials", folder=True, cheap=False),
    "nc.hf.quantize": Writer(lambda _, path: nc.hf.quantize(None, [], path), "h", folder=True, cheap=False),
    "nc.hf.quantize_sentence_transformer": Writer(
        lambda _, path: nc.hf.quantize_sentence_transformer(None, ["a"], path), "h", folder=True, cheap=False
    ),
    "nc.hf.export": Writer(
        lambda _, path: nc.hf.export("x", path, "compressed-tensors"), "h", folder=True, cheap=False
    ),
    "QuantizedTransformer.save_pretrained": Writer(saved_transformer, "h", folder=True, cheap=False),
    "nc report --html": Writer(lambda made, path: with_artefact(made, path, "report", "--html"), "r.html"),
    "nc report --model-explorer": Writer(
        lambda made, path: with_artefact(made, path, "report", "--model-explorer"), "n.json"
    ),
    "nc check --html": Writer(checked, "k.html"),
    "nc quantize --out": Writer(
        lambda _, path: command("quantize", "none:none", "--out", path), "o", folder=True, cheap=False
    ),
}
#: Parameters with paths that are only read.
READERS = {
    "nc.load",
    "nc.hf.load",
    "nc.hf.load_sentence_transformer",
    "nc.import_weights",
    "nc.interchange.import_weights",
    "nc.interchange.read_weights",
    "Statistics.load",
    "Statistics.merge",
    "RecordedCalls.load",
    "RecordedCalls.merge",
    "Document.from_json_file",
}
#: Names under which a function of the table is found, too.
ALSO = {"nc.interchange.export_weights": "nc.export_weights"}
CHEAP = [name for name, writer in WRITERS.items() if writer.cheap]
FILES = [name for name, writer in WRITERS.items() if not writer.folder]
FOLDERS = [name for name, writer in WRITERS.items() if writer.folder]


def _takes_path(function):
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any("Path" in str(p.annotation) for p in parameters)


def _public():
    """Return the names of all public functions, methods and options that take a path."""
    classes = {QuantizedModel, Report, Statistics, RecordedCalls, QuantizedTransformer, Document}
    for module in (nc, nc.hf, nc.interchange):
        for name in dir(module):  # not vars: names are imported when they are used
            if name.startswith("_"):
                continue
            value = getattr(module, name)
            if inspect.isclass(value):
                classes.add(value)
            elif inspect.isfunction(value) and _takes_path(value):
                yield f"{module.__name__}.{name}"
    for kind in classes:
        for name, value in inspect.getmembers(kind, inspect.isroutine):
            ours = (getattr(value, "__module__", "") or "").startswith("nc")
            if ours and not name.startswith("_") and _takes_path(value):
                yield value.__qualname__
    for name, part in main.commands.items():
        for option in part.params:
            new = isinstance(option.type, click.Path) and not option.type.exists
            if isinstance(option, click.Option) and new and option.name != "baseline":
                yield f"nc {name} {option.opts[0]}"


def test_no_function_is_missing_from_the_table():
    found = {ALSO.get(name, name) for name in _public()}
    assert found == {re.sub(",.*", "", name) for name in WRITERS} | READERS


def content(path):
    """Return all that is below a path, without following links."""
    found = {}
    for each in sorted((path, *path.rglob("*"))):
        if each.is_symlink():
            found[each] = each.readlink()
        elif each.is_file():
            found[each] = each.read_bytes()
        else:
            found[each] = None
    return found


def refuse(writer, made, path, folder):
    """Call a writer; it must refuse with an error that names the path, or pass over it with a warning."""
    before, says = content(folder), writer.says or f"{path.stem}|/mine'"
    if writer.keeps:
        with warnings.catch_warnings():
            warnings.simplefilter("error", nc.NCWarning)
            with pytest.raises((nc.NCError, nc.NCWarning), match=says):
                writer.write(made, path)
        with warnings.catch_warnings(), contextlib.suppress(nc.NCError):
            warnings.simplefilter("ignore", nc.NCWarning)
            writer.write(made, path)
    else:
        with pytest.raises(nc.NCError, match=says):
            writer.write(made, path)
    assert content(folder) == before


@pytest.fixture
def place(tmp_path):
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


@pytest.mark.parametrize("text", [b"mine", b"", b'{"name": "mine"}', b"<!doctype html><title>mine</title>"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_file_of_the_user_stays(name, text, made, place):
    path = place / WRITERS[name].name
    path.write_bytes(text)
    refuse(WRITERS[name], made, path, place)


def _notes(folder):
    (folder / "notes.txt").write_text("mine")


def _looks_alike(folder):
    """The user's own folder of a model, with names that nc uses too."""
    (folder / "nc").mkdir()
    (folder / "nc" / "thesis.tex").write_text("mine")
    for name in ("config.json", "modules.json", "nc_export.json", "model.json", "job.json"):
        (folder / name).write_text('{"format": "mine"}')
    (folder / "model.safetensors").write_bytes(b"mine")


@pytest.mark.parametrize("make", [_notes, _looks_alike])
@pytest.mark.parametrize("name", [name for name in FOLDERS if name != "nc.tune"])
def test_a_folder_of_the_user_stays(name, make, made, place):
    path = place / WRITERS[name].name
    path.mkdir()
    make(path)
    if make is _notes and "export_weights" in name:
        pytest.skip("files of weights go beside others that are no weights")
    if make is _notes and "save_pretrained" in name:
        pytest.skip("transformers' models are saved beside their tokenizers")
    refuse(WRITERS[name], made, path, place)


@pytest.mark.parametrize("name", FILES)
def test_a_folder_in_the_place_of_a_file_stays(name, made, place):
    path = place / WRITERS[name].name
    path.mkdir()
    _notes(path)
    refuse(WRITERS[name], made, path, place)


@pytest.mark.parametrize("leads", ["to a file of the user", "nowhere", "to itself"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_link_stays_and_what_it_leads_to(name, leads, made, place):
    if name == "nc.tune" and leads == "nowhere":
        pytest.skip("a folder is made there, as mkdir does")
    path, other = place / WRITERS[name].name, place / "mine"
    if leads == "to a file of the user":
        other.write_text("mine")
    path.symlink_to(path if leads == "to itself" else other)
    refuse(WRITERS[name], made, path, place)


@pytest.mark.parametrize("name", CHEAP)
def test_an_earlier_result_is_replaced_through_a_link_too(name, made, place, tmp_path):
    writer, link = WRITERS[name], place / WRITERS[name].name
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / writer.name
    writer.write(made, real)
    first = content(tmp_path / "real")
    link.symlink_to(real)
    if name in ("nc.export_model",):
        return  # several files that stay side by side: refused, see test_openvino
    writer.write(made, link)
    assert link.is_symlink()
    assert content(tmp_path / "real").keys() == first.keys()
    assert [path.name for path in place.iterdir()] == [link.name]


@pytest.mark.parametrize("name", [name for name in CHEAP if WRITERS[name].schema[0]])
def test_a_result_of_a_newer_nc_stays(name, made, place):
    writer, path = WRITERS[name], place / WRITERS[name].name
    writer.write(made, path)
    today, newer = (text.encode() for text in writer.schema)
    file = path / writer.document if writer.folder else path
    data = file.read_bytes()
    assert today in data
    changed = data.replace(today, newer, 1)
    if file.suffix == ".safetensors":  # its header has its length in front, and spaces behind it
        length = int.from_bytes(data[:8], "little") + len(changed) - len(data)
        changed = length.to_bytes(8, "little") + changed[8:]
    file.write_bytes(changed)
    refuse(writer, made, path, place)


#: Pages and programs have their marks at one end, and artefacts in two files: half of one can be known.
_KNOWN_BY_HALF = {"nc.save", "nc.save, low-bit", "QuantizedModel.save", "nc.export_runner"}


@pytest.mark.parametrize("part", [0.0, 0.5])
@pytest.mark.parametrize("name", [name for name in CHEAP if name not in _KNOWN_BY_HALF])
def test_a_damaged_file_is_refused_or_replaced_as_a_whole(name, part, made, place):
    writer, path = WRITERS[name], place / WRITERS[name].name
    writer.write(made, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(part * len(whole))])
    damaged = content(place)
    try:
        writer.write(made, path)
    except nc.NCError as error:
        assert path.name in str(error)
        assert content(place) == damaged
    else:
        assert len(path.read_bytes()) == len(whole) or writer.keeps


@contextlib.contextmanager
def full_disk(size):
    """Let no file grow beyond a size, as where a disk or a quota has no more."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("name", [name for name in CHEAP if not name.startswith("nc report")])
def test_a_full_disk_leaves_what_was_there(name, there, made, place):
    writer, path = WRITERS[name], place / WRITERS[name].name
    if there:
        writer.write(made, path)
    before = content(place)
    with full_disk(20), pytest.raises(nc.ArtefactWriteError, match=path.stem):
        writer.write(made, path)
    assert content(place) == before


@pytest.mark.parametrize("failing", ["mkdir", "open", "replace"])
@pytest.mark.parametrize("name", [name for name in CHEAP if not name.startswith("nc report")])
def test_a_folder_that_can_not_be_written_leaves_what_was_there(name, failing, made, place, monkeypatch):
    """Permissions don't bind root, so the system's answer is made here."""
    writer, path = WRITERS[name], place / "new" / WRITERS[name].name
    if failing == "mkdir" and name.startswith("Front.save"):
        pytest.skip("a front is written into a folder that is there")
    if failing != "mkdir":
        path.parent.mkdir()
    before = content(place)

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    if failing == "open":
        monkeypatch.setattr("nc.storage.atomic.flush", refused)
    else:
        real = getattr(Path, failing)
        monkeypatch.setattr(
            Path, failing, lambda self, *a, **k: refused() if place in self.parents else real(self, *a, **k)
        )
        monkeypatch.setattr(
            Path,
            "rename",
            lambda self, *a: refused() if failing == "replace" and place in self.parents else None,
        )
    with pytest.raises(nc.ArtefactWriteError, match=path.stem):
        writer.write(made, path)
    monkeypatch.undo()
    assert content(place) == before


def test_a_program_is_known_by_its_mark(tmp_path):
    """Of all formats, also of those whose writers are not called here."""
    for suffix in (".xml", ".onnx", ".pt2"):
        path = tmp_path / f"m{suffix}"
        if suffix == ".pt2":
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("a", "b")
        else:
            path.write_bytes(b"<net/>" if suffix == ".xml" else b"\x08\x0a")
        assert not program(path)
        mark(path)
        assert program(path)
    with zipfile.ZipFile(tmp_path / "m.pt2") as archive:
        assert archive.testzip() is None
        assert archive.read("a") == b"b"
        assert archive.comment.startswith(b"written by nc")
