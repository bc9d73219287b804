"""Tokens by plans are the tokens of the model.

Architectures, batches, beams, long texts, and what is left to the model.
"""

import copy
import dataclasses
import gc
import inspect
import pickle
import subprocess
import sys
import threading
import warnings
import weakref

import pytest
import torch
import transformers
from suites.generation import _LLAMA, CONFIGS, OLD, by_plan, generated, language_model, same, texts

import nc
from nc.backends import available_backends
from nc.backends.native.plans import c_functions
from nc.errors import InputError, NCWarning, UnsupportedError, VerificationError
from nc.generation import decoder as decoding
from nc.generation import own_forward, status
from nc.generation.memory import empty_cache
from nc.generation.names import cache_argument, cache_field, cache_of
from nc.numerics.metrics import worst_sqnr_db

pytestmark = [
    pytest.mark.skipif(
        bool(available_backends()["native"] or c_functions.why_unavailable()),
        reason=available_backends()["native"] or c_functions.why_unavailable(),
    ),
    pytest.mark.needs_plans,
]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.skipif(OLD and n == "Mixtral", reason="can't be exported"))
        for n in CONFIGS
    ],
)
@pytest.mark.sample(3)
def test_texts_are_those_of_the_model(name):
    """One text, a batch with hidden places on the left, and beams, which reorder the cache."""
    model = language_model(name)
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[0, :4] = mask[2, :1] = 0
    calls = [
        lambda: generated(model, texts()),
        lambda: generated(model, texts(3) * mask, attention_mask=mask),
        lambda: generated(model, texts(), num_beams=3),
    ]
    expected = [call() for call in calls]
    assert nc.accelerate_generation(model) is model
    tokens = by_plan(model)
    for call, own in zip(calls, expected, strict=True):
        before = len(tokens)
        same(call(), own)
        assert len(tokens) - before >= 19
    assert status(model).count("by a plan") == 3
    assert status(model) in " ".join(str(nc.report(model)).split())


@pytest.mark.skipif(OLD, reason="transformers 4 needs a token that ends a text, and may give one token more")
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Qwen3", "Mistral"])
@pytest.mark.sample(2)
def test_drafts_out_of_the_prompt(name):
    """Texts that repeat themselves; where windows slide, the model itself confirms drafts."""
    model = language_model(name)
    prompt = texts().repeat(1, 3)
    options = {"prompt_lookup_num_tokens": 5, "num_assistant_tokens_schedule": "constant"}
    expected = generated(model, prompt, 60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NCWarning)  # of windows
        nc.accelerate_generation(model)
        tokens = by_plan(model)
        got = generated(model, prompt, 60, **options)
    assert torch.equal(got.sequences, expected.sequences)
    by_plans = name != "Mistral"
    assert ("several tokens of one text: by a plan" in status(model)) == bool(tokens) == by_plans


class _Pieces(list):
    """A streamer that keeps what it is given."""

    def put(self, value):
        self.extend(value.flatten().tolist())

    def end(self):
        self.append("end")


@pytest.mark.sample(2)
def test_assistants_streams_and_static_caches_give_the_texts_of_the_model():
    """An assistant proposes tokens by plans of its own; the model computes several at once by plans."""
    model, assistant = language_model(), language_model(num_hidden_layers=1)
    assistant.generation_config.assistant_confidence_threshold = 0  # it goes on though it is never sure
    calls = [
        lambda: generated(model, texts(), assistant_model=assistant).sequences,
        lambda: generated(model, texts(), cache_implementation="static").sequences,
        lambda: generated(model, texts(3), num_beams=2, num_return_sequences=2).sequences,
    ]
    expected = [call() for call in calls]
    nc.accelerate_generation(model)
    nc.accelerate_generation(assistant)
    proposed = by_plan(assistant)
    for call, own in zip(calls, expected, strict=True):
        assert torch.equal(call(), own)
    assert proposed
    assert "several tokens of one text: by a plan" in status(model)
    pieces = _Pieces()
    tokens = by_plan(model)
    text = generated(model, texts(), streamer=pieces).sequences
    assert pieces == [*text[0].tolist(), "end"]
    assert len(tokens) >= 19


@pytest.mark.parametrize("name", ["Llama", "Mistral", "GPT2"])
@pytest.mark.sample(1)
def test_long_texts(name):
    """Memory grows, windows slide, and positions go on."""
    model = language_model(name)
    expected = generated(model, texts(2, 30), 280)
    nc.accelerate_generation(model)
    same(generated(model, texts(2, 30), 280), expected)


@pytest.mark.parametrize("act_dtype", ["int8", "int8_block32", "bf16"])
@pytest.mark.sample(1)
def test_rounded_activations(act_dtype):
    """The kernels are those of the layers, so most values round as in the model."""
    model = language_model(act_dtype=act_dtype)
    expected = generated(model, texts())
    nc.accelerate_generation(model)
    got = generated(model, texts())
    assert worst_sqnr_db(list(expected.logits)[:4], list(got.logits)[:4]) > 30


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_models_in_bf16(name):
    """Compared with the same weights in fp32: a plan is no worse than the model's own operators in bf16."""
    model = language_model(name, dtype=torch.bfloat16)
    wide = copy.deepcopy(model).float()
    cache, own, exact = (empty_cache(model) for _ in range(3))
    with torch.no_grad():
        for each, states in ((model, cache), (model, own), (wide, exact)):
            each(texts(), past_key_values=states)
        given = {"input_ids": torch.tensor([[5]])}
        expected = wide(**given, past_key_values=exact).logits
        theirs = model(**given, past_key_values=own).logits
        nc.accelerate_generation(model)
        tokens = by_plan(model)
        ours = model(**given, past_key_values=cache)
    assert tokens
    assert ours.logits.dtype is torch.bfloat16
    assert worst_sqnr_db([expected], [ours.logits.float()]) > worst_sqnr_db([expected], [theirs.float()]) - 3


def test_the_cache_is_the_users():
    """It grows, and may be cut, copied, handed to the model itself, and used again."""
    model, ids = nc.accelerate_generation(language_model()), texts(1, 12)
    with torch.no_grad():
        whole = model(ids).logits
        cache = empty_cache(model)
        model(ids[:, :5], past_key_values=cache)
        for i in range(5, 10):
            got = model(ids[:, i : i + 1], past_key_values=cache).logits
            torch.testing.assert_close(got[:, 0], whole[:, i], rtol=1e-4, atol=1e-5)
            assert cache.get_seq_length() == i + 1
            assert cache.layers[1].keys.shape == (1, 2, i + 1, 16)
        cache.crop(7) if OLD else cache.crop(-3)
        other = copy.deepcopy(cache)
        for states in (cache, other):
            got = model(ids[:, 7:8], past_key_values=states).logits
            torch.testing.assert_close(got[:, 0], whole[:, 7], rtol=1e-4, atol=1e-5)
        got = model(ids[:, 8:], past_key_values=cache).logits  # several tokens: the model itself
        torch.testing.assert_close(got, whole[:, 8:], rtol=1e-4, atol=1e-5)


def test_the_cache_has_the_name_that_the_model_gives_it():
    """transformers 5.24 takes and gives `cache`, and warns where `past_key_values` is said.

    A call by either name is a step.
    """
    new = "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    model = language_model()
    assert cache_argument(model) == ("cache" if new else "past_key_values")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        nc.accelerate_generation(model)
    tokens = by_plan(model)
    for name in ("cache", "past_key_values") if new else ("past_key_values",):
        cache = empty_cache(model)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model(texts(), **{name: cache})
            before = len(tokens)
            output = model(input_ids=torch.tensor([[5]]), **{name: cache})
        assert len(tokens) == before + 1
        assert output[cache_field(type(output))] is cache


def test_names_of_caches():
    newer, older = {"cache": 1, "past_key_values": None}, {"past_key_values": 2}
    assert [cache_of(given) for given in (newer, older, {}, {"cache": None})] == [1, 2, None, None]
    for name in ("cache", "past_key_values"):
        output = dataclasses.make_dataclass("Output", ["logits", name])
        assert cache_field(output) == name


def test_what_plans_do_not_know_is_left_to_the_model():
    model = nc.accelerate_generation(language_model())
    tokens = by_plan(model)
    token = torch.tensor([[5]])

    def call(**more):
        cache = empty_cache(model)
        with torch.no_grad():
            model(texts(), past_key_values=cache)
            return model(input_ids=token, past_key_values=cache, **more)

    assert call(output_hidden_states=True).hidden_states is not None
    assert len(call(return_dict=False)) == 2
    assert call(labels=token).loss is not None
    with torch.autocast("cpu", torch.bfloat16):
        call()
    cache = empty_cache(model)
    model(texts(), past_key_values=cache)
    assert model(input_ids=token, past_key_values=cache).logits.requires_grad  # gradients
    hook = model.model.layers[0].register_forward_hook(lambda *_: None)
    call()
    hook.remove()
    expected = generated(model, texts(), cache_implementation="static").sequences
    assert not tokens
    assert torch.equal(generated(model, texts()).sequences, expected)
    assert tokens


def test_modes_and_threads():
    model = language_model()
    expected = generated(model, texts())
    nc.accelerate_generation(model)
    with torch.inference_mode():
        same(generated(model, texts()), expected)
    same(generated(model, texts()), expected)
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    same(generated(model, texts()), expected)
    torch.set_num_threads(before)
    found = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: generated(model, texts(1, 5 + i))}))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own_forward(model)
    for i in range(4):
        same(found[i], generated(model, texts(1, 5 + i)))


def test_changed_weights_are_followed():
    """Weights that are loaded, and those that change in place."""
    model, other = nc.accelerate_generation(language_model()), language_model()
    with torch.no_grad():
        for layer in (m for m in other.modules() if isinstance(m, nc.nn.QuantLinear)):
            layer.scale.mul_(1.5)
        other.model.norm.weight.mul_(0.5)
    expected = generated(other, texts())
    generated(model, texts())
    model.load_state_dict(other.state_dict())
    same(generated(model, texts()), expected)
    assert "by a plan" in status(model)


def test_a_forked_process_generates():
    """On threads of its own: those of OpenMP do not survive a fork."""
    program = (
        "import os, sys; sys.path.insert(0, 'test')\n"
        "import torch, nc; from suites.generation import generated, language_model, texts\n"
        "torch.set_num_threads(2)\n"
        "model = nc.accelerate_generation(language_model(**{'hidden_size': 256, 'intermediate_size': "
        "1024}))\nexpected = generated(model, texts()).sequences\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(0 if torch.equal(generated(model, texts()).sequences, expected) else 3)\n"
        "print('child', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["child 0"], done.stderr


def test_copies_and_files_hold_the_model_alone(tmp_path):
    model = language_model()
    expected = generated(model, texts())
    nc.accelerate_generation(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not status(other)
        same(generated(other, texts()), expected)
    nc.save(model, tmp_path / "saved")
    loaded = nc.load(tmp_path / "saved")
    assert not status(loaded)
    same(generated(loaded, texts()), expected)
    assert status(model)
    own_forward(model)
    assert "forward" not in vars(model)


def test_a_model_that_is_not_needed_goes():
    model = nc.accelerate_generation(language_model())
    generated(model, texts())
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def test_memory_goes_with_the_cache():
    model = nc.accelerate_generation(language_model())
    for _ in range(3):
        generated(model, texts())
    gc.collect()
    assert not model.forward._memories


def test_a_plan_that_is_wrong_is_not_used(monkeypatch):
    """At the start an error; for another kind of step, later, a warning, and the model goes on by itself."""
    run = decoding._run
    wrong = {False: False, True: True}
    monkeypatch.setattr(
        decoding,
        "_run",
        lambda step, kwargs, *rest: run(step, kwargs, *rest) * (1 + wrong[len(kwargs["input_ids"]) > 1]),
    )
    model = language_model()
    expected = generated(model, texts(2))
    nc.accelerate_generation(model)
    with pytest.warns(NCWarning, match="differs from LlamaForCausalLM's own"):
        got = generated(model, texts(2))
    assert torch.equal(got.sequences, expected.sequences)
    assert "batches: the model itself (A token by a plan differs" in status(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NCWarning)
        generated(model, texts(2))
    wrong[False] = True
    fresh = language_model()
    with pytest.raises(VerificationError, match="expected at least 60"):
        nc.accelerate_generation(fresh)
    assert "forward" not in vars(fresh)


def test_what_can_not_be_accelerated_says_why():
    with pytest.raises(InputError, match="has no `generate`"):
        nc.accelerate_generation(torch.nn.Linear(2, 2))
    plain = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**_LLAMA)).eval()
    with pytest.raises(InputError, match="no low-bit linear"):
        nc.accelerate_generation(plain)
    model = language_model()
    with pytest.raises(InputError, match="training mode"):
        nc.accelerate_generation(model.train())
    model.eval().model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="hooks inside"):
        nc.accelerate_generation(model)
    states = transformers.AutoModelForCausalLM.from_config(
        transformers.MambaConfig(
            vocab_size=96, hidden_size=64, num_hidden_layers=1, state_size=8, time_step_rank=32
        )
    )
    states = nc.quantize(states.eval(), nc.WeightOnlyConfig("int4", group_size=32))
    with pytest.raises(UnsupportedError, match="its cache"):
        nc.accelerate_generation(states)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_positions_that_change_with_the_length_are_named(rope):
    width = _LLAMA["hidden_size"] // _LLAMA["num_attention_heads"] // 2
    positions = {"rope_type": rope, "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    if rope == "longrope":
        positions |= {"short_factor": [1.0] * width, "long_factor": [2.0] * width}
    config = transformers.LlamaConfig(**_LLAMA, rope_scaling=positions)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model = nc.quantize(model, nc.WeightOnlyConfig("int4", group_size=32))
    with pytest.raises(UnsupportedError, match=f"rotary positions of type '{rope}'"):
        nc.accelerate_generation(model)
