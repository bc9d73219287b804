"""Save and load: what comes back, what is refused, and what is left on the disk."""

import collections
import concurrent.futures
import dataclasses
import fcntl
import importlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from models import FP32, Function, ResidualCNN, call, quantized, worst_db
from suites.artefacts import FILES, forge
from torch import nn
from torch.utils import _pytree as pytree

import nc.backends
from nc import (
    ArtefactCorruptError,
    ArtefactError,
    ArtefactMissingError,
    ArtefactOperatorError,
    ArtefactSchemaError,
    InputError,
    StateError,
    UnknownBackendError,
    UnsupportedError,
    export_torchscript,
    load,
    ops,
    save,
)
from nc.backends.base import EngineModel, Exporter, Option, write_script
from nc.backends.reference import ReferenceBackend
from nc.backends.torchscript import _SIZE_OPS
from nc.graph.qdq import QDQGraph
from nc.graph.tensor_meta import TENSORS, Size, Traced, hint_of, strided
from nc.kernels import cpu
from nc.process.warn import warn
from nc.storage import allowlist, store
from nc.storage.graph_json import _decode_value
from nc.storage.pytree_json import OutputDict

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 50,
    "max_position_embeddings": 32,
}
Pair = collections.namedtuple("Pair", "logits, hidden")


@pytest.fixture(scope="module")
def cnn():
    torch.manual_seed(0)
    return quantized(ResidualCNN(), torch.randn(2, 3, 8, 8))


@pytest.fixture(scope="module")
def saved(cnn, tmp_path_factory):
    save(cnn, tmp_path_factory.mktemp("saved") / "cnn")
    return next(tmp_path_factory.getbasetemp().glob("saved*/cnn"))


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "cnn"))


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def node(document, op):
    return next(n for n in document["nodes"] if n["op"] == op)


def assert_same(expected, got):
    """The same structure and the same bits."""
    assert pytree.tree_structure(expected) == pytree.tree_structure(got)
    for a, b in zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def assert_same_nodes(before, after):
    """Names, calls, and what is known of values: free sizes must not become those of the example."""
    free = {}, {}
    for ours, theirs in zip(before.graph.nodes, after.graph.nodes, strict=True):
        assert (ours.name, ours.op, ours.target) == (theirs.name, theirs.op, theirs.target)
        for key in ("operator", "kind", "fqn"):
            assert ours.meta.get(key) == theirs.meta.get(key)
        assert known(ours.meta.get("val"), free[0]) == known(theirs.meta.get("val"), free[1])
    return free[1]


def known(value, free):
    """(dtype, sizes) of the tensors in a traced value.

    A free size is its number in order of appearance, as text.
    """

    def size(s):
        fixed = s.node.maybe_as_int() if isinstance(s, torch.SymInt) else s
        return fixed if isinstance(fixed, int) else free.setdefault(str(s), str(len(free)))

    tensors = [v for v in pytree.tree_leaves(value) if isinstance(v, TENSORS)]
    return [(t.dtype, [size(s) for s in t.shape]) for t in tensors]


def round_trip(q_model, folder, inputs):
    save(q_model, folder)
    loaded = load(folder, backend="reference")
    assert_same(call(q_model, inputs), call(loaded, inputs))
    return loaded


# --- what comes back ---


def test_a_cnn_comes_back_bit_for_bit(cnn, tmp_path):
    loaded = round_trip(cnn, tmp_path / "m", torch.randn(2, 3, 8, 8))
    x = torch.randn(5, 3, 8, 8)
    assert_same(cnn(x), loaded(x))
    assert loaded.report().to_dict() == cnn.report().to_dict()
    plain = {f.name for f in dataclasses.fields(QDQGraph)} - {
        "module",
        "signature",
        "example",
        "expected",
        "intact",
    }
    assert {n: getattr(loaded.graph, n) for n in plain} == {n: getattr(cnn.graph, n) for n in plain}
    assert_same_nodes(cnn.graph.module, loaded.graph.module)
    # matrix kernels may round differently where memory is not aligned as torch aligns it
    assert not [n for n, t in loaded.graph.module.named_buffers() if t.data_ptr() % 64]


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.fc(x).sum(1) / x.shape[1],
        lambda self, x: self.fc(x) * (x.shape[1] * x.shape[0]) ** -0.5,
        lambda self, x: self.fc(x) + x.shape[1] // 2,
        lambda self, x: x.shape[0] - self.fc(x),
    ],
)
def test_numbers_made_of_sizes_are_taken_where_a_tensor_could_be(forward, backend, tmp_path):
    x = torch.randn(3, 5, 8)
    q = quantized(Function(forward, fc=nn.Linear(8, 8)), x)
    q.save(tmp_path / "m")
    loaded = load(tmp_path / "m", backend=backend)
    for size in ((3, 5, 8), (2, 9, 8)):
        y = torch.randn(size)
        assert worst_db(q(y), loaded(y)) > 35


def test_what_load_would_refuse_is_not_saved(tmp_path):
    q = quantized(nn.Linear(8, 8).eval(), torch.randn(2, 8))
    (node,) = (n for n in q.graph.module.graph.nodes if n.target is torch.ops.aten.linear.default)
    node.args = (*node.args[:2], "bias")
    with pytest.raises(
        ArtefactError,
        match=r"Node 'linear' can't be stored: aten\.linear\.default: argument 'bias' should be",
    ):
        q.save(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_what_is_known_of_several_values_comes_back(tmp_path):
    def forward(self, x):
        left, right = self.fc(x).chunk(2, 2)
        return left @ right.transpose(1, 2)

    x = torch.randn(2, 5, 8)
    q_model = quantized(Function(forward, fc=nn.Linear(8, 8)), x)
    loaded = round_trip(q_model, tmp_path / "m", x)
    assert len(assert_same_nodes(q_model.graph.module, loaded.graph.module)) == 2
    chunk = next(n for n in loaded.graph.module.graph.nodes if n.name == "chunk")
    assert known(chunk.meta["val"], {}) == [(torch.float32, ["0", "1", 4])] * 2


def test_free_sizes_stay_free_and_apart():
    sizes = {
        name: Size(name, hint) for name, hint in {"n0": 1, "n1": 1, "n2": 0, "n3": None}.items()
    }  # None: depends on data
    value = _decode_value({"dtype": "bfloat16", "shape": ["n0", "n1", "n2", "n3", 4]}, sizes)
    assert known(value, {}) == [(torch.bfloat16, ["0", "1", "2", "3", 4])]
    assert [hint_of(s) for s in value.shape] == [1, 1, 0, None, 4]
    assert _decode_value([None, {"dtype": "bool", "shape": ["n0"]}], sizes)[1].shape[0] == value.shape[0]


def test_every_second_slice_of_what_is_known():
    free = Size("n0", 5)
    for val, sizes in (
        (Traced(torch.float32, (2, free, 7)), [(2, 3, 7), (2, 5, 4)]),
        (torch.empty(2, 5, 7), [(2, 3, 7), (2, 5, 4)]),
    ):
        assert [tuple(map(hint_of, strided(val, dim, 2).shape)) for dim in (1, 2)] == sizes
    assert strided(Traced(torch.float32, (free,)), 0, 2).shape[0] != free


def test_saving_a_loaded_model_gives_the_same_bytes(cnn, saved, tmp_path):
    load(saved, backend="reference").save(tmp_path / "again")
    save(cnn, str(tmp_path / "deep" / "er" / "twice"))
    assert content(saved) == content(tmp_path / "again") == content(tmp_path / "deep" / "er" / "twice")


def test_bert_returns_its_own_class(tmp_path):
    ids = torch.arange(12).reshape(2, 6)
    model = transformers.BertModel(transformers.BertConfig(**TINY))
    loaded = round_trip(quantized(model, {"input_ids": ids}), tmp_path / "m", {"input_ids": ids})
    assert (
        type(loaded(input_ids=ids))
        is transformers.modeling_outputs.BaseModelOutputWithPoolingAndCrossAttentions
    )
    versions = json.loads((tmp_path / "m" / "model.json").read_text())["versions"]
    assert versions["transformers"] == transformers.__version__
    assert versions["torch"] == torch.__version__


def test_without_transformers_outputs_are_a_dict_with_attributes(tmp_path, monkeypatch):
    ids = torch.arange(12).reshape(2, 6)
    q_model = quantized(transformers.BertModel(transformers.BertConfig(**TINY)), {"input_ids": ids})
    save(q_model, tmp_path / "m")
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    out, expected = load(tmp_path / "m", backend="reference")(input_ids=ids), q_model(input_ids=ids)
    assert type(out) is OutputDict
    assert list(out) == list(expected)
    assert torch.equal(out.last_hidden_state, expected.last_hidden_state)
    assert out[0] is out["last_hidden_state"] is out.to_tuple()[0]
    with pytest.raises(
        AttributeError, match="no member 'logits'; they have last_hidden_state, pooler_output"
    ):
        _ = out.logits
    assert_same(out, pytree.tree_map(lambda t: t, out))


def test_a_key_value_cache_comes_back(tmp_path, monkeypatch):
    ids = {"input_ids": torch.arange(12).reshape(2, 6)}
    q_model = quantized(transformers.LlamaModel(transformers.LlamaConfig(**TINY)), ids)
    loaded = round_trip(q_model, tmp_path / "m", ids)
    assert type(loaded(**ids).past_key_values) is transformers.DynamicCache
    expected = q_model.reference(**ids).past_key_values.layers[0].keys
    monkeypatch.delitem(
        pytree.SUPPORTED_NODES, transformers.DynamicCache
    )  # as in a process that has captured nothing
    again = load(tmp_path / "m", backend="reference")(**ids).past_key_values
    assert type(again) is transformers.DynamicCache
    assert torch.equal(again.layers[0].keys, expected)
    monkeypatch.delitem(sys.modules, "transformers")  # as in a process that has not imported it
    out = load(tmp_path / "m", backend="reference")(**ids)
    name = next(name for name in ("cache", "past_key_values") if name in out)  # transformers 5.24 renamed it
    assert list(out[name]) == ["key_cache", "value_cache"]


def test_the_caches_of_an_encoder_and_a_decoder_come_back(tmp_path):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 50}
    ids = {"input_ids": torch.arange(12).reshape(2, 6), "decoder_input_ids": torch.arange(8).reshape(2, 4)}
    q_model = quantized(transformers.T5Model(transformers.T5Config(**sizes)), ids)
    cache = round_trip(q_model, tmp_path / "m", ids)(**ids).past_key_values
    assert type(cache) is transformers.EncoderDecoderCache
    assert cache.self_attention_cache.layers[0].keys.shape == (2, 4, 4, 8)
    assert cache.cross_attention_cache.layers[0].values.shape == (2, 4, 6, 8)


def _structures(self, x, extra=None, factor=2):
    y = self.fc(x)
    if extra is not None:
        y = y + extra["shift"][0] * factor
    ordered = collections.OrderedDict(b=y, a=(y.relu(),))
    return {
        "plain": y,
        3: [y * 2, (None, ordered)],
        "max": torch.max(y, 1),
        "masked": y.masked_fill(y > 0, -torch.inf),
    }, 7


def test_nested_outputs_inputs_and_constants_come_back(tmp_path):
    inputs = {"x": torch.randn(3, 8), "extra": {"shift": [torch.randn(3, 4)]}, "factor": 3}
    loaded = round_trip(quantized(Function(_structures, fc=nn.Linear(8, 4)), inputs), tmp_path / "m", inputs)
    out = loaded(inputs["x"], extra=inputs["extra"], factor=3)
    assert [type(v) for v in (out, out[0], out[0][3], out[0][3][1])] == [tuple, dict, list, tuple]
    assert out[0][3][1][0] is None
    assert type(out[0][3][1][1]) is collections.OrderedDict
    assert list(out[0][3][1][1]) == ["b", "a"]
    assert type(out[0]["max"]) is torch.return_types.max
    with pytest.raises(InputError, match="captured as the constant 3"):
        loaded(inputs["x"], extra=inputs["extra"], factor=4)


def test_a_named_tuple_comes_back_as_one_of_the_same_name(tmp_path):
    def forward(self, pair):
        return Pair(self.fc(pair.logits), pair.hidden * 2)

    x = Pair(torch.randn(3, 8), torch.randn(3))
    q_model = quantized(Function(forward, fc=nn.Linear(8, 4)), (x,))
    save(q_model, tmp_path / "m")
    out = load(tmp_path / "m", backend="reference")(tuple(x))  # the class of an input does not exist any more
    assert (type(out).__name__, out._fields) == ("Pair", ("logits", "hidden"))
    assert torch.equal(out.logits, q_model(x).logits)


def test_a_registered_dataclass_comes_back_by_name(tmp_path):
    @dataclasses.dataclass
    class Result:
        logits: torch.Tensor
        nothing: None = None

    pytree.register_dataclass(Result, field_names=["logits", "nothing"])
    q_model = quantized(Function(lambda self, x: Result(self.fc(x)), fc=nn.Linear(8, 4)), torch.randn(3, 8))
    save(q_model, tmp_path / "m")
    out = load(tmp_path / "m", backend="reference")(torch.ones(3, 8))
    assert type(out) is OutputDict
    assert torch.equal(out.logits, q_model(torch.ones(3, 8)).logits)


def test_memory_layout_survives(tmp_path):
    model = Function(lambda self, x: self.conv(x), conv=nn.Conv2d(3, 8, 3)).to(
        memory_format=torch.channels_last
    )
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    q_model = quantized(model, x, FP32)
    loaded = round_trip(q_model, tmp_path / "m", x)
    assert loaded.graph.example[0].is_contiguous(memory_format=torch.channels_last)
    before = {n: t.stride() for n, t in q_model.graph.module.named_buffers()}
    assert before == {n: t.stride() for n, t in loaded.graph.module.named_buffers()}
    assert (27, 1, 9, 3) in before.values()


def test_tied_fp32_weights_are_saved(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 8)
            self.register_buffer("view", self.table.weight.detach()[2:5])

        def forward(self, ids):
            return self.table(ids) @ self.table.weight.t(), self.view * 2

    ids = torch.arange(6).reshape(2, 3)
    prepared = nc.prepare(Tied().eval(), FP32, inplace=True, example_inputs=ids, backend="reference")
    round_trip(nc.convert(prepared), tmp_path / "m", ids)


FRESH = """
import builtins, pickle, sys, torch
for name in sys.argv[2:]:
    __import__(name)
already = set(sys.modules) if sys.argv[2:] else set()
def refuse(*args, **kwargs):
    raise AssertionError("unpickled")
torch.load = pickle.load = pickle.loads = torch.jit.load = refuse
pickle.Unpickler = type("Unpickler", (), {"__init__": refuse})  # torch has subclasses of it
import nc
model = nc.load(sys.argv[1], backend="reference")
out = model(torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8))
print(out.numpy().tobytes().hex())
assert not {"models", "transformers"} & (set(sys.modules) - already)
"""


def run_python(source, *args, **env):
    command = [sys.executable, "-c", source, *map(str, args)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_fresh_process_needs_no_model_class_and_unpickles_nothing(cnn, saved):
    expected = cnn(torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8))
    # other tests may have imported IPEX here, which brings kernels of its own for fp32: they may round
    # another way
    engine = {"intel_extension_for_pytorch"} & set(sys.modules)
    got = run_python(FRESH, saved, *engine, OMP_NUM_THREADS=str(torch.get_num_threads())).splitlines()[-1]
    assert got == expected.numpy().tobytes().hex()


SMALL_IMPORTS = """
import sys, torch, nc
model = nc.load(sys.argv[1], backend="reference")
ids = torch.arange(12).reshape(2, 6)
out = model(input_ids=ids)
model.save(sys.argv[2])
heavy = {"transformers", "torch._dynamo", "sympy"} & set(sys.modules)
import transformers
print(*heavy, type(out).__qualname__, type(model(input_ids=ids)).__qualname__)
"""


def test_loading_imports_neither_tracers_nor_transformers_whose_class_comes_with_it(tmp_path):
    """They would take longer than all else of a cold start."""
    save(
        quantized(
            transformers.BertModel(transformers.BertConfig(**TINY)),
            {"input_ids": torch.arange(12).reshape(2, 6)},
        ),
        tmp_path / "m",
    )
    words = run_python(SMALL_IMPORTS, tmp_path / "m", tmp_path / "again").split()
    assert words == ["OutputDict", "BaseModelOutputWithPoolingAndCrossAttentions"]
    assert content(tmp_path / "m") == content(tmp_path / "again")


BUILD = """
import sys, torch, nc
torch.manual_seed(0)
layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4)
model = torch.nn.Sequential(*layers).eval()
x = torch.randn(2, 3, 8, 8)
q = nc.quantize(model, nc.StaticQuantConfig(), lambda m: m(x), example_inputs=x, backend="reference")
nc.save(q, sys.argv[1])
"""


def test_two_processes_write_the_same_bytes(tmp_path):
    for seed in ("1", "2"):
        run_python(BUILD, tmp_path / seed, PYTHONHASHSEED=seed)
    assert content(tmp_path / "1") == content(tmp_path / "2")


@pytest.mark.ipex
def test_ipex_saves_loads_and_exports(tmp_path):
    x = torch.randn(2, 3, 16, 16)
    q_model = quantized(ResidualCNN(), x, backend="ipex")
    q_model.save(tmp_path / "m")
    loaded = load(tmp_path / "m", backend="ipex", isolate="never")
    assert_same(q_model(x), loaded(x))
    ran = {op.operator: op.ran for op in loaded.report().ops}
    assert ran == {op.operator: op.ran for op in q_model.report().ops}
    assert "int8" in ran.values()
    export_torchscript(loaded, tmp_path / "m.pt")
    program = torch.jit.load(str(tmp_path / "m.pt"))
    with torch.no_grad():
        outputs = [program(x) for _ in range(3)][-1]
    assert torch.allclose(outputs[0], q_model(x), atol=0.05 * float(q_model(x).abs().max()))


# --- what is refused ---


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("at", [0.0, 0.1, 0.25, 0.5, 0.77, 0.9, 1.0])
def test_one_altered_byte_is_found(folder, name, at):
    raw = bytearray((folder / name).read_bytes())
    raw[int(at * (len(raw) - 1))] ^= 0x01
    (folder / name).write_bytes(raw)
    with pytest.raises(ArtefactCorruptError, match=name):
        load(folder, backend="reference")


def test_every_altered_byte_of_the_checksums_is_found(folder):
    raw = (folder / "checksums.json").read_bytes()
    for i in range(len(raw)):
        (folder / "checksums.json").write_bytes(raw[:i] + bytes([raw[i] ^ 0x01]) + raw[i + 1 :])
        with pytest.raises(ArtefactCorruptError, match="checksums.json"):
            store.read(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "cut", [lambda raw: b"", lambda raw: raw[: len(raw) // 2], lambda raw: raw[:-1], lambda raw: raw + b"\n"]
)
def test_a_file_of_another_length_is_found(folder, name, cut):
    (folder / name).write_bytes(cut((folder / name).read_bytes()))
    with pytest.raises(ArtefactCorruptError, match=name):
        load(folder, backend="reference")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ArtefactMissingError, match=f"{name} is missing"):
        load(folder, backend="reference")


def test_a_missing_directory_is_named(tmp_path):
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        with pytest.raises(ArtefactMissingError, match=f"no directory .*{name}"):
            load(tmp_path / name, backend="reference")


def test_a_newer_schema_says_who_wrote_it(folder):
    forge(folder, lambda d: d.update(schema=99, versions={"nc": "7.1"}, nodes="of another form"))
    with pytest.raises(ArtefactSchemaError, match=r"schema 99 and is from nc 7\.1.*Upgrade nc"):
        load(folder, backend="reference")


@pytest.mark.parametrize("schema", [0, -1, None, "1", 1.5])
def test_an_impossible_schema_is_refused(folder, schema):
    forge(folder, lambda d: d.update(schema=schema))
    with pytest.raises(ArtefactSchemaError, match="schema"):
        load(folder, backend="reference")


def test_a_foreign_format_is_refused(folder):
    forge(folder, lambda d: d.update(format="onnx"))
    with pytest.raises(ArtefactSchemaError, match="got 'onnx'"):
        load(folder, backend="reference")


@pytest.mark.parametrize(
    "target",
    [
        "aten.from_file.default",
        "aten.rand.default",
        "aten._reshape_alias.default",
        "aten.linear",
        "aten.linear.__init__",
        "aten.linear.default.__class__",
        "operator.attrgetter",
        "torch.load",
        "os.system",
        "builtins.eval",
    ],
)
def test_an_operator_that_is_not_listed_is_named(folder, target):
    forge(folder, lambda d: node(d, "call_function").update(target=target))
    with pytest.raises(ArtefactOperatorError, match=f"'{target}' is not on the list"):
        allowlist.resolve(target, "n")
    with pytest.raises(ArtefactOperatorError, match=f"'{target}' is not on the list") as caught:
        store.read(folder)  # before anything is built
    assert "quantize_per_tensor" in str(caught.value)  # the node


def test_a_listed_operator_that_this_torch_lacks_is_named(folder, monkeypatch):
    monkeypatch.setattr(allowlist, "OPERATORS", allowlist.OPERATORS | {"aten.of_the_future.default"})
    forge(folder, lambda d: node(d, "call_function").update(target="aten.of_the_future.default"))
    with pytest.raises(ArtefactOperatorError, match="has no operator 'aten.of_the_future.default'"):
        load(folder, backend="reference")


def _rename(document, op, key, value):
    entry = node(document, op)
    old, entry[key] = entry.get(key), value
    if key == "name":
        text = json.dumps(document["nodes"]).replace(json.dumps({"node": old}), json.dumps({"node": value}))
        document["nodes"] = json.loads(text)


CODE = "evil=__import__('sys').exit('ran')"


@pytest.mark.parametrize(
    "change",
    [
        lambda d: _rename(d, "placeholder", "target", f"x, {CODE}"),
        lambda d: _rename(d, "placeholder", "name", CODE),
        lambda d: _rename(d, "placeholder", "name", "lambda"),
        lambda d: _rename(d, "placeholder", "args", [CODE]),
        lambda d: _rename(d, "get_attr", "target", f'"); {CODE}; ("'),
        lambda d: _rename(d, "get_attr", "target", "_buffers"),
        lambda d: _rename(d, "call_function", "name", f"y; {CODE}"),
        lambda d: _rename(d, "call_function", "name", "print"),
        lambda d: node(d, "call_function").update(kwargs={f"{CODE}, more": 1}),
        lambda d: node(d, "call_function").update(op="call_method", target="__reduce__"),
        lambda d: node(d, "call_function").update(args=[{"node": "nobody"}]),
        lambda d: node(d, "call_function").update(args=[{"object": "os.system"}]),
        lambda d: node(d, "call_function").update(value={"dtype": "float32", "shape": ["n99"]}),
        lambda d: d["nodes"].append(d["nodes"][-1]),
        lambda d: d["nodes"].pop(),
        lambda d: d.pop("plan"),
        lambda d: d.update(nodes=[]),
        lambda d: d["signature"].update(outputs={"type": "tuple", "items": ["*", "*"]}),
        lambda d: d["signature"].update(outputs={"type": "dict", "keys": ["a", "b"], "items": ["*"]}),
        lambda d: d["signature"].update(outputs={"type": "subprocess.Popen", "items": ["*"]}),
        lambda d: d["signature"].update(
            outputs={"type": "namedtuple", "name": "A", "fields": [CODE], "items": ["*"]}
        ),
        lambda d: d["signature"].update(outputs={"type": "return_type", "name": "__dict__", "items": ["*"]}),
        lambda d: d["signature"]["leaves"].clear(),
        lambda d: d["plan"]["decisions"][0].update(run="me"),
    ],
)  # fmt: skip
def test_what_nc_does_not_write_is_refused_and_not_run(folder, change):
    forge(folder, change)
    with pytest.raises(ArtefactCorruptError, match=r"model\.json: not what nc writes"):
        load(folder, backend="reference")


@pytest.mark.parametrize(
    "raw", [b"[]", b"null", b"{", b"[" * 100_000, b'{"format": "nc-model", "schema": 1}']
)
def test_a_document_of_another_form_is_refused(folder, raw):
    forge(folder, model_json=raw)
    with pytest.raises((ArtefactCorruptError, ArtefactSchemaError), match=r"model\.json"):
        load(folder, backend="reference")


def test_a_constant_with_code_for_a_name_is_refused(folder):
    tensors = safetensors.torch.load((folder / "weights.safetensors").read_bytes())
    constant = json.loads((folder / "model.json").read_text())["nodes"][0]["target"]
    name = 'a", exit(1)) or ("'  # torch.fx would write: getattr(self, "a", exit(1)) or ("")
    tensors[f"constant.{name}"] = tensors.pop(f"constant.{constant}")
    weights = safetensors.torch.save(tensors)
    forge(folder, lambda d: d["nodes"][0].update(target=name), weights_safetensors=weights)
    with pytest.raises(ArtefactCorruptError, match="is not a name"):
        load(folder, backend="reference")


class Payload:
    def __reduce__(self):
        return sys.exit, ("the pickle was loaded",)


@pytest.mark.parametrize("dump", [pickle.dumps, lambda p: _torch_save(p)], ids=["pickle", "torch.save"])
def test_a_pickle_is_not_loaded(folder, dump):
    forge(folder, weights_safetensors=dump({"constant.x": Payload()}))
    with pytest.raises(ArtefactCorruptError, match=r"weights\.safetensors: not what nc writes"):
        load(folder, backend="reference")


def _torch_save(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "name",
    [
        "subprocess.Popen",
        "nc.storage.pytree_json.OutputDict",
        "transformers.utils.generic.ModelOutput",
        "transformers.cache_utils.StaticCache",
        "transformers.modeling_outputs.BaseModelOutput",
        "transformers.modeling_outputs.BaseModelOutput.x",
        "transformers.modeling_outputs.Missing",
        "transformers.modeling_outputs.OrderedDict",
        "transformers.models.bert.modeling_bert.BertModel",
        "transformers.models.bert.modeling_tf_bert.TFBertModel",
        "transformers.models.none.modeling_none.Out",
        "transformers.models..os.modeling_x.Y",
    ],
)
def test_other_classes_are_not_looked_up(folder, name, monkeypatch):
    imported = []
    spy = types.SimpleNamespace(import_module=lambda n: imported.append(n) or importlib.import_module(n))
    monkeypatch.setattr(nc.storage.pytree_json, "importlib", spy)
    tree = {"type": "object", "name": name, "keys": ["of_no_class"], "items": ["*"]}
    forge(folder, lambda d: d["signature"].update(outputs=tree))
    assert type(load(folder, backend="reference")(torch.ones(2, 3, 8, 8))) is OutputDict
    assert set(imported) <= {
        "transformers.modeling_outputs",
        "transformers.models.bert.modeling_bert",
        "transformers.models.none.modeling_none",
    }


def test_operators_that_are_not_listed_are_not_saved(tmp_path):
    q_model = quantized(
        Function(lambda self, x: torch.special.airy_ai(self.fc(x)), fc=nn.Linear(8, 4)), torch.randn(3, 8)
    )
    with pytest.raises(
        ArtefactOperatorError, match=r"'special_airy_ai'.*'aten.special_airy_ai.default' is not on the list"
    ):
        save(q_model, tmp_path / "new" / "m")
    assert not list(tmp_path.iterdir())


def test_containers_and_constants_without_a_form_are_not_saved(tmp_path):
    q_model = quantized(
        Function(lambda self, x: collections.deque([self.fc(x)]), fc=nn.Linear(8, 4)), torch.randn(3, 8)
    )
    with pytest.raises(ArtefactError, match="outputs hold a collections.deque"):
        save(q_model, tmp_path / "m")
    weights = nn.Linear(8, 4)
    weights.register_buffer("phase", torch.ones(4, dtype=torch.complex128))
    q_model = quantized(Function(lambda self, x: self.fc(x) * self.fc.phase, fc=weights), torch.randn(3, 8))
    with pytest.raises(ArtefactError, match=r"constant.fc_phase' \(torch.complex128"):
        save(q_model, tmp_path / "m")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", [save, export_torchscript])
def test_only_quantized_models_are_saved(tmp_path, step):
    with pytest.raises(StateError, match=r"expects the result of convert\(\) or load\(\), but got Linear"):
        step(nn.Linear(2, 2), tmp_path / "m")


# --- backends ---


class Stub(ReferenceBackend):
    """An engine that relies on what the plan says, and has a TorchScript form."""

    name = "stub"
    options = {"isolate": Option(("auto", "never"))}
    exports = {"torchscript": Exporter(write_script)}

    def lower(self, graph, **options):
        self.options = options
        script = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval())
        return EngineModel(run=super().lower(graph).run, report=super().lower(graph).report, script=script)


@pytest.fixture
def stub(monkeypatch):
    backend = Stub()
    monkeypatch.setitem(nc.backends._REGISTERED, "stub", backend)
    return backend


def test_load_passes_on_how_to_verify(saved, stub):
    assert load(saved, backend="stub", verify="warn", isolate="never").backend == "stub"
    assert stub.options == {"verify": "warn", "isolate": "never"}
    with pytest.raises(UnknownBackendError, match="'nobody'"):
        load(saved, backend="nobody")


def test_missing_cpu_features_are_named(folder, stub, monkeypatch):
    forge(folder, lambda d: d["plan"].update(isa=["avx512_vnni", "avx512_bf16"]))
    monkeypatch.setattr(cpu, "machine_features", lambda: ("avx2",))
    with pytest.raises(UnsupportedError, match=r"lacks avx512_bf16 \(it has avx2\).*backend=\"reference\""):
        load(folder, backend="stub")
    assert load(folder, backend="reference").graph.plan.isa == ("avx512_vnni", "avx512_bf16")
    # how an engine sums is what its capabilities say, and this one's say nothing
    monkeypatch.setattr(cpu, "machine_features", lambda: ("avx2", "avx512_bf16"))
    assert load(folder, backend="stub").backend == "stub"


def test_export_torchscript_writes_the_engines_program(saved, stub, tmp_path, cnn):
    q_model = load(saved, backend="stub")
    for name in ("a.pt", "deep/b.pt", "a.pt"):
        export_torchscript(q_model, tmp_path / name)
    x = torch.randn(3, 4)
    assert torch.equal(torch.jit.load(str(tmp_path / "a.pt"))(x), q_model.engine.script(x))
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "deep" / "b.pt").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "deep"]
    with pytest.raises(
        UnsupportedError,
        match="Backend 'reference' has no form 'torchscript'; load or convert with backend=\"ipex\"",
    ):
        export_torchscript(cnn, tmp_path / "c.pt")


# --- what is on the disk ---


def test_files_are_as_readable_as_any_other(folder, tmp_path):
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {(tmp_path / "other").stat().st_mode & 0o777}


@pytest.mark.parametrize("damage", ["checksums.json", "model.json", "weights.safetensors", None])
def test_an_earlier_artefact_is_replaced_even_a_damaged_one(cnn, saved, folder, damage):
    forge(folder, lambda d: d.update(backend="earlier"))
    if damage:
        (folder / damage).write_bytes(b"{")
    save(cnn, folder)
    assert content(folder) == content(saved)
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_a_link_to_an_artefact_stays_a_link(cnn, saved, folder):
    link = folder.with_name("link")
    link.symlink_to(folder)
    forge(folder, lambda d: d.update(backend="earlier"))
    save(cnn, link)
    assert link.is_symlink()
    assert content(folder) == content(saved)


def _extra(folder):
    (folder / "notes.txt").write_text("mine")


def _foreign(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "model.json").write_text('{"format": "other"}')


def _file(folder):
    shutil.rmtree(folder)
    folder.write_text("mine")


@pytest.mark.parametrize("make", [_extra, _foreign, _file])
def test_what_is_not_ours_is_not_replaced(cnn, folder, make):
    make(folder)
    before = content(folder) if folder.is_dir() else folder.read_bytes()
    with pytest.raises(ArtefactError, match="replaces only an earlier artefact"):
        save(cnn, folder)
    assert before == (content(folder) if folder.is_dir() else folder.read_bytes())


def test_an_empty_directory_is_filled(cnn, saved, tmp_path):
    (tmp_path / "empty").mkdir()
    save(cnn, tmp_path / "empty")
    assert content(tmp_path / "empty") == content(saved)


@pytest.mark.parametrize("failing", ["nc.storage.tensor_file.write", "os.fsync", "pathlib.Path.rename"])
def test_a_failure_leaves_the_old_one_and_nothing_else(cnn, folder, failing, monkeypatch):
    forge(folder, lambda d: d.update(backend="earlier"))
    before, real = content(folder), Path.rename

    def fail(*args, **kwargs):
        # of the renames, the one that would give the new directory its name while the old one stands aside
        if failing.endswith("rename") and not (
            args[1] == folder and not folder.exists() and args[0].suffix == ".tmp"
        ):
            return real(*args)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(failing, fail)
    with pytest.raises(OSError, match="No space left"):
        save(cnn, folder)
    monkeypatch.undo()
    assert content(folder) == before
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_many_savers_do_not_disturb_each_other(cnn, saved, tmp_path):
    names = ["same", "other"] * 8
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: save(cnn, tmp_path / name), names))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "same"]
    assert content(tmp_path / "same") == content(tmp_path / "other") == content(saved)


def test_a_saver_waits_for_one_in_another_process(cnn, tmp_path):
    """Held here as the other process would.

    Only renaming is exclusive, so the files are written meanwhile.
    """
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            saving = pool.submit(save, cnn, tmp_path / "model")
            with pytest.raises(concurrent.futures.TimeoutError):
                saving.result(timeout=1.0)
            assert not (tmp_path / "model").exists()
            fcntl.flock(folder, fcntl.LOCK_UN)
            saving.result(timeout=20)
    finally:
        os.close(folder)
    assert load(tmp_path / "model", backend="reference") is not None


# --- the list of operators ---


def test_the_list_holds_operators_without_side_effects():
    assert set(map(str, ops.REFERENCE)) <= allowlist.OPERATORS
    for function in _SIZE_OPS:
        assert allowlist.name_of(function, "n") in allowlist.OPERATORS
    functional = {name.split(".")[1] for name in allowlist.OPERATORS}
    removed = ("cholesky", "qr")  # by torch 2.14
    gone = {f"aten.{name}.default" for name in removed if not hasattr(torch.ops.aten, name)}
    for name in allowlist.OPERATORS - gone:
        target = allowlist.resolve(name, "n")
        assert allowlist.name_of(target, "n") == name
        if not name.startswith("aten."):
            continue
        schema = target._schema
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        assert written == (
            ["self"] if schema.name.endswith("_") and not schema.name.endswith("__") else []
        ), name
        # a mutation of values only: what changes sizes or memory (resize_, set_) has no listed counterpart
        assert not written or name.split(".")[1].removesuffix("_") in functional, name
        assert not {"Storage", "Stream", "QScheme"} & {str(a.type) for a in schema.arguments}, name
        assert "file" not in name
        assert "backward" not in name
        assert torch.Tag.nondeterministic_seeded not in target.tags or name.split(".")[1] in (
            "lstm", "gru", "rnn_tanh", "rnn_relu", "scaled_dot_product_attention", "rrelu",
        ), name  # fmt: skip


@pytest.mark.parametrize("damaged", [True, False])
def test_nothing_is_said_of_damaged_weights_but_that(folder, damaged, monkeypatch):
    """What codes of damaged files would do is nobody's business; of whole files it is said."""
    monkeypatch.setattr(
        nc.api.artefact, "narrowed", lambda graph, _: warn("2 layers could saturate") or graph
    )
    if not damaged:
        with pytest.warns(nc.NCWarning, match="2 layers could saturate"):
            load(folder, backend="reference")
        return
    raw = bytearray((folder / "weights.safetensors").read_bytes())
    raw[-1] ^= 1
    (folder / "weights.safetensors").write_bytes(raw)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ArtefactCorruptError, match="its SHA-256 differs"):
            load(folder, backend="reference")


def test_an_artefact_of_a_newer_nc_is_not_replaced(cnn, folder):
    forge(folder, lambda d: d.update(schema=2))
    before = content(folder)
    with pytest.raises(ArtefactSchemaError, match="schema 2 of nc-model.*a newer nc wrote it"):
        save(cnn, folder)
    assert content(folder) == before
