"""A low-bit weight as a tensor, the modules that give one, and torchao's names."""

import copy
import io

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

import nc
from nc import ConfigError, NCError, StateError, UnsupportedError, WeightOnlyConfig
from nc.nn import QuantEmbedding, QuantLinear
from nc.torchao import (
    SAFE_GLOBALS,
    MappingType,
    QuantizedTensor,
    choose_qparams_affine,
    dequantize_affine,
    flatten,
    quantize_,
    quantize_affine,
    unflatten,
)

CONFIGS = {
    "int4": WeightOnlyConfig("int4", group_size=16),
    "uint3": WeightOnlyConfig("uint3", group_size=8, w_sym=False),
    "nf4": WeightOnlyConfig("nf4", group_size=16, double_quant=True),
    "fp8": WeightOnlyConfig("fp8_e4m3", group_size=-1, scale_dtype="bf16"),
}


def layer(name="int4", dtype=torch.float32):
    torch.manual_seed(1)
    return nc.quantize(nn.Sequential(nn.Linear(32, 24).to(dtype)).eval(), CONFIGS[name])[0]


def weight(name="int4", dtype=torch.float32):
    return layer(name, dtype).weight


def assert_equal(a, b):
    assert type(a) is torch.Tensor
    assert a.dtype == b.dtype
    assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


# ---- the tensor ----


@pytest.mark.parametrize("name", CONFIGS)
def test_a_weight_looks_like_the_float_one_and_copies_nothing(name):
    module = layer(name)
    w = module.weight
    assert isinstance(w, QuantizedTensor)
    assert (w.shape, w.dtype, w.device.type, w.requires_grad, w.ndim, w.numel()) == (
        (24, 32),
        torch.float32,
        "cpu",
        False,
        2,
        24 * 32,
    )
    assert w.packed.codes.data_ptr() == module.codes.data_ptr()
    assert torch.equal(w.dequantize(), module.packed.dequantize())
    assert str(module.form) in repr(w)


@pytest.mark.parametrize("name", CONFIGS)
def test_linears_and_look_ups_are_those_of_the_dequantized_weight(name):
    w, x, bias = weight(name), torch.randn(2, 5, 32), torch.randn(24)
    plain = w.dequantize()
    assert_equal(F.linear(x, w, bias), F.linear(x, plain, bias))
    assert_equal(F.linear(x, w), F.linear(x, plain))
    assert_equal(x[0] @ w.t(), x[0] @ plain.t())
    assert_equal(x @ w.T, x @ plain.T)
    assert_equal(torch.mm(x[0], w.transpose(0, 1)), x[0] @ plain.t())
    assert_equal(torch.addmm(bias, x[0], w.t()), torch.addmm(bias, x[0], plain.t()))
    assert_equal(
        torch.addmm(bias, x[0], w.t(), beta=0.5, alpha=2),
        torch.addmm(bias, x[0], plain.t(), beta=0.5, alpha=2),
    )
    assert_equal(torch.mm(torch.ones(3, 24), w), torch.ones(3, 24) @ plain)
    assert_equal(F.linear(torch.ones(3, 24), w.t()), F.linear(torch.ones(3, 24), plain.t()))
    ids = torch.tensor([[0, 23], [5, 5]])
    assert_equal(F.embedding(ids, w), F.embedding(ids, plain))


def test_known_operators_do_not_dequantize(monkeypatch):
    w, x = weight(), torch.randn(3, 32)
    calls = []
    monkeypatch.setattr(QuantizedTensor, "dequantize", lambda self: calls.append(1))
    (
        F.linear(x, w),
        torch.addmm(torch.zeros(24), x, w.t()),
        torch.mm(x, w.t()),
        F.embedding(torch.tensor([1]), w),
    )
    w.detach(), w.clone(), w.to(torch.bfloat16), w.t().t(), copy.deepcopy(w)
    assert not calls


def test_views_and_copies_stay_quantized():
    w = weight()
    for same in (
        w.detach(),
        w.data,
        w.clone(),
        w.cpu(),
        w.contiguous(),
        copy.deepcopy(w),
        w.t().t(),
        w.transpose(0, 0),
        w.permute(0, 1),
    ):
        assert isinstance(same, QuantizedTensor)
        assert torch.equal(same.dequantize(), w.dequantize())
    assert w.clone().packed.codes.data_ptr() != w.packed.codes.data_ptr()
    flipped = w.t()
    assert flipped.shape == (32, 24)
    assert torch.equal(flipped.dequantize(), w.dequantize().t())
    low = w.to(torch.bfloat16)
    assert low.dtype is torch.bfloat16
    assert torch.equal(low.dequantize(), w.dequantize().to(torch.bfloat16))
    assert F.linear(torch.randn(2, 32, dtype=torch.bfloat16), low).dtype is torch.bfloat16
    assert torch.equal(w.to(torch.int32), w.dequantize().to(torch.int32))


@pytest.mark.parametrize(
    "operator",
    [
        lambda w: w + 1,
        lambda w: 2 * w.t(),
        lambda w: w.abs().sum(0),
        lambda w: w[3, 4:7],
        lambda w: w.reshape(-1),
        lambda w: torch.cat([w, w]),
        lambda w: w.norm(),
        lambda w: torch.einsum("nk,mk->nm", w, w),
        lambda w: torch.zeros(24, 32).copy_(w),
        lambda w: torch.zeros(24, 32).add_(w),
        lambda w: w.numpy().sum(),
        lambda w: np.asarray(w).sum(),
        lambda w: w.tolist(),
        lambda w: torch.linalg.matrix_norm(w),
    ],
)
def test_other_operators_have_the_values_of_the_dequantized_weight(operator):
    w = weight()
    ours, theirs = operator(w), operator(w.dequantize())
    assert type(ours) is type(theirs)
    assert torch.allclose(torch.as_tensor(ours), torch.as_tensor(theirs))


def test_what_is_stored_can_be_shared_between_processes():
    layer = nc.quantize(nn.Sequential(nn.Linear(32, 16)).eval(), WeightOnlyConfig("int4", group_size=16))[0]
    weight, values = layer.weight, layer.weight.dequantize()
    assert not weight.is_shared()
    assert weight.share_memory_() is weight
    assert weight.is_shared()
    assert layer.codes.is_shared()
    assert torch.equal(weight.dequantize(), values)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.add_(1),
        lambda w: w.data.mul_(2),
        lambda w: w.zero_(),
        lambda w: w.copy_(torch.zeros(24, 32)),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: w.fill_(0),
        lambda w: nn.init.normal_(w),
        lambda w: setattr(w, "data", torch.zeros(24, 32)),
        lambda w: torch.add(torch.zeros(24, 32), 1, out=w),
        lambda w: w.t().add_(1),
    ],
)
def test_changes_are_refused_and_nothing_is_lost(change):
    w = weight()
    before = w.dequantize()
    with pytest.raises(UnsupportedError, match="dequantize"):
        change(w)
    assert torch.equal(w.dequantize(), before)


def test_gradients_flow_to_the_input():
    w, x = weight(), torch.randn(3, 32, requires_grad=True)
    F.linear(x, w).sum().backward()
    assert torch.allclose(x.grad, w.dequantize().sum(0).expand(3, 32), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_saved_and_loaded(name, tmp_path):
    w = weight(name, torch.bfloat16)
    buffer = io.BytesIO()
    torch.save({"w": w.t()}, buffer)
    buffer.seek(0)
    with torch.serialization.safe_globals(list(SAFE_GLOBALS)):
        loaded = torch.load(buffer, weights_only=True)["w"]
    assert torch.equal(loaded.dequantize(), w.t().dequantize())
    assert loaded.dtype is torch.bfloat16
    tensors, metadata = flatten({"a": w, "b": torch.ones(2), "c": w.t()})
    safetensors.torch.save_file({k: v.clone() for k, v in tensors.items()}, tmp_path / "f", metadata)
    with safetensors.safe_open(tmp_path / "f", "pt") as file:
        again = unflatten({key: file.get_tensor(key) for key in file.keys()}, file.metadata())  # noqa: SIM118 - not a dict
    assert torch.equal(again["a"].dequantize(), w.dequantize())
    assert torch.equal(again["c"].dequantize(), w.t().dequantize())
    assert torch.equal(again["b"], torch.ones(2))
    with pytest.raises(ConfigError, match="not what flatten"):
        unflatten(tensors, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda parts: parts.update(codes=parts["codes"][:, 1:]),
            r"codes: torch.uint8 of shape \(24, 11\) where .*\(24, 12\) is expected",
        ),
        (lambda parts: parts.update(scale=parts["scale"].half()), "scale: torch.float16"),
        (lambda parts: parts.pop("zero"), "zero: none where torch.uint8"),
        (
            lambda parts: parts.update(minimum=parts["scale"]),
            "minimum: torch.float32.* where none is expected",
        ),
        (lambda parts: parts.pop("codes"), "not the parts of a QuantizedTensor"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    w = weight("uint3")
    call, (parts, *rest) = w.__reduce_ex__(2)
    change(parts)
    with pytest.raises(ConfigError, match=message):
        call(parts, *rest)
    tensors, metadata = flatten({"w": w})
    with pytest.raises(ConfigError, match=message if "codes" in parts else "not what flatten"):
        unflatten({f"w.{name}": part for name, part in parts.items()}, metadata)


@pytest.mark.parametrize(
    ("position", "value"),
    [(1, {}), (2, (24,)), (2, (24, 40)), (2, (24.0, 32)), (2, (24, 31)), (3, torch.int8), (3, "fp32")],
)
def test_what_is_no_weight_is_refused(position, value):
    call, arguments = weight("uint3").__reduce_ex__(2)
    with pytest.raises(ConfigError):
        call(*arguments[:position], value, *arguments[position + 1 :])


def test_it_is_a_parameter_of_a_state_dict():
    class Holder(nn.Module):
        def __init__(self, w):
            super().__init__()
            self.w = nn.Parameter(w, requires_grad=False)

    source, target = Holder(weight()), Holder(weight())
    target.w.packed.codes.zero_()
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.w.dequantize(), source.w.dequantize())
    with pytest.raises((UnsupportedError, RuntimeError), match="QuantizedTensor"):
        target.load_state_dict({"w": torch.zeros(24, 32)})
    other = Holder(weight("nf4"))
    with pytest.raises((UnsupportedError, RuntimeError), match="QuantizedTensor"):
        target.load_state_dict(other.state_dict())


def test_compilers_can_take_it_apart():
    w = weight("uint3", torch.float16).t()
    names, context = w.__tensor_flatten__()
    again = QuantizedTensor.__tensor_unflatten__(
        {name: getattr(w, name) for name in names}, context, w.shape, w.stride()
    )
    assert (again.shape, again.dtype) == (w.shape, w.dtype)
    assert torch.equal(again.dequantize(), w.dequantize())


# ---- modules ----


def test_the_weight_of_a_module_has_the_dtype_of_the_model():
    module = layer(dtype=torch.bfloat16)
    assert module.weight.dtype is torch.bfloat16
    assert module.float().weight.dtype is torch.float32
    assert module.codes.dtype is torch.uint8
    table = nc.quantize(
        nn.Sequential(nn.Embedding(10, 16)).eval(), WeightOnlyConfig("int4", group_size=16, embedding="int4")
    )[0]
    assert isinstance(table, QuantEmbedding)
    assert table.weight.shape == (10, 16)
    assert table.to(torch.bfloat16)(torch.tensor([1])).dtype is table.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("act_dtype", ["fp32", "int8"])
def test_a_model_in_another_dtype_has_biases_in_it_and_the_same_codes(dtype, act_dtype):
    """As in a float model: nothing of it stays in the dtype that it had, except what is stored of a weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 24), nn.LayerNorm(24), nn.Linear(24, 8)).eval()
    config = WeightOnlyConfig("int4", group_size=8, act_dtype=act_dtype)
    q, x = nc.quantize(model, config), torch.randn(5, 32)
    expected, stored = (
        q(x).detach(),
        {n: t.clone() for n, t in q.state_dict().items() if "codes" in n or "scale" in n},
    )
    assert stored
    q.to(dtype)
    assert {p.dtype for p in q.parameters()} == {dtype}
    assert all(torch.equal(q.state_dict()[name], value) for name, value in stored.items())
    found = q(x.to(dtype))
    assert found.dtype is dtype
    assert torch.allclose(found.float(), expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))
    back = q.float()(x)
    assert back.dtype is torch.float32
    assert torch.allclose(back, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("value", [torch.zeros(24, 32), nn.Parameter(torch.zeros(24, 32)), None])
def test_the_weight_of_a_module_cannot_be_set(value):
    module = layer()
    with pytest.raises(StateError, match=r"can't be set.*quantize again"):
        module.weight = value
    with pytest.raises(UnsupportedError):
        module.weight.data.copy_(torch.zeros(24, 32))


def test_an_artefact_keeps_the_dtype_of_weights(tmp_path):
    model = nc.quantize(nn.Sequential(nn.Linear(32, 24)).to(torch.bfloat16).eval(), CONFIGS["int4"])
    nc.save(model, tmp_path / "q")
    again = nc.load(tmp_path / "q", nn.Sequential(nn.Linear(32, 24)).to(torch.bfloat16).eval())
    assert again[0].weight.dtype is torch.bfloat16


def close_to_dequantized(model, run):
    """A model gives what it gives with its weights as plain floats."""
    found = run(model)
    plain = copy.deepcopy(model)
    for name, module in list(plain.named_modules()):
        if isinstance(module, QuantLinear):
            linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            with torch.no_grad():
                linear.weight.copy_(module.weight.dequantize())
                if module.bias is not None:
                    linear.bias.copy_(module.bias)
            parent, _, child = name.rpartition(".")
            setattr(plain.get_submodule(parent), child, linear)
    assert torch.allclose(found, run(plain), rtol=1e-4, atol=1e-5)


def test_multi_head_attention_reads_the_weight_of_its_projection():
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, 5, 32)
    with pytest.warns(
        nc.NCWarning, match=r"Most weights of this model stay as they are.*in_proj_weight \[96, 32\]"
    ):
        q = nc.quantize(model, CONFIGS["int4"])
    assert isinstance(q.out_proj, QuantLinear)
    with torch.no_grad():
        close_to_dequantized(q, lambda m: m(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("grad", [False, True])
def test_an_encoder_layer_does_not_take_its_fast_path(grad):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    x = torch.randn(2, 5, 32)
    q = nc.quantize(model, CONFIGS["int4"])
    assert isinstance(q.layers[0].linear1, QuantLinear)
    with torch.set_grad_enabled(grad):
        close_to_dequantized(q, lambda m: m(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_t5_reads_the_dtype_of_a_weight(dtype):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).to(dtype).eval()
    q = nc.quantize(model, WeightOnlyConfig("int4", group_size=16))
    assert sum(isinstance(m, QuantLinear) for m in q.modules()) > 20
    ids = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        logits = q(input_ids=ids, decoder_input_ids=ids).logits
        assert logits.dtype is dtype
        if dtype is torch.float32:
            close_to_dequantized(q, lambda m: m(input_ids=ids, decoder_input_ids=ids).logits)
    assert q.generate(ids, max_new_tokens=3, do_sample=False).shape[0] == 2


# ---- torchao's names ----


def test_quantize_in_place_with_a_filter():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4)).eval()
    same = model[0]
    assert (
        quantize_(model, CONFIGS["int4"], lambda module, name: module.out_features == 32 and name != "0")
        is None
    )
    assert [type(m).__name__ for m in model] == ["Linear", "ReLU", "QuantLinear", "Linear"]
    assert model[0] is same
    quantize_(model, CONFIGS["int4"])
    assert [type(m).__name__ for m in model] == ["QuantLinear", "ReLU", "QuantLinear", "QuantLinear"]


def test_a_filter_also_limits_local_rules():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).eval()
    config = WeightOnlyConfig("int4", group_size=16).set_local(nn.Linear, WeightOnlyConfig("int8"))
    quantize_(model, config, lambda _, name: name == "1")
    assert [type(m).__name__ for m in model] == ["Linear", "QuantLinear"]
    assert str(model[1].form.dtype) == "int8"
    assert len(config.rules) == 1


def test_what_cannot_be_done_in_place_is_refused():
    model = nn.Sequential(nn.Linear(32, 32)).eval()
    with pytest.raises(ConfigError, match=r"takes a WeightOnlyConfig.*nc.quantize"):
        quantize_(model, nc.DynamicQuantConfig())
    with pytest.raises(ConfigError, match="selects none of the 1 layers"):
        quantize_(model, CONFIGS["int4"], lambda *_: False)
    with pytest.raises(NCError, match="group_size"):
        quantize_(model, WeightOnlyConfig(group_size=24))
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("mapping", MappingType)
@pytest.mark.parametrize("block", [(8, 12), (1, 12), (1, 4), (4, 6), (8, 1)])
def test_primitives_against_brute_force(mapping, block):
    x = torch.randn(8, 12, dtype=torch.float64) * 3
    scale, zero = choose_qparams_affine(x, mapping, block, torch.int8, -8, 7, keepdim=True)
    codes = quantize_affine(x, block, scale, zero, torch.int8, -8, 7)
    values = dequantize_affine(codes, block, scale, zero, torch.int8, -8, 7, output_dtype=torch.float64)
    for i in range(0, 8, block[0]):
        for j in range(0, 12, block[1]):
            part = [float(v) for v in x[i : i + block[0], j : j + block[1]].flatten()]
            low, high = min(0.0, *part), max(0.0, *part)
            s = {
                "SYMMETRIC": max(-low, high) / 7.5,
                "SYMMETRIC_NO_CLIPPING_ERR": max(low / -8, high / 7),
                "ASYMMETRIC": (high - low) / 15,
            }[mapping.name]
            z = min(max(-8 - round(low / s), -8), 7) if mapping is MappingType.ASYMMETRIC else 0
            expected = [(min(max(round(v * (1 / s)) + z, -8), 7) - z) * s for v in part]
            assert values[i : i + block[0], j : j + block[1]].flatten().tolist() == pytest.approx(
                expected, rel=1e-12
            )
    assert codes.dtype is torch.int8


@pytest.mark.parametrize("dtype", [torch.int4, torch.uint4, torch.uint3, torch.int2])
def test_codes_of_fewer_than_8_bits_are_held_in_bytes(dtype):
    x = torch.randn(4, 32)
    scale, zero = choose_qparams_affine(x, MappingType.ASYMMETRIC, (1, 16), dtype)
    codes = quantize_affine(x, (1, 16), scale, zero, dtype)
    assert codes.dtype == (torch.uint8 if str(dtype).startswith("torch.u") else torch.int8)
    assert len(codes.unique()) <= 2 ** int(str(dtype)[-1])
    assert (dequantize_affine(codes, (1, 16), scale, zero, dtype) - x).abs().max() <= 0.51 * scale.max()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: choose_qparams_affine(x.long(), "SYMMETRIC", (1, 16), torch.int8),
        lambda x: choose_qparams_affine(x[:0], "SYMMETRIC", (1, 16), torch.int8),
        lambda x: choose_qparams_affine(x, "SYMMETRIC", 16, torch.int8),
        lambda x: quantize_affine(x, (1, 16), torch.ones(3), None, torch.int8),
        lambda x: quantize_affine(x, (1, 16), torch.ones(4, 2), torch.zeros(3), torch.int8),
        lambda x: dequantize_affine(x.char(), (1, 16), torch.ones(3), None, torch.int8),
    ],
)
def test_primitives_refuse_tensors_that_do_not_fit(call):
    with pytest.raises(ConfigError):
        call(torch.ones(4, 32))


@pytest.mark.parametrize(
    "block",
    [(1,), (1, 32, 1), (1, 5), (3, 32), (8, 32), (0, 32), (1, -1), (1.0, 16), (1, 16.0), "ab", None, 16],
)
def test_blocks_that_do_not_cover_a_tensor_are_refused(block):
    for call in (
        lambda x: choose_qparams_affine(x, "SYMMETRIC", block, torch.int8),
        lambda x: quantize_affine(x, block, torch.ones(4, 2), None, torch.int8),
        lambda x: dequantize_affine(x.char(), block, torch.ones(4, 2), None, torch.int8),
    ):
        with pytest.raises(ConfigError, match="does not cover a tensor of shape"):
            call(torch.ones(4, 32))


def test_primitives_refuse_what_does_not_fit():
    x = torch.ones(4, 6)
    with pytest.raises(ConfigError, match="does not cover"):
        choose_qparams_affine(x, "SYMMETRIC", (1, 4), torch.int8)
    with pytest.raises(ConfigError, match="mapping_type"):
        choose_qparams_affine(x, "HALF", (1, 6), torch.int8)
    with pytest.raises(ConfigError, match="not an integer dtype"):
        quantize_affine(x, (1, 6), torch.ones(4), None, torch.float16)
    with pytest.raises(ConfigError, match="do not fit"):
        quantize_affine(x, (1, 6), torch.ones(4), None, torch.int8, 0, 200)
    with pytest.raises(ConfigError, match="input_dtype"):
        dequantize_affine(x, (1, 6), torch.ones(4), None, torch.int8)
