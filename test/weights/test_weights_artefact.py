"""Models with low-bit weights as directories.

What comes back, in this process and a new one, and what is refused.
"""

import copy
import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from suites.artefacts import places, sign
from suites.small_llama import random_llama
from torch import nn

import nc
from nc.formats import low_bit
from nc.weights.history import history_of

COUNT = int(os.environ.get("NC_MUTATIONS", "75"))
FILES = ("model.json", "weights.safetensors")
IDS = torch.tensor([[1, 5, 9, 2, 7], [4, 4, 8, 3, 6]])


def llama(**options):
    sizes = {"intermediate_size": 96, "vocab_size": 50, "max_position_embeddings": 64}
    return random_llama(**{**sizes, **options})


class Net(nn.Module):
    """Not of transformers.

    Two linears with one weight, a buffer that is not persistent, and one that is made in the first call.
    """

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.LayerNorm(32)
        self.register_buffer("offset", torch.arange(32.0), persistent=False)
        self.register_buffer("seen", None)

    def forward(self, x):
        if self.seen is None:
            self.seen = torch.ones(())
        return self.second(self.norm(self.first(x)) + self.offset) * self.seen


def net():
    return Net().eval()


def config(**fields):
    return nc.WeightOnlyConfig(**{"w_dtype": "int4", "group_size": 32, **fields})


def document(folder):
    return json.loads((folder / "model.json").read_text())


def changed(folder, change):
    data = document(folder)
    change(data)
    sign(folder, data)
    return folder


def assert_same_model(a, b):
    for kind in ("named_parameters", "named_buffers"):
        first, second = (dict(getattr(m, kind)(remove_duplicate=False)) for m in (a, b))
        assert list(first) == list(second)
        for name, tensor in first.items():
            assert tensor.dtype == second[name].dtype, name
            assert torch.equal(
                *(t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (tensor, second[name]))
            ), name


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, torch.float32),
        ({"lm_head": "int8", "embedding": "int8", "w_sym": False}, torch.float32),
        ({"w_dtype": "int3", "scale_dtype": "fp16"}, torch.bfloat16),
        ({"w_dtype": "nf4", "double_quant": True, "embedding": "nf4"}, torch.float16),
        ({"w_dtype": "fp4_e2m1", "scale_dtype": "e8m0", "w_algo": "minmax"}, torch.float32),
        ({"w_dtype": "int8", "group_size": -1, "act_dtype": "int8"}, torch.float32),
    ],
    ids=str,
)
def test_a_transformers_model_comes_back_bit_for_bit_without_its_class(fields, dtype, tmp_path):
    q = nc.quantize(
        llama(tie_word_embeddings=False).to(dtype), config(**fields), measure=False
    )  # a verdict is not saved
    nc.save(q, tmp_path / "a")
    loaded = nc.load(tmp_path / "a")
    assert type(loaded) is type(q)
    assert not loaded.training
    assert_same_model(q, loaded)
    assert torch.equal(q(IDS).logits, loaded(IDS).logits)
    assert torch.equal(
        *(m.generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=0) for m in (q, loaded))
    )
    assert nc.report(q).text(details=True) == nc.report(loaded).text(details=True)
    assert nc.report(q).to_dict() == nc.report(loaded).to_dict()
    assert loaded.config.to_dict() == q.config.to_dict()
    assert loaded.generation_config.to_dict().keys() <= q.generation_config.to_dict().keys()


def test_the_report_and_the_configuration_come_back_with_solvers_and_losses(tmp_path):
    prepared = nc.prepare(llama(), config(solver=nc.GPTQ(), transforms=[nc.AWQ()]))
    prepared(IDS)
    q = nc.convert(prepared, measure=False)
    nc.save(q, tmp_path)
    loaded = nc.load(tmp_path)
    assert "awq" in nc.report(loaded).text(details=True)
    shown = [
        line
        for line in nc.report(q).text(details=True).splitlines()
        if not line.startswith("outputs in the first call")
    ]  # it is not saved
    assert shown == nc.report(loaded).text(details=True).splitlines()
    before, after = history_of(q), history_of(loaded)
    assert (after.plan, after.applied, after.config) == (before.plan, before.applied, before.config)
    assert nc.WeightOnlyConfig.from_dict(after.config) == prepared.quant_config
    assert [m.result for m in q.modules() if hasattr(m, "result")] == [
        m.result for m in loaded.modules() if hasattr(m, "result")
    ]


def test_saving_again_and_saving_what_was_loaded_give_the_same_bytes(tmp_path):
    q = nc.quantize(llama(), config(embedding="int8"))
    nc.save(q, tmp_path / "a")
    nc.save(q, tmp_path / "b")
    nc.save(nc.load(tmp_path / "a"), tmp_path / "c")
    for file in (*FILES, "checksums.json"):
        assert len({(tmp_path / name / file).read_bytes() for name in "abc"}) == 1


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    q = nc.quantize(llama(tie_word_embeddings=True), config(embedding="int8", lm_head="int8"))
    nc.save(q, tmp_path / "low")
    names = document(tmp_path / "low")["tensors"]
    assert names["lm_head.codes"] == names["model.embed_tokens.codes"]
    loaded = nc.load(tmp_path / "low")
    assert loaded.lm_head.codes.data_ptr() == loaded.model.embed_tokens.codes.data_ptr()
    nc.save(nc.quantize(llama(tie_word_embeddings=True), config()), tmp_path / "float")
    loaded = nc.load(tmp_path / "float")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_conv1d_model_and_its_masks(tmp_path):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    q = nc.quantize(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval(), config())
    nc.save(q, tmp_path)
    loaded = nc.load(tmp_path)
    assert torch.equal(q(IDS).logits, loaded(IDS).logits)


def test_a_new_process_generates_without_the_users_code_and_unpickles_nothing(tmp_path):
    q = nc.quantize(llama(), config())
    nc.save(q, tmp_path / "m")
    torch.save(q.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0), tmp_path / "expected.pt")
    source = """
import pickle, sys, torch
import nc
expected = torch.load(sys.argv[2])
def refuse(*a, **k): raise AssertionError("unpickled")
pickle.load = pickle.loads = torch.load = refuse
q = nc.load(sys.argv[1])
ids = torch.tensor([[1, 5, 9, 2, 7], [4, 4, 8, 3, 6]])
assert torch.equal(q.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0), expected)
print(nc.report(q).summary())
"""
    command = [sys.executable, "-c", source, str(tmp_path / "m"), str(tmp_path / "expected.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "14 of 16 layers have low-bit weights" in done.stdout


def test_loading_makes_no_float_weights_and_leaves_random_numbers_alone(tmp_path, monkeypatch):
    nc.save(nc.quantize(llama(), config()), tmp_path)
    made = []
    init = nn.Parameter.__new__

    def new(cls, data=None, requires_grad=True):
        made.append(data)
        return init(cls, data, requires_grad)

    monkeypatch.setattr(nn.Parameter, "__new__", new)
    state = torch.get_rng_state()
    nc.load(tmp_path)
    assert torch.equal(state, torch.get_rng_state())
    assert [t for t in made if t.is_meta]
    assert not [
        t.shape for t in made if t.dim() == 2 and not t.is_meta and t.shape[0] != 50
    ]  # the head and the embedding stay float


def gpt2():
    torch.manual_seed(0)
    sizes = {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 50,
        "n_positions": 16,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_()
    return model


def test_a_bias_that_a_rotation_moved_to_the_head_comes_back(tmp_path):
    model = gpt2()
    q = nc.quantize(model, config(transforms=[nc.Rotation()]))
    assert q.lm_head.bias is not None
    nc.save(q, tmp_path / "a")
    for again in (nc.load(tmp_path / "a"), nc.load(tmp_path / "a", model=gpt2())):
        assert torch.equal(again(IDS).logits, q(IDS).logits)
        nc.save(again, tmp_path / "b")
        assert (tmp_path / "b" / "weights.safetensors").read_bytes() == (
            tmp_path / "a" / "weights.safetensors"
        ).read_bytes()
    with pytest.raises(nc.UnsupportedError, match=r"lm_head\.bias.*without Rotation"):
        nc.export_weights(q, tmp_path / "c")


def test_a_bias_that_the_model_has_not_is_refused_without_a_rotation(tmp_path):
    nc.save(nc.quantize(net(), config()), tmp_path)
    with pytest.raises(nc.ArtefactError, match="it has no 'first.bias'"):
        nc.load(tmp_path, model=_with(net(), "first", nn.Linear(32, 32, bias=False)))


def test_another_class_needs_a_model_and_leaves_it_alone(tmp_path):
    model = net()
    x = torch.randn(3, 32)
    q = nc.quantize(model, config(group_size=16, w_sym=False), measure=False)
    expected = q(x)
    nc.save(q, tmp_path)
    with pytest.raises(
        nc.ArtefactError,
        match=r"holds the weights of a .*Net, but not the class.*nc\.load\(directory, model=",
    ):
        nc.load(tmp_path)
    fresh = net()
    before = copy.deepcopy(fresh.state_dict())
    for loaded in (nc.load(tmp_path, model=fresh), nc.load(tmp_path, fresh), nc.load(tmp_path, model=model)):
        assert torch.equal(loaded(x), expected)
        assert_same_model(q, loaded)
        assert loaded.first.codes.data_ptr() == loaded.second.codes.data_ptr()
        assert nc.report(loaded).text(details=True) == nc.report(q).text(details=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in fresh.state_dict().items())
    assert isinstance(fresh.first, nn.Linear)
    assert fresh.seen is None
    with torch.device("meta"):
        empty = net()
    assert torch.equal(nc.load(tmp_path, model=empty)(x), expected)


def test_a_subclass_of_a_transformers_model_needs_a_model(tmp_path):
    class Own(transformers.LlamaForCausalLM):
        pass

    q = nc.quantize(Own(llama().config).eval(), config())
    nc.save(q, tmp_path)
    with pytest.raises(nc.ArtefactError, match="model="):
        nc.load(tmp_path)
    assert torch.equal(nc.load(tmp_path, model=Own(q.config))(IDS).logits, q(IDS).logits)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(32, 32)), "'first' is a linear of 32 x 32, and it has none"),
        (
            lambda: _with(net(), "first", nn.Linear(32, 16)),
            "'first' is a linear of 32 x 32, and there it is a linear of 16 x 32",
        ),
        (lambda: _with(net(), "norm", nn.LayerNorm(16)), "its 'norm.weight' has shape"),
        (lambda: _with(net(), "more", nn.Linear(2, 2)), "it has 'more.bias', which was not saved"),
        (lambda: _with(net(), "norm", nn.Identity()), "it has no 'norm.weight'"),
        (lambda: nc.quantize(net(), config()), "'first' is a linear of 32 x 32, and it has none"),
    ],
)
def test_a_model_that_is_another_one_is_refused(make, message, tmp_path):
    nc.save(nc.quantize(net(), config()), tmp_path)
    with pytest.raises(nc.ArtefactError, match=message):
        nc.load(tmp_path, model=make())


def _with(model, name, module):
    setattr(model, name, module)
    return model


def test_load_takes_a_backend_and_refuses_what_is_no_model(tmp_path):
    q = nc.quantize(llama(), config(), backend="reference")
    nc.save(q, tmp_path)
    assert torch.equal(nc.load(tmp_path, backend="reference")(IDS).logits, q(IDS).logits)
    assert {layer.kernel for layer in nc.report(nc.load(tmp_path, backend="reference")).quantized} == {
        "reference"
    }
    assert "reference" not in {
        layer.kernel for layer in nc.report(nc.load(tmp_path, backend="native")).quantized
    }
    with pytest.raises(nc.UnknownBackendError):
        nc.load(tmp_path, backend="nativ")
    with pytest.raises(nc.InputError, match="torch.nn.Module, but got str"):
        nc.load(tmp_path, model="llama")


@pytest.mark.parametrize(
    "fields",
    [{}, {"w_sym": False, "scale_dtype": "fp16", "group_size": 64}, {"w_dtype": "int3", "group_size": 64}],
    ids=str,
)
def test_the_size_on_disk_is_that_of_the_formula(fields, tmp_path):
    fields = {"w_dtype": "int4", "group_size": 32, **fields}
    model = nn.Sequential(nn.Linear(768, 1024, bias=False), nn.Linear(1024, 768, bias=False)).eval()
    nc.save(nc.quantize(model, nc.WeightOnlyConfig(**fields)), tmp_path)
    form = low_bit(
        dtype=fields["w_dtype"],
        group_size=fields["group_size"],
        symmetric=fields.get("w_sym", True),
        scale_dtype=fields.get("scale_dtype", "fp32"),
    )
    expected = sum(k * n * form.bits_per_weight(k) / 8 for k, n in ((768, 1024), (1024, 768)))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == pytest.approx(expected, rel=0.02)


def test_foreign_folders_are_not_replaced_and_artefacts_of_both_kinds_are(tmp_path):
    q = nc.quantize(net(), config())
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    with pytest.raises(nc.ArtefactError, match="replaces only an earlier artefact"):
        nc.save(q, foreign)
    assert (foreign / "notes.txt").read_text() == "mine"
    x = torch.randn(2, 8)
    graph = nc.quantize(
        nn.Sequential(nn.Linear(8, 8)).eval(), nc.DynamicQuantConfig(), example_inputs=x, backend="reference"
    )
    for model, loaded in (
        (graph, nc.api.quantized.QuantizedModel),
        (q, Net),
        (graph, nc.api.quantized.QuantizedModel),
    ):
        nc.save(model, tmp_path / "a")
        assert isinstance(nc.load(tmp_path / "a", model=net(), backend="reference"), loaded)


def test_what_an_artefact_cannot_hold_is_named(tmp_path):
    class Extra(Net):
        def get_extra_state(self):
            return {}

        def set_extra_state(self, state):
            pass

    with pytest.raises(nc.ArtefactError, match="extra state"):
        nc.save(nc.quantize(Extra().eval(), config()), tmp_path / "a")
    model = _with(net(), "sparse", nn.Module().eval())
    model.sparse.register_buffer("table", torch.eye(3).to_sparse())
    with pytest.raises(nc.ArtefactError, match=r"'sparse\.table'"):
        nc.save(nc.quantize(model, config()), tmp_path / "a")
    with pytest.raises(nc.StateError, match="result of convert"):
        nc.save(net(), tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved")
    nc.save(nc.quantize(llama(num_hidden_layers=1), config(w_sym=False, embedding="int8")), folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


@pytest.mark.parametrize("name", FILES)
def test_an_altered_byte_is_found(name, folder):
    raw = bytearray((folder / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (folder / name).write_bytes(raw)
    with pytest.raises(nc.ArtefactCorruptError, match=name):
        nc.load(folder)


def test_a_missing_file_and_a_newer_schema_are_named(folder):
    changed(folder, lambda d: d.update(schema=2))
    with pytest.raises(nc.ArtefactSchemaError, match="schema 2"):
        nc.load(folder)
    (folder / "weights.safetensors").unlink()
    changed_sums = folder / "model.json"
    changed_sums.unlink()
    with pytest.raises(nc.ArtefactMissingError, match=r"model\.json"):
        nc.load(folder)


@pytest.mark.parametrize(
    "name",
    ["PreTrainedModel", "Trainer", "pipeline", "LlamaAttention", "os.system", "", None, ["LlamaForCausalLM"]],
)
def test_only_listed_classes_of_transformers_are_built(name, folder):
    changed(folder, lambda d: d["transformers"].update({"class": name}))
    with pytest.raises(nc.ArtefactError, match="has no model class"):
        nc.load(folder)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("transformers.models.llama.modeling_llama", "LlamaAttention"),
        ("transformers.models.llama.modeling_llama", "torch"),
        ("transformers.models.llama.modeling_llama", "PreTrainedModel"),
        ("transformers.models.llama.modeling_lama", "LlamaModel"),
        ("transformers.models.llama", "LlamaModel"),
        ("transformers.modeling_utils", "PreTrainedModel"),
        ("antigravity", "LlamaModel"),
        ("transformers.models.llama.modeling_llama.", "LlamaModel"),
        (3, "LlamaModel"),
    ],
)
def test_only_model_classes_in_files_of_transformers_are_built(file, name, folder):
    changed(folder, lambda d: d["transformers"].update({"class": name, "module": file}))
    with pytest.raises(nc.ArtefactError, match="has no model class"):
        nc.load(folder)
    assert "antigravity" not in sys.modules


def text_sizes():
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 64,
    }
    return {
        **sizes,
        "max_position_embeddings": 64,
        "projection_dim": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


@pytest.mark.parametrize(
    ("name", "kind", "sizes"),
    [
        ("CLIPTextModelWithProjection", "CLIPTextConfig", text_sizes()),
        ("SiglipTextModel", "SiglipTextConfig", text_sizes()),
        ("ClapTextModelWithProjection", "ClapTextConfig", text_sizes()),
        ("DPRContextEncoder", "DPRConfig", text_sizes()),
        (
            "GPT2DoubleHeadsModel",
            "GPT2Config",
            {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 64},
        ),
    ],
)
def test_a_model_class_in_no_auto_class_comes_back(name, kind, sizes, tmp_path):
    model = getattr(transformers, name)(getattr(transformers, kind)(**sizes)).eval()
    q = nc.quantize(model, config(), measure=False)
    nc.save(q, tmp_path / "q")
    loaded = nc.load(tmp_path / "q")
    assert type(loaded) is type(model)
    with torch.no_grad():
        assert torch.equal(loaded(IDS)[0], q(IDS)[0])


def test_a_part_of_a_model_comes_back(tmp_path):
    """A class that transformers does not export."""
    part = llama().model
    encoder = transformers.BertModel(transformers.BertConfig(**text_sizes())).eval().encoder
    for model, found in ((part, True), (encoder, False)):
        nc.save(nc.quantize(model, config(), measure=False), tmp_path / "q")
        if found:
            assert type(nc.load(tmp_path / "q")) is type(model)
        else:
            with pytest.raises(nc.ArtefactError, match="BertEncoder, but not the class"):
                nc.load(tmp_path / "q")


def test_a_configuration_cannot_name_code_or_fetch_anything(folder):
    names = {
        "auto_map": {"AutoModel": "hub--evil"},
        "attn_implementation": "hub/kernel",
        "_attn_implementation": "hub/kernel",
    }
    changed(
        folder,
        lambda d: d["transformers"]["config"].update(names, quantization_config={"quant_method": "gptq"}),
    )
    loaded = nc.load(folder)
    assert loaded.config._attn_implementation == "sdpa"
    assert not any(hasattr(loaded.config, key) for key in ("auto_map", "quantization_config"))
    changed(folder, lambda d: d["transformers"].update(attention="hub/kernel"))
    with pytest.raises(nc.ArtefactCorruptError, match="hub/kernel"):
        nc.load(folder)


@pytest.mark.parametrize(
    "name", ["num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
)
@pytest.mark.parametrize("value", [3, 10**4, 10**12])
def test_a_configuration_of_a_larger_model_is_refused_soon(name, value, folder):
    changed(folder, lambda d: d["transformers"]["config"].update({name: value}))
    with pytest.raises(nc.ArtefactError):
        nc.load(folder)


VALUES = [
    None,
    True,
    0,
    1,
    -1,
    3,
    300,
    10**12,
    0.5,
    "",
    "x",
    [],
    [1, 2],
    {},
    {"float": "nan"},
    "int8",
    "model.norm.weight",
]


def test_a_changed_artefact_with_correct_checksums_is_refused_or_loads(saved, tmp_path):
    original = document(saved)
    folder = shutil.copytree(saved, tmp_path / "changed")
    failures, refused = [], 0
    for seed in range(COUNT):
        rng = random.Random(seed)  # which change to try
        data = copy.deepcopy(original)
        part = rng.choice(["layers", "layers", "tensors", "transformers", "record", None])
        container, key, path = rng.choice(places(data if part is None else data[part]))
        if rng.random() < 0.25:
            del container[key]
        else:
            container[key] = copy.deepcopy(rng.choice(VALUES))
        sign(folder, data)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = nc.load(folder)
                str(nc.report(model))
                nc.report(model).text(details=True)
        except nc.ArtefactError:
            refused += 1
        except Exception as error:  # anything else is what this test is about
            failures.append(f"seed {seed}: {part} {path}: {type(error).__name__}: {str(error)[:160]}")
    assert not failures, "\n".join(failures)
    assert refused > COUNT // 3


@pytest.mark.parametrize("part", ["codes", "scale", "zero"])
@pytest.mark.parametrize("how", ["shorter", "other dtype", "missing"])
def test_packed_tensors_of_another_size_are_refused(part, how, folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "weights.safetensors")
    name = f"model.layers.0.mlp.up_proj.{part}"
    if how == "missing":
        del tensors[name]
    else:
        tensors[name] = (
            tensors[name][:, :-1].contiguous() if how == "shorter" else tensors[name].to(torch.int32)
        )
    save_file(tensors, folder / "weights.safetensors")
    sign(folder, document(folder))
    with pytest.raises(nc.ArtefactCorruptError):
        nc.load(folder)


def test_the_folder_of_a_graph_is_not_read_as_weights(tmp_path):
    from nc.storage import store

    nc.save(nc.quantize(net(), config()), Path(tmp_path))
    with pytest.raises(nc.ArtefactSchemaError, match="expected the format 'nc-model', but got 'nc-weights'"):
        store.read(tmp_path)
