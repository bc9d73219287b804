"""`attn_implementation="nc_flash"`: models of transformers against their own attention with padding."""

import copy
import threading
import types

import pytest
import torch
import transformers
from transformers import BertConfig, BertModel, GenerationConfig, LlamaConfig, LlamaForCausalLM

import nc
from nc.errors import BackendUnavailableError, CaptureError, InputError, UnsupportedError
from nc.hf import attention, register_attention
from nc.kernels import flash

_WHY = flash.why_unavailable()
pytestmark = pytest.mark.skipif(bool(_WHY), reason=_WHY or "it can run")
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
needs_5 = pytest.mark.skipif(VERSION < (5, 0), reason="transformers 4 is refused")
BERT = BertConfig(
    num_hidden_layers=2, hidden_size=48, num_attention_heads=4, intermediate_size=64, vocab_size=100
)
LLAMA = LlamaConfig(
    **{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 64, "vocab_size": 100, "pad_token_id": 0, "eos_token_id": None},
)
LENGTHS = [5, 1, 17]


def pair(kind, config, other="sdpa", **options):
    """The same model with an attention of transformers, and with ours."""
    register_attention()
    models = [
        kind._from_config(copy.deepcopy(config), attn_implementation=name, **options).eval()
        for name in (other, "nc_flash")
    ]
    models[1].load_state_dict(models[0].state_dict())
    assert models[1].config._attn_implementation == "nc_flash"
    return models


def padded(*, left=False):
    """Tokens, and true for what is no padding."""
    place, lengths = torch.arange(max(LENGTHS))[None], torch.tensor(LENGTHS)[:, None]
    mask = place >= max(LENGTHS) - lengths if left else place < lengths
    return torch.randint(1, 100, mask.shape) * mask, mask


@pytest.fixture
def calls(monkeypatch):
    """Rows of queries of each call of our attention."""
    rows, real = [], flash._packed
    monkeypatch.setattr(flash, "_packed", lambda fields: (rows.append(dict(fields)["rows"]), real(fields))[1])
    return rows


@needs_5
@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 2e-6), (torch.bfloat16, 0.05)])
def test_an_encoder_computes_nothing_for_padding(calls, dtype, slack):
    theirs, ours = pair(BertModel, BERT, dtype=dtype)
    tokens, mask = padded()
    with torch.inference_mode():
        expected = theirs(tokens, attention_mask=mask.long()).last_hidden_state[mask]
        found = ours(tokens, attention_mask=mask.long()).last_hidden_state[mask]
        every = ours(tokens).last_hidden_state
        torch.testing.assert_close(every, theirs(tokens).last_hidden_state, rtol=0, atol=slack)
    torch.testing.assert_close(found, expected, rtol=0, atol=slack)
    assert calls == [sum(LENGTHS)] * 2 + [mask.numel()] * 2


@needs_5
@pytest.mark.parametrize("said", ["by starts", "by positions"])
def test_an_encoder_takes_texts_one_after_the_other(calls, said):
    theirs, ours = pair(BertModel, BERT)
    tokens, mask = padded()
    flat = {"input_ids": tokens[mask][None], "position_ids": torch.cat([*map(torch.arange, LENGTHS)])[None]}
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    if said == "by starts":
        flat |= {f"cu_seq_lens_{x}": starts for x in "qk"} | {f"max_length_{x}": max(LENGTHS) for x in "qk"}
    with torch.inference_mode():
        expected = theirs(tokens, attention_mask=mask.long()).last_hidden_state[mask]
        torch.testing.assert_close(ours(**flat).last_hidden_state[0], expected, rtol=0, atol=2e-6)
    assert calls == [sum(LENGTHS)] * 2


@needs_5
def test_an_encoder_with_windows():
    config = transformers.ModernBertConfig(
        **{"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32},
        **{"vocab_size": 100, "local_attention": 6, "global_attn_every_n_layers": 3, "pad_token_id": 0},
    )
    theirs, ours = pair(transformers.ModernBertModel, config)
    tokens, mask = padded()
    with torch.inference_mode():
        expected = theirs(tokens, attention_mask=mask.long()).last_hidden_state[mask]
        found = ours(tokens, attention_mask=mask.long()).last_hidden_state[mask]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@needs_5
def test_capped_scores_and_windows_of_a_decoder():
    config = transformers.Gemma2Config(
        **{"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 12, "intermediate_size": 32, "vocab_size": 100, "sliding_window": 6},
        **{"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 1},
    )
    theirs, ours = pair(transformers.Gemma2Model, config, "eager")
    tokens, mask = padded(left=True)
    with torch.inference_mode():
        expected, found = (
            m(tokens, attention_mask=mask.long()).last_hidden_state[mask] for m in (theirs, ours)
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)


@needs_5
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_generates_the_same_tokens(calls, dtype):
    theirs, ours = pair(LlamaForCausalLM, LLAMA)
    if dtype is torch.bfloat16:  # whose ties would be decided by rounding
        ours.to(dtype)
    tokens, mask = padded(left=True)
    options = {"attention_mask": mask.long(), "max_new_tokens": 8, "do_sample": False}
    with torch.inference_mode():
        found = ours.generate(tokens, **options)
        if dtype is torch.float32:
            assert torch.equal(found, theirs.generate(tokens, **options))
    assert calls == [n for n in (sum(LENGTHS), *[len(LENGTHS)] * 7) for _ in range(2)]


@needs_5
@pytest.mark.parametrize("new", [1, 3])
def test_a_cache_with_padding_and_several_new_tokens(new):
    theirs, ours = pair(LlamaForCausalLM, LLAMA)
    tokens, mask = padded(left=True)
    more, found = torch.randint(1, 100, (3, new)), []
    for model in (theirs, ours):
        with torch.inference_mode():
            before = model(tokens, attention_mask=mask.long(), use_cache=True).past_key_values
            whole = torch.cat([mask, torch.ones(3, new, dtype=torch.bool)], 1).long()
            found.append(model(more, attention_mask=whole, past_key_values=before).logits)
    torch.testing.assert_close(*found, rtol=0, atol=2e-6)


@needs_5
@pytest.mark.parametrize("rows", [1, 6, 17, 20])
def test_a_decoder_reads_all_that_its_encoder_saw(rows):
    """Also with as many rows of queries as of keys: padding of the one is not that of the other."""
    config = transformers.BartConfig(
        **{"encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "vocab_size": 100, "pad_token_id": 0},
        **{
            f"{side}_{name}": n
            for side in ("encoder", "decoder")
            for name, n in (("attention_heads", 4), ("ffn_dim", 32))
        },
    )
    theirs, ours = pair(transformers.BartModel, config)
    tokens, mask = padded()
    begun = torch.randint(1, 100, (3, rows))
    with torch.inference_mode():
        expected, found = (
            m(tokens, attention_mask=mask.long(), decoder_input_ids=begun).last_hidden_state
            for m in (theirs, ours)
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@pytest.mark.skipif(VERSION < (5, 20), reason="older versions want a name that begins with paged|")
def test_continuous_batching_generates_the_same_tokens(calls):
    theirs, ours = pair(LlamaForCausalLM, LLAMA)
    prompts = [torch.randint(1, 100, (n,)).tolist() for n in (5, 30, 11)]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    small = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    found = ours.generate_batch(
        prompts,
        generation_config=GenerationConfig(**options, eos_token_id=-1),
        continuous_batching_config=small,
        progress_bar=False,
    )
    by_prompt = {tuple(each.prompt_ids): each.generated_tokens for each in found.values()}
    for prompt in prompts:
        whole = theirs.generate(torch.tensor([prompt]), **options)
        assert by_prompt[tuple(prompt)] == whole[0, len(prompt) :].tolist()
    assert calls


@needs_5
def test_a_model_with_quantized_weights():
    """It may have no `torch.nn.Linear`, whose dtype transformers' function for flash-attn reads."""
    theirs, ours = pair(BertModel, BERT)
    config = nc.WeightOnlyConfig("int8", group_size=-1)
    theirs, ours = (nc.quantize(m, config, inplace=True) for m in (theirs, ours))
    tokens, mask = padded()
    with torch.inference_mode():
        expected, found = (
            m(tokens, attention_mask=mask.long()).last_hidden_state[mask] for m in (theirs, ours)
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)


@needs_5
def test_sentence_transformers_leaves_padding_out(tmp_path, calls):
    st = pytest.importorskip("sentence_transformers")
    words = ["the", "cat", "a", "dog", "sat", "on", "mat"]
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    BertModel(BERT).save_pretrained(tmp_path)
    texts = ["the cat", "a dog sat on the mat", "the"]
    register_attention()
    theirs, ours = (
        st.SentenceTransformer(str(tmp_path), model_kwargs={"attn_implementation": name})
        for name in ("sdpa", "nc_flash")
    )
    torch.testing.assert_close(
        torch.tensor(ours.encode(texts)), torch.tensor(theirs.encode(texts)), rtol=0, atol=2e-6
    )
    assert set(calls) == {sum(len(text.split()) + 2 for text in texts)}


# --- what is refused


@needs_5
def test_what_it_does_not_compute_is_an_error():
    _, ours = pair(LlamaForCausalLM, LLAMA)
    tokens, _ = padded()
    with pytest.raises(UnsupportedError, match="no gradient: call the model under"):
        ours(tokens)
    with torch.inference_mode():
        attend, layer = attention._attend, ours.model.layers[0].self_attn
        q = torch.randn(1, 4, 3, 16)
        with pytest.raises(UnsupportedError, match="no attention sinks, which LlamaAttention uses"):
            attend(layer, q, q, q, None, s_aux=torch.zeros(4))
        with pytest.raises(UnsupportedError, match="no weights for output_attentions"):
            attend(layer, q, q, q, None, output_attentions=True)
        with pytest.raises(UnsupportedError, match=r"as \[texts, keys\], not \[1, 1, 3, 3\]"):
            attend(layer, q, q, q, torch.zeros(1, 1, 3, 3))
        with pytest.raises(InputError, match="dropout_p is 0.1"):
            attend(layer, q, q, q, None, dropout=0.1)
        with pytest.raises(InputError, match="q is torch.float16"):
            ours.half()(tokens)


@needs_5
def test_a_model_that_is_captured():
    _, ours = pair(BertModel, BERT)
    with pytest.raises(CaptureError, match='is not a graph operator: capture the model with "sdpa"'):
        nc.quantize(ours, nc.DynamicQuantConfig(), example_inputs={"input_ids": padded()[0]})


def test_a_version_without_the_names_is_named():
    module = types.ModuleType("transformers.elsewhere")
    with pytest.raises(
        UnsupportedError, match=r"transformers 5.99: it has no transformers.elsewhere._lazy_imports\."
    ):
        attention._check_version("5.99", {module: ("_lazy_imports", "__name__")})
    with pytest.raises(UnsupportedError, match=r"transformers 4.55.4: its encoders .*Install transformers 5"):
        attention._check_version("4.55.4", {})


def test_where_there_is_no_code_the_error_says_why(monkeypatch):
    monkeypatch.setattr(flash, "why_unavailable", lambda: "there is no C compiler")
    with pytest.raises(BackendUnavailableError, match="nc_flash.*there is no C compiler"):
        register_attention()


@needs_5
def test_registering_again_changes_nothing():
    """Also on several threads at once."""
    register_attention()
    utils = transformers.modeling_flash_attention_utils
    before = utils._lazy_imports
    threads = [threading.Thread(target=register_attention) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert utils._lazy_imports is before
    assert register_attention() == "nc_flash"


def test_other_attentions_are_imported_as_before():
    asked = []
    utils = types.SimpleNamespace(
        **{"_pad_input": 1, "_unpad_input": 2, "_flash_with_kvcache_fn": None},
        _lazy_imports=lambda *args, **kwargs: asked.append((args, kwargs)),
    )
    attention._lend_functions(utils)
    utils._lazy_imports("another", None, allow_all_kernels=True)
    assert asked == [(("another", None), {"allow_all_kernels": True})]
    assert utils._lazy_imports("nc_flash") == (
        *(flash.flash_attn_func, flash.flash_attn_varlen_func, flash.flash_attn_with_kvcache),
        *(1, 2),
    )
