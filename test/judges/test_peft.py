"""Adapters of PEFT on a model with low-bit weights."""

import pytest
import torch

import nc
from nc import UnsupportedError, WeightOnlyConfig
from nc.nn import QuantLinear

peft = pytest.importorskip("peft", reason="peft is in requirements/judges.txt")
transformers = pytest.importorskip("transformers")


def adapted(dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = nc.quantize(transformers.LlamaForCausalLM(config).to(dtype).eval(), WeightOnlyConfig("int4", group_size=16))
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
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


def test_an_adapter_learns_and_the_low_bit_weights_stay():
    model, lora = adapted()
    wrapped = peft.get_peft_model(model, lora)
    codes = {name: b.clone() for name, b in wrapped.named_buffers() if name.endswith("codes")}
    optimizer = torch.optim.Adam([p for p in wrapped.parameters() if p.requires_grad], 3e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = wrapped(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    first = wrapped.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"].weight
    assert float(first.grad.abs().max()) > 0  # the gradient went through all low-bit layers behind it
    assert losses[-1] < 0.8 * losses[0]
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
