"""Quantized models in graphs of `torch.compile`, and its backend "nc"."""

import gc
import shutil

import pytest
import torch
from suites.padded_texts import encoder, texts
from torch import nn

import nc
from nc.api import compiled as compiled_models
from nc.errors import BackendUnavailableError, NCWarning, StateError

IS_TORCH_2_8 = torch.__version__.startswith("2.8.")
pytestmark = [
    pytest.mark.skipif(bool(nc.available_backends()["native"]), reason="no backend native"),
    pytest.mark.skipif(IS_TORCH_2_8, reason="torch 2.8 calls the model outside of its graphs"),
]


def quantized(model, *args, **kwargs):
    prepared = nc.prepare(
        model.eval(), nc.StaticQuantConfig(), example_inputs=kwargs or args, backend="native"
    )
    prepared(*args, **kwargs)
    return nc.convert(prepared, measure=False)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_model_inside_another_is_one_operator(compiler):
    graphs = []

    def kept(module, inputs):
        graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return torch._dynamo.lookup_backend(compiler)(module, inputs)

    q = quantized(mlp(), torch.randn(4, 64))
    outer = nn.Sequential(nn.Linear(64, 64), q, nn.Softmax(-1))
    call = torch.compile(outer, backend=kept, fullgraph=True)
    with torch.no_grad():
        for batch in (4, 9, 1, 5):
            x = torch.randn(batch, 64)
            torch.testing.assert_close(call(x), outer(x), rtol=1e-6, atol=1e-6)
            assert torch.equal(torch.compile(q, backend=compiler, fullgraph=True)(x), q(x))
    assert all(graph.count("nc_models.call.default") == 1 for graph in graphs)
    assert len(graphs) == 3  # the first batch, any batch, a batch of one


@pytest.mark.parametrize("is_loaded", [False, True], ids=["converted", "loaded"])
def test_outputs_of_transformers(is_loaded, tmp_path):
    q = quantized(encoder("bert"), **texts(24, 10, 17, 3))
    if is_loaded:
        nc.save(q, tmp_path / "q")
        q = nc.load(tmp_path / "q")
    call = torch.compile(q, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for lengths in ((24, 10, 17, 3), (8, 30), (12, 5)):
            inputs = texts(*lengths)
            got, wanted = call(**inputs), q(**inputs)
            assert type(got) is type(wanted)
            assert torch.equal(got.last_hidden_state, wanted.last_hidden_state)


def test_outputs_in_another_order_of_memory():
    """The compiler is told that outputs are contiguous; the engine's are channels-last."""
    q = quantized(
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)), torch.randn(2, 3, 12, 12)
    )
    x = torch.randn(2, 3, 12, 12)
    got = torch.compile(q, backend="aot_eager", fullgraph=True)(x)
    assert got.is_contiguous()
    assert torch.equal(got, q(x))


def test_outputs_that_are_inputs_or_one_tensor():
    class Same(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 8)

        def forward(self, x):
            y = self.linear(x)
            return x, y, y

    q = quantized(Same(), torch.randn(4, 64))
    x = torch.randn(4, 64)
    for a, b in zip(torch.compile(q, backend="aot_eager", fullgraph=True)(x), q(x), strict=True):
        assert torch.equal(a, b)


def test_outputs_that_are_no_tensors():
    """A graph breaks there, as an operator gives tensors."""

    class Sizes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 8)

        def forward(self, x):
            return {"y": self.linear(x), "rows": x.shape[0], "none": None, "three": 3}

    q = quantized(Sizes(), torch.randn(4, 64))
    call = torch.compile(q, backend="aot_eager")
    for batch in (4, 2, 1):
        x = torch.randn(batch, 64)
        got, wanted = call(x), q(x)
        assert torch.equal(got.pop("y"), wanted.pop("y"))
        assert got == wanted == {"rows": batch, "none": None, "three": 3}


@pytest.mark.filterwarnings("error:nc_models::call")
def test_gradients_go_past_the_model():
    q = quantized(mlp(), torch.randn(4, 64))
    x = torch.randn(4, 64, requires_grad=True)
    (torch.compile(q, backend="aot_eager", fullgraph=True)(x).sum() + (2 * x).sum()).backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_wrong_inputs_are_typed_errors():
    call = torch.compile(quantized(mlp(), torch.randn(4, 64)), backend="eager")
    with pytest.raises(nc.InputError, match="expected dtype"):
        call(torch.randn(4, 64, dtype=torch.float64))


def test_a_model_that_does_not_exist_any_more():
    q = quantized(mlp(), torch.randn(4, 64))
    number, x = q._number, torch.randn(4, 64)
    assert torch.equal(compiled_models.call_model([x], number)[0], q(x))
    del q
    gc.collect()
    with pytest.raises(StateError, match="Compile it again"):
        compiled_models.call_model([x], number)


def test_a_strict_export_holds_no_model():
    with pytest.raises(Exception, match="disable"):
        torch.export.export(quantized(mlp(), torch.randn(4, 64)), (torch.randn(4, 64),), strict=True)


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@needs_compiler
def test_the_backend_is_known_by_name():
    assert "nc" in torch._dynamo.list_backends()
    q = nc.quantize(mlp().eval(), nc.WeightOnlyConfig("int4", group_size=32))
    x = torch.randn(3, 64)
    with torch.no_grad():
        call = torch.compile(q, backend="nc", fullgraph=True, mode="default", options=None)
        torch.testing.assert_close(call(x), q(x), rtol=1e-5, atol=1e-6)


@needs_compiler
def test_a_model_without_quantized_layers_is_said():
    with torch.no_grad(), pytest.warns(NCWarning, match="quantizes none"):
        torch.compile(mlp(), backend="nc")(torch.randn(3, 64))


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackendUnavailableError, match=r'backend="nc"\) needs a C\+\+ compiler'):
        compiled_models.backend(torch.fx.symbolic_trace(mlp()), [])
