"""Tokens by plans, where a model, its cache or its arguments are changed between them.

Nothing of before may be used.
"""

import copy

import pytest
import torch
from suites.generation import OLD, by_plan, generated, language_model, same, texts

import nc
from nc.backends import available_backends
from nc.backends.low_bit.engine import set_backend
from nc.backends.native.plans import c_functions
from nc.errors import NCWarning, VerificationError
from nc.generation import decoder as decoding
from nc.generation import status
from nc.generation.memory import empty_cache
from nc.numerics.metrics import worst_sqnr_db

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(
        bool(available_backends()["native"] or c_functions.why_unavailable()),
        reason=available_backends()["native"] or c_functions.why_unavailable(),
    ),
    pytest.mark.needs_plans,
]


def filled(model, ids, **more):
    """A cache that holds these tokens."""
    cache = empty_cache(model)
    with torch.no_grad():
        model(ids, past_key_values=cache, **more)
    return cache


def step(model, cache, *tokens, **more):
    with torch.no_grad():
        return model(
            input_ids=torch.tensor([[token] for token in tokens]), past_key_values=cache, **more
        ).logits


def pair(name="Llama", **more):
    """An accelerated model whose tokens plans compute, and the same one without plans."""
    model = language_model(name, **more)
    own = copy.deepcopy(model)
    nc.accelerate_generation(model)
    generated(model, texts(2))
    assert status(model).count("by a plan") == 2
    return model, own


class Adapter(torch.nn.Module):
    """As of LoRA."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.low, self.up = (
            torch.nn.Linear(base.in_features, 4, bias=False),
            torch.nn.Linear(4, base.out_features, bias=False),
        )

    def forward(self, x):
        return self.base(x) + self.up(self.low(x))


@torch.no_grad()
def _other_linear(model):
    other = language_model().model.layers[0].mlp.down_proj
    other.scale.mul_(3)
    model.set_submodule("model.layers.0.mlp.down_proj", other)


@torch.no_grad()
def _scale(model):
    model.model.layers[0].mlp.down_proj.scale.mul_(3)


@torch.no_grad()
def _bias(model):
    model.model.layers[0].mlp.down_proj.bias.add_(1)


def _forward(model):
    forward = model.model.norm.forward
    model.model.norm.forward = lambda x: 2 * forward(x)


CHANGES = {
    "another linear": _other_linear,
    "a float linear": lambda model: model.set_submodule(
        "model.layers.0.mlp.down_proj", torch.nn.Linear(96, 64)
    ),
    "an adapter": lambda model: model.set_submodule(
        "model.layers.0.mlp.up_proj", Adapter(model.model.layers[0].mlp.up_proj).eval()
    ),
    "another parameter": lambda model: setattr(
        model.lm_head, "weight", torch.nn.Parameter(torch.randn(96, 64))
    ),
    "other memory of a parameter": lambda model: setattr(model.model.norm.weight, "data", torch.rand(64)),
    "a buffer": lambda model: setattr(
        model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq / 2
    ),
    "scales in place": _scale,
    "a bias in place": _bias,
    "another dtype": lambda model: model.to(torch.bfloat16),
    "another function": _forward,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.sample(4)
def test_changes_of_the_model_are_followed(change, engine):
    """A plan has addresses of weights in it, and what was computed of them: none may be those of before."""
    model = set_backend(
        language_model(mlp_bias=True, dtype=torch.bfloat16 if change == "a bias in place" else torch.float32),
        engine,
    )
    nc.accelerate_generation(model)
    generated(model, texts())
    CHANGES[change](model)
    own = copy.deepcopy(model)
    got, expected = generated(model, texts()), generated(own, texts())
    assert worst_sqnr_db(list(expected.logits)[:6], list(got.logits)[:6]) > (
        90 if model.dtype is torch.float32 else 30
    )
    assert "by a plan" in status(model)


def test_hooks_of_all_modules_are_called():
    model, _ = pair()
    tokens, seen = by_plan(model), []
    with torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module)):
        generated(model, texts(), 5)
    assert not tokens
    assert seen.count(model.model.norm) == 5


def test_what_was_kept_of_a_cache_stays():
    """Tensors of a cache never change in transformers."""
    model, _ = pair()
    cache = filled(model, texts(1, 5))
    for token in range(5, 10):
        step(model, cache, token)
    kept = [layer.keys for layer in cache.layers]
    before = [keys.clone() for keys in kept]
    for change in (lambda: cache.crop(6 if OLD else -4), lambda: cache.reorder_cache(torch.tensor([0]))):
        change()
        step(model, cache, 50)
        for keys, expected in zip(kept, before, strict=True):
            assert torch.equal(keys, expected)


@pytest.mark.parametrize("batch", [1, 3])
def test_several_tokens_at_once(batch):
    """Some are taken back, and others follow: what nobody kept is written over, without a copy."""
    model, own = pair()
    mask = torch.ones(batch, 60, dtype=torch.int64)
    mask[0, :4] = 0
    caches = [filled(each, texts(batch), attention_mask=mask[:, :9]) for each in (model, own)]
    drafts, count, memories = torch.randint(3, 96, (batch, 16)), 9, set()
    for tokens, taken in ((3, 1), (5, 5), (1, 1), (16, 7), (2, 1), (8, 3), (4, 0), (4, 4)):
        more = {"attention_mask": mask[:, : count + tokens]}
        with torch.no_grad():
            got, expected = (
                each(input_ids=drafts[:, :tokens], past_key_values=cache, **more).logits
                for each, cache in zip((model, own), caches, strict=True)
            )
        assert worst_sqnr_db([expected], [got]) > 90
        count += taken
        for cache in caches:
            if taken < tokens:
                cache.crop(count if OLD else taken - tokens)
            assert cache.get_seq_length() == count
        if (memory := model.forward._memories.get(caches[0])) is not None:
            memories.add(memory.keys.data_ptr())
    assert len(memories) == 1
    assert "several tokens of " in status(model)


def test_drafts_that_were_kept_stay():
    model, _ = pair()
    cache = filled(model, texts(1, 5))
    for token in range(5, 9):
        step(model, cache, token)
    for keep in (lambda layer: layer.keys, lambda layer: layer.values[:, :, 2:]):
        with torch.no_grad():
            model(input_ids=texts(1, 4), past_key_values=cache)
        kept = [keep(layer) for layer in cache.layers]
        before = [tensor.clone() for tensor in kept]
        cache.crop(cache.get_seq_length() - 3 if OLD else -3)
        step(model, cache, 50)
        for tensor, expected in zip(kept, before, strict=True):
            assert torch.equal(tensor, expected)


def test_the_last_logits_alone():
    model, own = pair()
    caches = [filled(each, texts()) for each in (model, own)]
    for keep in (0, 1, 2, 3, 7):
        with torch.no_grad():
            got, expected = (
                each(input_ids=texts(1, 3), past_key_values=cache, logits_to_keep=keep).logits
                for each, cache in zip((model, own), caches, strict=True)
            )
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("own", "factor", "says"),
    [(45.0, 1.15, "expected at least 20"), (22.0, 1.15, ""), (22.0, 2.0, "expected at least 12"),
     (3.0, 2.0, "expected at least 6")],
)  # fmt: skip
def test_a_model_that_rounds_is_compared_with_its_own_noise(own, factor, says, monkeypatch):
    run = decoding._run
    monkeypatch.setattr(decoding, "_run", lambda *args: factor * run(*args))
    model = language_model(act_dtype="int8")
    found = []

    def db(*args):
        found.append(own_db(*args))
        return own

    own_db = decoding.Decoder._own_db
    monkeypatch.setattr(decoding.Decoder, "_own_db", db)
    if says:
        with pytest.raises(VerificationError, match=says):
            nc.accelerate_generation(model)
    else:
        nc.accelerate_generation(model)
        assert "by a plan" in status(model)
    assert all(30 < each < 130 for each in found)


def test_positions_that_the_model_counts():
    """OPT counts visible tokens where no positions are given, and a plan counts places.

    That text is left to the model.
    """
    model, own = pair("OPT")
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :4] = 0
    generated(model, texts(2) * mask[:, :9], attention_mask=mask[:, :9])
    caches = [filled(each, texts(2), attention_mask=mask[:, :9]) for each in (model, own)]
    with pytest.warns(NCWarning, match="differs from OPTForCausalLM's own"):
        first = step(model, caches[0], 5, 6, attention_mask=mask[:, :10])
    torch.testing.assert_close(first, step(own, caches[1], 5, 6, attention_mask=mask[:, :10]))
    second = [
        step(each, cache, 7, 8, attention_mask=mask[:, :11])
        for each, cache in zip((model, own), caches, strict=True)
    ]
    torch.testing.assert_close(*second)
    assert "batches, some places hidden, positions not given: the model itself" in status(model)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Bloom"])
@pytest.mark.sample(1)
def test_masks(name):
    """Holes, rows that see nothing, and masks that are no numbers 0 and 1."""
    model, own = pair(name)
    mask = torch.ones(3, 16, dtype=torch.int64)
    mask[0, 2:4] = mask[1, 7] = 0
    others = mask.clone()
    others[2] = 0
    for given in (mask, mask.bool(), mask * 0.5, others):
        if name == "Bloom" and given.is_floating_point():
            continue  # its sums of a mask are positions
        caches = [filled(each, texts(3), attention_mask=given[:, :9]) for each in (model, own)]
        for i in range(5):
            more = {"attention_mask": given[:, : 10 + i], "position_ids": torch.full((3, 1), 9 + i)}
            got, expected = (
                step(each, cache, 5, 6, 7, **more) for each, cache in zip((model, own), caches, strict=True)
            )
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_arguments_and_settings_are_those_of_the_model():
    model, own = pair("GPT2")
    cases = [
        {"position_ids": torch.tensor([[3]])},
        {"position_ids": torch.tensor([3])},
        {"position_ids": torch.tensor([[4]], dtype=torch.int32)},
    ]
    if OLD:
        cases.append({"cache_position": torch.tensor([15])})
    for more in cases:
        expected = step(own, filled(own, texts()), 5, **more)
        got = step(model, filled(model, texts()), 5, **more)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    model.config.output_hidden_states = True
    with torch.no_grad():
        assert (
            model(input_ids=torch.tensor([[5]]), past_key_values=filled(model, texts())).hidden_states
            is not None
        )


@pytest.mark.parametrize("tokens", [[[96]], [[-1]], [[5.5]]])
@pytest.mark.sample(1)
def test_tokens_that_do_not_exist(tokens):
    """The error is torch's, and the cache is as before."""
    model, own = pair()
    caches = [filled(each, texts()) for each in (model, own)]
    step(model, caches[0], 5)
    step(own, caches[1], 5)
    errors = []  # IPEX, once imported, has texts of its own
    for each, cache in zip((model, own), (caches[0], filled(own, texts())), strict=True):
        with pytest.raises((IndexError, RuntimeError)) as error, torch.no_grad():
            each(input_ids=torch.tensor(tokens), past_key_values=cache)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]
    assert caches[0].get_seq_length() == 10
    torch.testing.assert_close(step(model, caches[0], 6), step(own, caches[1], 6), rtol=1e-4, atol=1e-5)
    assert "by a plan" in status(model)


def test_a_plan_that_fails_later_is_left_with_a_warning(monkeypatch):
    model, own = pair()
    expected = generated(own, texts())

    def fails(*_):
        msg = "no such size"
        raise RuntimeError(msg)

    monkeypatch.setattr(decoding, "_run", fails)
    with pytest.warns(NCWarning, match="a plan failed: no such size"):
        same(generated(model, texts()), expected)
    assert "one text: the model itself (a plan failed: no such size)" in status(model)


@pytest.mark.skipif(OLD, reason="caches of transformers 4 don't record")
def test_a_cache_that_begins_to_record():
    """What is older than the window must be kept from then on."""
    model, own = pair("Mistral")
    caches = [filled(each, texts(1, 20)) for each in (model, own)]
    for each, cache in zip((model, own), caches, strict=True):
        step(each, cache, 5)
        cache.activate_past_recording()
        for token in (6, 7, 8):
            step(each, cache, token)
        cache.crop(-2)
    torch.testing.assert_close(step(model, caches[0], 9), step(own, caches[1], 9), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(OLD, reason="torch 2.8 can't export the model without plans either")
def test_an_accelerated_model_can_be_exported():
    model, own = pair()
    program = torch.export.export(model, (texts(),), {"use_cache": False}, strict=False)
    torch.testing.assert_close(
        program.module()(texts(), use_cache=False).logits, own(texts()).logits, rtol=1e-4, atol=1e-5
    )
