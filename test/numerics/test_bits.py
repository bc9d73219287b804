"""Packed codes against a reference that goes bit by bit, and elements of every format against ml_dtypes."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from nc.formats import DTYPES, dtype, low_bit
from nc.numerics import bits, formats
from nc.numerics.groups import GroupParams, decode, encode

ORACLES = {
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


def reference_pack(codes, width):
    """The stream of bits of a row, the lowest bit of the first code first, cut into bytes."""
    return np.stack(
        [
            np.packbits([code >> i & 1 for code in row for i in range(width)], bitorder="little")
            for row in codes.tolist()
        ]
    )


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("count", [1, 3, 8, 33, 64])
def test_codes_are_a_stream_of_bits(width, count):
    codes = torch.randint(0, 2**width, (5, count), dtype=torch.uint8)
    codes[0] = 2**width - 1
    packed = bits.pack(codes, width)
    assert packed.shape == (5, bits.packed_size(count, width))
    assert np.array_equal(packed.numpy(), reference_pack(codes, width))
    assert torch.equal(bits.unpack(packed, width, count), codes)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_codes_that_are_not_contiguous_and_none_at_all(width):
    codes = torch.randint(0, 2**width, (16, 12), dtype=torch.uint8).T
    assert np.array_equal(bits.pack(codes, width).numpy(), reference_pack(codes, width))
    packed = torch.cat([bits.pack(codes, width), torch.zeros(12, 1, dtype=torch.uint8)], 1)[:, :-1]
    assert torch.equal(bits.unpack(packed, width, 16), codes)
    assert bits.unpack(bits.pack(codes[:0], width), width, 16).shape == (0, 16)


def numbers(found):
    """All values, all middles between neighbours, their fp32 neighbours, numbers beyond the largest, and many others."""
    finite = sorted({v for v in found.values if abs(v) <= found.largest})
    exact = torch.tensor(finite, dtype=torch.float64)
    special = torch.cat(
        [
            exact,
            (exact[1:] + exact[:-1]) / 2,
            torch.tensor([2 * found.largest, -2 * found.largest, 1e-30, -0.0]),
        ]
    ).float()
    infinite = torch.tensor(math.inf)
    spread = torch.randn(20_000) * torch.logspace(-4, 1, 20_000) * found.largest
    return torch.cat(
        [special, torch.nextafter(special, infinite), torch.nextafter(special, -infinite), spread]
    )


@pytest.mark.parametrize("name", ORACLES)
def test_elements_are_those_of_ml_dtypes(name):
    found = dtype(name)
    x = numbers(found)
    wanted = x.clamp(-found.largest, found.largest).numpy().astype(ORACLES[name])
    codes = formats.nearest_codes(x, found)
    values = formats.values(found)[codes.int()]
    assert np.array_equal(values.numpy(), wanted.astype(np.float32))
    assert np.array_equal(formats.nearest_values(x, found).numpy(), wanted.astype(np.float32))
    negative_zero = wanted.view(np.uint8) == 1 << (found.bits - 1)
    assert np.array_equal(codes.numpy(), np.where(negative_zero, 0, wanted.view(np.uint8)))
    assert torch.equal(formats.nearest_codes(x.double(), found), codes)


@pytest.mark.parametrize("name", ORACLES)
def test_codes_stand_for_the_values_of_ml_dtypes(name):
    found = dtype(name)
    codes = np.arange(2**found.bits, dtype=np.uint8)
    assert np.array_equal(
        np.array(found.values, np.float32), codes.view(ORACLES[name]).astype(np.float32), equal_nan=True
    )


@pytest.mark.parametrize("name", ["nf4", "af4", "af4_32", "mxint8"])
def test_elements_of_tables_are_the_nearest(name):
    found = dtype(name)
    x = numbers(found)
    chosen = np.array([v for v in found.values if abs(v) <= found.largest])
    codes = np.array([c for c, v in enumerate(found.values) if abs(v) <= found.largest])
    distance = np.abs(np.clip(x.double().numpy(), chosen.min(), chosen.max())[:, None] - chosen)
    ties = (distance == distance.min(1, keepdims=True)) * np.where(
        codes % 2 == 0, 2, 1
    )  # of two the even code
    assert np.array_equal(formats.nearest_codes(x, found).numpy(), codes[ties.argmax(1)])


def test_mxint8_is_symmetric():
    found = dtype("mxint8")
    assert (found.bits, found.largest) == (8, 127 / 64)
    assert list(found.values) == (np.arange(256, dtype=np.uint8).view(np.int8) / 64).tolist()
    assert formats.nearest_codes(torch.tensor([-9.0, -2.0, -127 / 64, 9.0]), found).tolist() == [
        129,
        129,
        129,
        127,
    ]


def test_af4_depends_on_the_group():
    for name in ("af4", "af4_32"):
        values = dtype(name).values
        assert list(values) == sorted(values)
        assert (values[0], values[7], values[15]) == (-1.0, 0.0, 1.0)
    assert dtype("af4").values != dtype("af4_32").values


@pytest.mark.parametrize(("name", "oracle"), [("int4", ml_dtypes.int4), ("int2", ml_dtypes.int2)])
def test_signed_codes_are_offset_binary(name, oracle):
    form = low_bit(dtype=name)
    low, high = int(ml_dtypes.iinfo(oracle).min), int(ml_dtypes.iinfo(oracle).max)
    whole = torch.arange(low, high + 1, dtype=torch.float32).unsqueeze(0)
    one = GroupParams(torch.ones(1, 1))
    codes = encode(whole, one, form)
    assert codes.tolist() == [list(range(2**form.bits))]
    assert np.array_equal(
        codes.numpy().astype(np.int16) - form.middle, whole.numpy().astype(oracle).astype(np.int16)
    )
    assert torch.equal(decode(codes, one, form), whole)
    ties = torch.tensor([[low - 3.0, -0.5, 0.5, 1.5, high + 9.0]])
    assert (encode(ties, one, form).int() - form.middle).tolist() == [[low, 0, 0, min(2, high), high]]


@pytest.mark.parametrize("width", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
def test_signed_and_unsigned_names_are_stored_alike(width, symmetric):
    from nc.numerics.group_ranges import choose
    from nc.numerics.packed_weight import pack

    weight = torch.randn(8, 64)
    stored = []
    for name in (f"int{width}", f"uint{width}"):
        form = low_bit(dtype=name, group_size=32, symmetric=symmetric)
        found = choose(weight, form)
        stored.append(pack(encode(weight, found, form), found, form))
    one, other = stored
    assert one.tensors().keys() == other.tensors().keys()
    assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in one.tensors().items())
    assert torch.equal(one.dequantize(), other.dequantize())


def test_every_format_has_one_code_per_value():
    for found in DTYPES.values():
        assert len(found.values) in (0, 2**found.bits)


@pytest.mark.parametrize("width", range(1, 9))
def test_strides_of_dimensions_of_length_1_do_not_matter(width):
    """torch calls such tensors contiguous whatever these strides are, and does not view them in another dtype."""
    codes = torch.arange(16).remainder(2**width).to(torch.uint8)
    row = codes.reshape(16, 1).T  # strides (1, 1)
    packed = bits.pack(row, width)
    assert torch.equal(packed, bits.pack(codes.reshape(1, 16).clone(), width))
    column = packed.T.contiguous().T  # likewise
    assert torch.equal(bits.unpack(column, width, 16), codes[None])
    one = packed[:, :1].T.clone().T
    assert torch.equal(bits.unpack(one, width, 1), codes[None, :1])
