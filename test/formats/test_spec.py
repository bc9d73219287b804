"""Dtypes, granularities and specs as values.

Their texts, their plain form, and what they say when something is wrong.
"""

import json

import pytest
import torch

from nc import ConfigError
from nc.formats import (
    BF16,
    DTYPES,
    FLOAT,
    INT8,
    PER_CHANNEL,
    PER_TENSOR,
    PER_TOKEN,
    DoubleQuant,
    OpSpec,
    SmoothSpec,
    TensorFormat,
    dtype,
    granularity,
    low_bit,
    per_block,
    per_channel,
    per_group,
)

W8 = TensorFormat(dtype=INT8, symmetric=True, granularity=PER_CHANNEL, narrow=True)
W4 = TensorFormat(dtype=dtype("int4"), symmetric=True, granularity=per_group(-1, 32), narrow=True)
A8 = TensorFormat(dtype=dtype("uint8"), symmetric=False)


# ---- dtypes ----


@pytest.mark.parametrize("bits", range(2, 9))
def test_integers_have_every_code_of_their_bits(bits):
    signed, unsigned = dtype(f"int{bits}"), dtype(f"uint{bits}")
    assert (signed.quant_min, signed.quant_max) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    assert (unsigned.quant_min, unsigned.quant_max) == (0, 2**bits - 1)
    assert (signed.signed, unsigned.signed) == (True, False)
    assert {signed.bits, unsigned.bits} == {bits}


@pytest.mark.parametrize("name", ["int8", "uint8"])
def test_bytes_are_those_of_torch(name):
    info = torch.iinfo(getattr(torch, name))
    assert (info.min, info.max) == (dtype(name).quant_min, dtype(name).quant_max)
    assert dtype(name).storage == getattr(torch, name)


def test_storage_holds_every_code():
    for each in DTYPES.values():
        info = torch.iinfo(each.storage if each.kind == "integer" else torch.uint8)
        assert each.storage.itemsize == 1
        assert info.min <= each.quant_min
        assert each.quant_max <= info.max


def test_an_unknown_dtype_names_the_nearest_ones():
    with pytest.raises(ConfigError, match=r"no dtype 'int44' .* nearest names: int4"):
        dtype("int44")
    with pytest.raises(ConfigError, match="no dtype 4"):
        dtype(4)


# ---- granularity ----


@pytest.mark.parametrize(
    ("value", "text", "block"),
    [
        (PER_TENSOR, "per_tensor", (6, 8)),
        (PER_CHANNEL, "per_channel", (1, 8)),
        (per_channel(1), "per_channel axis 1", (6, 1)),
        (PER_TOKEN, "per_token", (1, 8)),
        (per_group(-1, 4), "per_group 4", (1, 4)),
        (per_group(0, 3), "per_group 3 axis 0", (3, 1)),
        (per_block((2, 4)), "per_block 2x4", (2, 4)),
        (per_block((2,)), "per_block 2", (1, 2)),
    ],
)
def test_a_granularity_is_a_text_and_a_block_size(value, text, block):
    assert str(value) == text
    assert granularity(text) == value
    assert value.block_size((6, 8), 0) == block


def test_output_channels_of_an_operator_without_any_are_the_whole_tensor():
    assert PER_CHANNEL.block_size((6, 8)) == (6, 8)


@pytest.mark.parametrize(
    ("value", "shape", "message"),
    [
        (
            per_group(-1, 32),
            (6, 48),
            "Blocks of 32 do not cover axis 1 of 48 elements; the nearest sizes that do: 24 and 48",
        ),
        (per_group(-1, 64), (6, 48), "the nearest sizes that do: 48"),
        (per_block((4, 4)), (6, 8), "do not cover axis 0 of 6"),
        (per_block((1, 2, 2)), (6, 8), "3 dimensions do not cover a tensor with 2"),
        (per_channel(2), (6, 8), "2 dimensions has no axis 2"),
    ],
)
def test_blocks_that_do_not_cover_a_tensor_are_refused(value, shape, message):
    with pytest.raises(ConfigError, match=message):
        value.block_size(shape)


@pytest.mark.parametrize(
    "text", ["per_row", "per_group", "per_group 0", "per_block", "per_block 2x", "per_group x", ""]
)
def test_a_text_that_is_no_granularity_is_refused(text):
    with pytest.raises(ConfigError, match="no granularity"):
        granularity(text)


# ---- specs ----


@pytest.mark.parametrize(
    ("spec", "mode", "precision"),
    [
        (FLOAT, "float", "fp32"),
        (BF16, "float", "bf16"),
        (OpSpec(activation=A8), "static", "int8"),
        (OpSpec(activation=A8, weight=W8), "static", "int8"),
        (
            OpSpec(activation=TensorFormat(dtype=INT8, symmetric=True, dynamic=True), weight=W8),
            "dynamic",
            "int8",
        ),
        (OpSpec(weight=W4), "weight_only", "int4 per_group 32, weight only"),
    ],
)
def test_the_mode_of_an_operator(spec, mode, precision):
    assert (spec.mode, spec.precision) == (mode, precision)
    assert spec.quantized == (mode != "float")


@pytest.mark.parametrize(
    "spec",
    [
        FLOAT,
        BF16,
        OpSpec(weight=W4),
        OpSpec(activation=A8, right=A8),
        OpSpec(activation=A8, weight=W8, smooth=SmoothSpec(alpha=None)),
    ],
)
def test_specs_come_back_from_plain_values(spec):
    assert OpSpec.from_dict(spec.to_dict()) == spec


def test_the_plain_form_of_int8_is_that_of_saved_artefacts():
    assert OpSpec(activation=A8, weight=W8).to_dict() == {
        "activation": {"dtype": "uint8", "symmetric": False, "granularity": "per_tensor"},
        "weight": {"dtype": "int8", "granularity": "per_channel", "narrow": True},
        "right": None,
        "smooth": None,
        "bf16": False,
    }


def test_a_spec_takes_names():
    assert TensorFormat(dtype="int4", symmetric=True, granularity="per_group 32", narrow=True) == W4
    assert str(W4) == "int4 sym per_group 32"
    assert (W4.quant_min, W4.quant_max) == (-7, 7)


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        (
            '{"dtype": "int4", "group_size": 64, "symmetric": false, "scale_dtype": "fp16", "double_quant": '
            '{"bits": 6, "group_size": 8, "outer_dtype": "fp16"}, "float_zero": false, "tensor_scale": false, '
            '"scale_mode": "floor"}',
            low_bit(
                dtype="int4",
                group_size=64,
                symmetric=False,
                scale_dtype="fp16",
                double_quant=DoubleQuant(6, 8, "fp16"),
            ),
        ),
        (
            '{"dtype": "int8", "group_size": -1, "symmetric": true, "scale_dtype": "fp32", "double_quant": null, '
            '"float_zero": false, "tensor_scale": false, "scale_mode": "floor"}',
            low_bit(dtype="int8"),
        ),
        (
            '{"dtype": "int4", "granularity": "per_group", "axis": -1, "group_size": 16, "symmetric": true, '
            '"round_method": "floor", "scale_type": "bf16", "tensor_scale": false, "observer": "minmax", "dynamic": '
            'false, "seed": 0}',
            low_bit(dtype="int4", group_size=16, scale_dtype="bf16", round_method="floor"),
        ),
        (
            '{"dtype": "fp8_e4m3", "granularity": "per_channel", "axis": 1, "symmetric": true, "round_method": '
            '"half_even", "scale_type": "fp32", "tensor_scale": false, "observer": "minmax", "dynamic": false, '
            '"seed": 0}',
            TensorFormat(dtype="fp8_e4m3", granularity="per_channel axis 1"),
        ),
        (
            '{"dtype": "int8", "granularity": "per_block", "block_size": [1, 8], "symmetric": true, "round_method": '
            '"half_even", "scale_type": "fp32", "tensor_scale": false, "observer": "minmax", "dynamic": true, '
            '"seed": 0}',
            TensorFormat(dtype="int8", granularity="per_block 1x8", dynamic=True),
        ),
    ],
)
def test_formats_that_earlier_versions_wrote_are_read(earlier, now):
    assert TensorFormat.from_dict(json.loads(earlier)) == now
    assert TensorFormat.from_dict(json.loads(json.dumps(now.to_dict()))) == now


@pytest.mark.parametrize("name", [5, None, ["int8"], "int9"])
def test_a_dtype_of_a_file_that_is_no_name_is_a_config_error(name):
    with pytest.raises(ConfigError, match="There is no dtype"):
        TensorFormat.from_dict({"dtype": name, "granularity": "per_tensor"})
