"""What a model writes into its arguments.

The caller finds it there after each call, whatever runs the model.
"""

import copy
import dataclasses

import pytest
import torch
from models import call, sqnr_db
from suites.small_llama import random_llama
from torch import nn
from torch.utils import _pytree as pytree

import nc
from nc import CaptureError, InputError, StaticQuantConfig
from nc.graph.effects import share_elements

X = torch.linspace(-2, 2, 32).reshape(4, 8)


class _Layer(nn.Module):
    """One linear of 8 features, the same each time."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.f = nn.Linear(8, 8)


class Copies(_Layer):
    """The whole of a tensor, which the output is computed from."""

    def forward(self, x, cache):
        cache.copy_(self.f(x))
        return cache * 2


class Adds(_Layer):
    """A step of a decoder whose state is in the caller's tensor, and which returns it."""

    def forward(self, x, cache):
        return cache.mul_(0.5).add_(self.f(x))


class Places(_Layer):
    """Parts of tensors in a tuple: a slice, places by index, a view."""

    def forward(self, x, caches, places):
        first, second = caches
        first[:, 1] = self.f(x)
        second.index_copy_(1, places, self.f(x)[:, None].expand(-1, places.shape[0], -1))
        second.transpose(1, 2)[:, 0] = 1.0
        return (first + second).sum(1)


class Halves(_Layer):
    """One of two views that one operator makes."""

    def forward(self, x, cache):
        left, _ = cache.chunk(2, 1)
        left.add_(self.f(x)[:, :4])
        return cache + 1


class Grows(_Layer):
    """Containers: a new key, another tensor for an old one, a longer list, a tuple inside."""

    def forward(self, x, *, state):
        state["k"] = torch.cat((state["k"], self.f(x)), 0)
        state["rows"].append(self.f(x) + 1)
        state["inner"]["pair"] = (state["inner"]["pair"][0], state["k"].sum(0))
        state["inner"]["new"] = state["rows"][0].add_(1)
        return state["k"].sum(0), state


@dataclasses.dataclass
class State:
    """Registered with torch below."""

    k: torch.Tensor


torch.export.register_dataclass(State, serialized_type_name="test_effects.State")


class Replaces(_Layer):
    """A member of an object."""

    def forward(self, x, state):
        state.k = state.k * 2 + self.f(x)
        return state.k + 1


MODELS = {
    "whole": (Copies(), (X, torch.zeros(4, 8))),
    "bfloat16": (Copies(), (X, torch.zeros(4, 8, dtype=torch.bfloat16))),
    "returned": (Adds(), (X, torch.ones(4, 8))),
    "parts": (Places(), (X, (torch.zeros(4, 3, 8), torch.ones(4, 3, 8)), torch.tensor([2]))),
    "halves": (Halves(), (X, torch.ones(4, 8))),
    "containers": (Grows(), {"x": X, "state": {"k": X[:2], "rows": [X + 1], "inner": {"pair": (X, X[0])}}}),
    "object": (Replaces(), (X, State(torch.ones(4, 8)))),
}


def agreement(a, b):
    """The worst SQNR of the leaves of two structures, which must be the same."""
    assert pytree.tree_structure(a) == pytree.tree_structure(b)
    leaves = [*zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)]
    for left, right in leaves:
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
    return min(
        sqnr_db(left.double(), right.double()) if left.is_floating_point() else 999.0
        for left, right in leaves
    )


def left_behind(model, inputs):
    """What a call gives, and its arguments after it."""
    inputs = copy.deepcopy(inputs)
    outputs = call(model, inputs)
    return outputs, inputs


@pytest.fixture(scope="module", params=MODELS)
def prepared(request):
    model, inputs = MODELS[request.param]
    model = nc.prepare(model.eval(), StaticQuantConfig(), example_inputs=inputs, backend="reference")
    call(model, copy.deepcopy(inputs))
    return (*MODELS[request.param], model)


def test_prepared(prepared):
    model, inputs, mine = prepared
    before = copy.deepcopy(inputs)
    expected, got = left_behind(model, inputs), left_behind(mine, inputs)
    assert agreement(expected, got) > 120
    if not isinstance(model, Grows):
        assert agreement(before, expected[1]) < 20  # the model does change something
    assert agreement(before, inputs) > 300  # and prepare nothing


@pytest.mark.parametrize("backend", ["reference", "native", "openvino"])
def test_quantized(prepared, backend, tmp_path):
    model, inputs, mine = prepared
    if nc.backends.get_backend(backend).why_unavailable():
        pytest.skip(f"{backend} is not here")
    q = nc.convert(mine, backend=backend, measure=False)
    q.save(tmp_path)
    expected = left_behind(model, inputs)
    for each in (q, q.reference, nc.load(tmp_path, backend=backend)):
        assert 25 < agreement(expected, left_behind(each, inputs)) < 200


def test_exported(prepared):
    model, inputs, _ = prepared
    assert agreement(left_behind(model, inputs), left_behind(nc.export.export(model, inputs), inputs)) > 120


def test_a_program_gives_the_new_values(tmp_path):
    openvino = pytest.importorskip("openvino")
    mine = nc.prepare(
        Copies().eval(), StaticQuantConfig(), example_inputs=(X, torch.zeros(4, 8)), backend="reference"
    )
    mine(X, torch.zeros(4, 8))
    q, cache = nc.convert(mine), torch.zeros(4, 8)
    with pytest.warns(nc.NCWarning, match="its last outputs are the new values of cache, in this order"):
        nc.export_openvino(q, tmp_path / "model.xml")
    program = openvino.Core().compile_model(
        tmp_path / "model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    found = program({"x": X.numpy(), "cache": cache.numpy()})
    assert sqnr_db(q(X, cache), torch.from_numpy(found["output_0"])) > 30
    assert sqnr_db(cache, torch.from_numpy(found["output_1"])) > 30


def test_the_callers_own_objects(prepared):
    model, inputs, mine = prepared
    inputs = copy.deepcopy(inputs)
    out = call(mine, inputs)
    if isinstance(model, Adds):
        assert out is inputs[1]
    elif isinstance(model, Grows):
        assert out[1] is inputs["state"]
        assert inputs["state"]["inner"]["new"] is inputs["state"]["rows"][0]


@pytest.mark.parametrize("run", ["prepared", "quantized"])
def test_decoding(run):
    """Steps build on what the steps in front of them wrote.

    With a stale state they drift away within a few.
    """
    model = Adds().eval()
    mine = nc.prepare(model, StaticQuantConfig(), example_inputs=(X, torch.zeros(4, 8)), backend="reference")
    states = [torch.zeros(4, 8), torch.zeros(4, 8)]
    for step in range(6):
        call(mine, (X.roll(step, 1), states[1]))
    if run == "quantized":
        mine = nc.convert(mine, measure=False)
    states[1].zero_()
    for step in range(6):
        expected, got = (call(m, (X.roll(step, 1), s)) for m, s in zip((model, mine), states, strict=True))
        assert sqnr_db(expected, got) > (100 if run == "prepared" else 25), step


def test_a_part_of_a_larger_tensor():
    model = Copies().eval()
    mine = nc.prepare(model, StaticQuantConfig(), example_inputs=(X, torch.zeros(4, 8)), backend="reference")
    whole = torch.full((6, 9, 2), 7.0)
    part = whole[1:5, 1:, 1]
    mine(X, part)
    with torch.no_grad():
        assert torch.equal(part, model.f(X))
    part.fill_(7)
    assert bool((whole == 7).all())  # and nothing beside it


def test_shared_memory():
    model = Copies().eval()
    mine = nc.prepare(model, StaticQuantConfig(), example_inputs=(X, torch.zeros(4, 8)), backend="reference")
    memory = torch.zeros(4, 8, 2)
    mine(memory[..., 0], memory[..., 1])  # interleaved, and no element in common
    for other in (memory[..., 0], memory[:, [*range(8)], 0][:].as_strided((4, 8), (8, 1))):
        with pytest.raises(InputError, match="'cache' and 'x' share memory"):
            mine(other, other.view(4, 8))
    with pytest.raises(InputError, match="'cache' and 'x' share memory"):
        nc.prepare(model, StaticQuantConfig(), example_inputs=(X, X), backend="reference")
    with pytest.raises(InputError, match="writes into argument 'cache'"):
        mine(X, torch.zeros(1, 8).expand(4, 8))


def test_share_elements():
    memory = torch.zeros(40, dtype=torch.float32)
    pairs = [
        (memory[:10], memory[10:]),
        (memory[::2], memory[1::2]),
        (memory, torch.zeros(40)),
        (memory[:0], memory),
    ]
    assert not any(share_elements(*pair) for pair in pairs)
    pairs = [(memory[:11], memory[10:]), (memory[::2], memory[::3]), (memory, memory.view(torch.int64)[3:4])]
    assert all(share_elements(*pair) for pair in pairs)


class Transposes(_Layer):
    """The shape of the caller's tensor."""

    def forward(self, x, cache):
        cache.t_()
        return self.f(x) + cache.sum()


class Box:
    """A container that pytree knows, and nothing says how to change."""

    def __init__(self, member):
        self.member = member


pytree.register_pytree_node(
    Box,
    lambda box: ([box.member], None),
    lambda members, _: Box(*members),
    serialized_type_name="test_effects.Box",
    flatten_with_keys_fn=lambda box: ([(pytree.GetAttrKey("member"), box.member)], None),
)


class Boxed(_Layer):
    """Another tensor in a container that can't be changed from outside."""

    def forward(self, x, box):
        box.member = self.f(x)
        return x + 1


@pytest.mark.parametrize(
    ("model", "example", "name"), [(Transposes(), torch.ones(3, 5), "cache"), (Boxed(), Box(X), "box")]
)
def test_refused_by_name(model, example, name):
    with pytest.raises(CaptureError, match=f"forward changes argument '{name}'"):
        nc.prepare(model.eval(), StaticQuantConfig(), example_inputs=(X, example), backend="reference")


def test_a_failed_call_writes_nothing():
    mine = nc.prepare(
        Copies().eval(), StaticQuantConfig(), example_inputs=(X, torch.zeros(4, 8)), backend="reference"
    )
    cache = torch.zeros(4, 8)
    with pytest.raises(nc.CalibrationError):
        mine(X / 0, cache)
    assert not bool(cache.any())


def test_kept_samples_are_the_inputs():
    """Algorithms run them again: what the call writes afterwards must not change them."""
    mine = nc.prepare(
        Adds().eval(), StaticQuantConfig(), example_inputs=(X, torch.zeros(4, 8)), backend="reference"
    )
    mine.observed.samples.rows, mine.observed.samples.size = 100, 1 << 20
    cache = torch.zeros(4, 8)
    mine(X, cache)
    mine(X, cache)
    first, second = mine.observed.samples.batches
    assert not bool(first[1].any())
    assert torch.allclose(
        second[1], first[0] @ mine.graph.module.f_weight.t() + mine.graph.module.f_bias, atol=1e-5
    )


def test_cache_of_transformers():
    transformers = pytest.importorskip("transformers")
    model = random_llama()
    ids = torch.arange(12).reshape(2, 6)

    def filled():
        cache = transformers.DynamicCache()
        call(model, {"input_ids": ids, "past_key_values": cache, "use_cache": True})
        return cache

    token = {
        "input_ids": ids[:, :1],
        "attention_mask": torch.ones(2, 7, dtype=torch.int64),
        "use_cache": True,
    }
    prepared = nc.prepare(
        model, StaticQuantConfig(), example_inputs={**token, "past_key_values": filled()}, backend="reference"
    )
    mine, own = filled(), filled()
    for step in range(3):
        more = {"attention_mask": torch.ones(2, 7 + step, dtype=torch.int64)}
        expected = call(model, {**token, **more, "past_key_values": own})
        got = call(prepared, {**token, **more, "past_key_values": mine})
        assert got.past_key_values is mine
        assert mine.get_seq_length() == own.get_seq_length() == 7 + step
        assert sqnr_db(expected.logits, got.logits) > 90
