"""Adapters of PEFT on a model with low-bit weights."""

import pytest
import torch
from suites.small_llama import random_llama

import nc
from nc import UnsupportedError, WeightOnlyConfig
from nc.nn import QuantLinear

peft = pytest.importorskip("peft", reason="peft is in requirements/judges.txt")
transformers = pytest.importorskip("transformers")


def adapted(dtype=torch.float32):
    model = nc.quantize(random_llama(vocab_size=50).to(dtype), WeightOnlyConfig("int4", group_size=16))
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    return model, lora


IDS = torch.arange(10).reshape(1, 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_adapter_changes_nothing(dtype):
    model, lora = adapted(dtype)
    before = model(IDS).logits.detach()
    wrapped = peft.get_peft_model(model, lora).eval()
    assert isinstance(wrapped.base_model.model.model.layers[0].self_attn.q_proj.base_layer, QuantLinear)
    assert torch.equal(wrapped(IDS).logits, before)
    assert wrapped.get_nb_trainable_parameters()[0] > 0


def with_adapter(model, lora):
    """Adapters with the same numbers, whatever the model."""
    wrapped = peft.get_peft_model(model, lora).train()
    generator = torch.Generator().manual_seed(3)
    trained = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for p in trained.values():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return wrapped, trained


def test_gradients_are_those_of_adapters_on_the_dequantized_weights():
    model, lora = adapted()
    plain = transformers.LlamaForCausalLM(model.config).eval()
    low_bit = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    kept = {
        name: value for name, value in model.state_dict().items() if name.rpartition(".")[0] not in low_bit
    }
    plain.load_state_dict(
        {**kept, **{f"{name}.weight": module.weight.dequantize() for name, module in low_bit.items()}}
    )
    found = []
    for each in (model, plain):
        wrapped, trained = with_adapter(each, lora)
        wrapped(input_ids=IDS, labels=IDS).loss.backward()
        found.append({name: p.grad for name, p in trained.items()})
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) == 12
    for name, gradient in found[0].items():
        assert float(gradient.abs().max()) > 0, name
        assert torch.allclose(gradient, found[1][name], rtol=1e-3, atol=1e-7), name


def test_an_adapter_learns_and_the_low_bit_weights_stay():
    model, lora = adapted()
    wrapped, trained = with_adapter(model, lora)
    codes = {name: b.clone() for name, b in wrapped.named_buffers() if name.endswith("codes")}
    optimizer = torch.optim.Adam(trained.values(), 3e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = wrapped(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.5
    assert codes
    assert all(torch.equal(b, codes[name]) for name, b in wrapped.named_buffers() if name in codes)


def test_an_adapter_is_saved_and_loaded(tmp_path):
    model, lora = adapted()
    wrapped = peft.get_peft_model(model, lora).eval()
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if "lora_B" in name:
                p.normal_()
    expected = wrapped(IDS).logits
    wrapped.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(adapted()[0], tmp_path).eval()
    assert torch.equal(again(IDS).logits, expected)


def test_merging_into_codes_is_refused():
    model, lora = adapted()
    wrapped = peft.get_peft_model(model, lora).eval()
    with pytest.raises(UnsupportedError, match="dequantize"):
        wrapped.merge_adapter()
