"""What low-bit weights of a layer cost, by gradients: against the divergence and the power measured layer by layer."""

import copy

import pytest
import torch
import transformers
from suites.small_llama import small_llama
from torch import nn

import nc
from nc.errors import InputError
from nc.tuning.distance import closeness
from nc.tuning.front import rank_correlation
from nc.tuning.low_bit_noise import noise_of


def with_layer(model, name, layer):
    changed = copy.deepcopy(model)
    parent, _, child = name.rpartition(".")
    setattr(changed.get_submodule(parent), child, layer)
    return changed


def rounded(model, bits):
    return nc.quantize(model, nc.WeightOnlyConfig(f"int{bits}", group_size=32), measure=False)


def options_of(model, names, bits):
    low_bit = {b: rounded(model, b) for b in bits}
    return {name: {str(b): low_bit[b].get_submodule(name) for b in bits} for name in names}


def test_the_estimate_is_the_divergence_that_one_layer_causes():
    model = small_llama()
    random = torch.Generator().manual_seed(1)
    calls = [((), {"input_ids": torch.randint(0, 64, (8, 32), generator=random)}) for _ in range(24)]
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    options = options_of(model, names, (4, 6))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = noise_of(model, calls, options)
    pairs = []
    for name in names:
        for option, layer in options[name].items():
            measured = -closeness(model, with_layer(model, name, layer), calls)
            pairs.append((found[name][option], measured))
    ratios = sorted(estimate / measured for estimate, measured in pairs)
    assert 0.7 < ratios[len(ratios) // 2] < 1.4
    assert rank_correlation([a for a, _ in pairs], [b for _, b in pairs]) > 0.95
    # the user's model is as it was
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_two_draws_of_a_call_are_one_of_each_of_two():
    model = small_llama()
    call = ((), {"input_ids": torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(2))})
    options = options_of(model, ["model.layers.0.self_attn.v_proj", "lm_head"], (4,))
    twice, again = noise_of(model, [call], options, draws=2), noise_of(model, [call, call], options)
    assert twice == {name: pytest.approx(each, rel=1e-6) for name, each in again.items()}
    assert twice != {name: pytest.approx(each) for name, each in noise_of(model, [call], options).items()}


def test_padding_counts_for_nothing():
    model = small_llama()
    ids = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[:, 20:] = 0
    other = torch.where(mask.bool(), ids, 5)
    options = options_of(model, ["model.layers.1.mlp.down_proj"], (4,))
    one, two = (
        noise_of(model, [((), {"input_ids": each, "attention_mask": mask})], options) for each in (ids, other)
    )
    assert one == two


class Twice(nn.Module):
    """A layer that is called twice, one that changes its input in place, and one that is not called."""

    def __init__(self):
        super().__init__()
        self.shared, self.last, self.idle = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.shared(x)
        hidden.relu_()
        return {"embedding": self.last(self.shared(hidden))}


def test_other_outputs_are_judged_by_their_power():
    torch.manual_seed(0)
    model = Twice().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    calls = [((torch.randn(1, 16),), {}) for _ in range(600)]
    low_bit = nc.quantize(model, nc.WeightOnlyConfig("int4", group_size=-1), measure=False)
    options = {name: {"int4": low_bit.get_submodule(name)} for name in ("shared", "last", "idle")}
    found = noise_of(model, calls, options)
    lost = 0.0
    for call in calls:
        lost += 1 - closeness(model, with_layer(model, "last", options["last"]["int4"]), [call])
    assert found["last"]["int4"] == pytest.approx(lost / len(calls), rel=0.2)
    assert found["shared"]["int4"] > 0
    assert "idle" not in found  # nothing is known of it


def test_outputs_without_a_gradient_are_a_typed_error():
    class Blind(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            with torch.no_grad():
                return self.layer(x).detach()

    model = Blind().eval()
    options = {"layer": {"same": nn.Linear(8, 8)}}
    with pytest.raises(InputError, match="no gradient"):
        noise_of(model, [((torch.randn(2, 8),), {})], options)


def classifier(labels):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(**sizes, vocab_size=64, num_labels=labels)
    return transformers.BertForSequenceClassification(config).eval()


@pytest.mark.parametrize("labels", [1, 3])
def test_a_score_is_no_distribution(labels):
    """The softmax of one number is 1 whatever the weights are: such outputs are judged by their power."""
    model = classifier(labels)
    calls = [((), {"input_ids": torch.randint(0, 64, (4, 16))}) for _ in range(2)]
    low_bit = rounded(model, 2)
    kept = closeness(model, low_bit, calls)
    assert kept < (1.0 if labels == 1 else 0.0)
    names = ["bert.encoder.layer.0.output.dense"]
    found = noise_of(model, calls, {names[0]: {"int2": low_bit.get_submodule(names[0])}})
    assert found[names[0]]["int2"] > 0


def test_logits_that_are_masked_add_nothing():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 6)

        def forward(self, x):
            mask = torch.tensor([0.0, 0.0, -torch.inf, 0.0, -torch.inf, 0.0])
            return {"logits": self.layer(x) + mask}

    torch.manual_seed(0)
    model = Masked().eval()
    calls = [((torch.randn(16, 8),), {})]
    divergence = -closeness(
        model, nc.quantize(model, nc.WeightOnlyConfig("int3", group_size=-1), measure=False), calls
    )
    with torch.no_grad():
        low_bit = nc.quantize(model, nc.WeightOnlyConfig("int3", group_size=-1), measure=False)
        a, b = (
            m(calls[0][0][0])["logits"][:, [0, 1, 3, 5]].double().log_softmax(-1) for m in (model, low_bit)
        )
    assert divergence == pytest.approx(float((a.exp() * (a - b)).sum() / 16), rel=1e-4)


def test_models_that_write_into_their_inputs():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x.mul_(2))

    torch.manual_seed(0)
    model = Writes().eval()
    x = torch.randn(16, 8)
    calls = [((x.clone(),), {})]
    low_bit = nc.quantize(model, nc.WeightOnlyConfig("int8", group_size=-1), measure=False)
    assert closeness(model, low_bit, calls) > 0.999
    noise_of(model, calls, {"layer": {"int8": low_bit.get_submodule("layer")}})
    assert torch.equal(calls[0][0][0], x)


def test_layers_that_are_called_by_keyword():
    class ByName(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(input=x)

    model = ByName().eval()
    other = nn.Linear(8, 8)
    assert noise_of(model, [((torch.randn(4, 8),), {})], {"layer": {"other": other}})["layer"]["other"] > 0


def test_padding_alone_and_nan_are_typed_errors():
    model = small_llama()
    ids = torch.randint(0, 64, (2, 8))
    options = {"model.layers.0.mlp.up_proj": {"same": model.model.layers[0].mlp.up_proj}}
    with pytest.raises(InputError, match="nothing but padding"):
        noise_of(model, [((), {"input_ids": ids, "attention_mask": torch.zeros_like(ids)})], options)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(InputError, match="hold NaN"):
        noise_of(model, [((), {"input_ids": ids})], options)
