"""Files of other tools: tiny layouts computed by hand, round trips bit for bit, refusals, altered files. The judges are in test/judges."""

import struct

import numpy as np
import pytest
import torch

from nc.errors import ArtefactCorruptError, ArtefactError, ArtefactMissingError, ArtefactSchemaError, UnsupportedError
from nc.interchange import gguf, gguf_writer
from nc.numerics.group_ranges import choose
from nc.numerics.groups import encode
from nc.numerics.packed_weight import PackedWeight, pack
from nc.spec.weight_format import DoubleQuant, WeightFormat


def weights(rows=16, columns=64, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def quantized(weight=None, rule="minmax", **fields):
    """Round to nearest."""
    form = WeightFormat(**{"dtype": "int4", "group_size": 32, "scale_dtype": "fp16", **fields})
    weight = weights() if weight is None else weight
    found = choose(weight, form, rule)
    return pack(encode(weight, found, form), found, form)


def same(a: PackedWeight, b: PackedWeight):
    """All that is stored is equal, and so are the weights, bit for bit."""
    assert (a.form, a.shape) == (b.form, b.shape)
    assert a.tensors().keys() == b.tensors().keys()
    for name, value in a.tensors().items():
        assert torch.equal(value, b.tensors()[name]), name
    assert torch.equal(a.dequantize().view(torch.int32), b.dequantize().view(torch.int32))


class TestGGUF:
    FORMS = {
        "Q4_0": {},
        "Q4_1": {"dtype": "uint4", "symmetric": False, "float_zero": True},
        "Q8_0": {"dtype": "int8"},
    }

    @pytest.mark.parametrize("kind", FORMS)
    def test_a_tensor_comes_back_bit_for_bit(self, kind, tmp_path):
        weight = quantized(**self.FORMS[kind])
        gguf_writer.write(tmp_path / "a.gguf", {"w": weight})
        file = gguf.read(tmp_path / "a.gguf")
        assert (file.tensors["w"].type, file.tensors["w"].shape) == (kind, (16, 64))
        same(file.packed("w"), weight)
        assert torch.equal(file.float("w"), weight.dequantize())

    def test_negative_scales_stay(self, tmp_path):
        weight = quantized(rule="wls")
        assert (weight.scale < 0).any()
        gguf_writer.write(tmp_path / "a.gguf", {"w": weight})
        same(gguf.read(tmp_path / "a.gguf").packed("w"), weight)

    def test_blocks_by_hand(self, tmp_path):
        """Half of the elements are in the low halves of the bytes, the others in the high ones."""
        block4 = struct.pack("<e", 0.5) + bytes([i | (15 - i) << 4 for i in range(16)])
        block5 = struct.pack("<ee", 0.5, -2.0) + bytes([i | (15 - i) << 4 for i in range(16)])
        block8 = struct.pack("<e32b", 0.25, *range(-16, 16))
        rising = torch.arange(16.0)
        expected = {
            2: torch.cat([rising - 8, 7 - rising]) * 0.5,
            3: torch.cat([rising, 15 - rising]) * 0.5 - 2,
            8: torch.arange(-16.0, 16.0) * 0.25,
        }
        for code, block in ((2, block4), (3, block5), (8, block8)):
            name = b"w"
            head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + name + struct.pack("<IQQIQ", 2, 32, 1, code, 0)
            path = tmp_path / f"{code}.gguf"
            path.write_bytes(head + bytes(-len(head) % 32) + block)
            read = gguf.read(path)
            assert torch.equal(read.float("w"), expected[code][None])
            gguf_writer.write(tmp_path / "again.gguf", {"w": read.packed("w")})
            assert (tmp_path / "again.gguf").read_bytes().rstrip(b"\0").endswith(block.rstrip(b"\0"))

    def test_floats_and_values_come_back(self, tmp_path):
        tensors = {str(d): weights(3, 5).to(d) for d in (torch.float32, torch.float16, torch.bfloat16)}
        values = {"a": "text é", "b": True, "c": -3, "d": 2**40, "e": 0.5, "f": ["x", ""], "g": [1, 2], "h": [], "i": [0.25, 1.5]}
        gguf_writer.write(tmp_path / "a.gguf", tensors, values)
        file = gguf.read(tmp_path / "a.gguf")
        assert file.values == {"general.alignment": 32, "general.quantization_version": 2, **values}
        assert all(torch.equal(file.float(name), tensor.float()) for name, tensor in tensors.items())
        assert all(info.start % 32 == 0 for info in file.tensors.values())

    @pytest.mark.parametrize(
        "fields",
        [
            {"group_size": 64},
            {"scale_dtype": "fp32"},
            {"dtype": "int3"},
            {"dtype": "nf4"},
            {"symmetric": False},
            {"dtype": "fp8_e4m3"},
            {"dtype": "int8", "symmetric": False, "float_zero": True},
        ],
    )
    def test_what_no_block_holds_is_refused(self, fields, tmp_path):
        with pytest.raises(UnsupportedError, match=r"Tensor 'layer.q': GGUF cannot hold .* group_size=32, scale_dtype=\"fp16\""):
            gguf_writer.write(tmp_path / "a.gguf", {"layer.q": quantized(**fields)})
        assert not (tmp_path / "a.gguf").exists()

    def test_double_quantized_scales_are_refused(self, tmp_path):
        form = WeightFormat(dtype="int4", group_size=32, scale_dtype="fp16", double_quant=DoubleQuant())
        plain = quantized()
        weight = PackedWeight(form=form, shape=plain.shape, codes=plain.codes, scale=plain.scale)
        with pytest.raises(UnsupportedError, match="cannot hold"):
            gguf_writer.write(tmp_path / "a.gguf", {"w": weight})

    @pytest.mark.parametrize("value", [{"k": None}, {"k": [1, "a"]}, {"k": [[1]]}])
    def test_values_without_a_type_are_refused(self, value, tmp_path):
        with pytest.raises(UnsupportedError, match="Key 'k'"):
            gguf_writer.write(tmp_path / "a.gguf", {}, value)

    def test_every_truncation_is_noticed(self, tmp_path):
        gguf_writer.write(tmp_path / "a.gguf", {"w": quantized()}, {"k": ["a", "bc"]})
        whole = (tmp_path / "a.gguf").read_bytes()
        path = tmp_path / "cut.gguf"
        for length in [*range(0, 300), len(whole) - 100]:
            path.write_bytes(whole[:length])
            with pytest.raises(ArtefactError):
                gguf.read(path)

    def test_no_altered_head_escapes_the_errors_of_nc(self, tmp_path):
        gguf_writer.write(tmp_path / "a.gguf", {"w": quantized(), "b": torch.ones(3)}, {"k": ["a", "bc"], "n": [1, 2]})
        whole = bytearray((tmp_path / "a.gguf").read_bytes())
        path = tmp_path / "bad.gguf"
        noticed = 0
        for at in range(280):
            for flip in (0x01, 0x80, 0xFF):
                altered = bytearray(whole)
                altered[at] ^= flip
                path.write_bytes(altered)
                try:
                    file = gguf.read(path)
                    for name in file.tensors:
                        file.float(name)
                except (ArtefactError, UnsupportedError):
                    noticed += 1
        assert noticed > 400

    def test_errors_have_types_and_say_where(self, tmp_path):
        with pytest.raises(ArtefactMissingError, match=r"no\.gguf"):
            gguf.read(tmp_path / "no.gguf")
        path = tmp_path / "a.gguf"
        path.write_bytes(b"GGML" + bytes(100))
        with pytest.raises(ArtefactSchemaError, match="not a GGUF file"):
            gguf.read(path)
        path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
        with pytest.raises(ArtefactSchemaError, match="little-endian"):
            gguf.read(path)
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0))
        with pytest.raises(ArtefactCorruptError, match="entries do not fit"):
            gguf.read(path)
        nan = quantized()
        nan.scale[0, 0] = torch.nan
        gguf_writer.write(path, {"w": nan})
        with pytest.raises(ArtefactCorruptError, match="'w' .* not finite"):
            gguf.read(path).packed("w")
        with pytest.raises(ArtefactError, match="no tensor 'v'"):
            gguf.read(path).float("v")

    def test_other_types_are_listed_and_refused_when_read(self, tmp_path):
        head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"w" + struct.pack("<IQQIQ", 2, 256, 1, 12, 0)
        (tmp_path / "a.gguf").write_bytes(head + bytes(-len(head) % 32 + 144))
        file = gguf.read(tmp_path / "a.gguf")
        assert file.tensors["w"].type == "type 12"
        with pytest.raises(UnsupportedError, match="type 12; nc reads F32, F16, BF16, Q4_0, Q4_1, Q8_0"):
            file.float("w")


@pytest.mark.parametrize("heads", [1, 3])
def test_rows_of_rotary_heads_are_put_back(heads):
    """Against llama.cpp's permutation, written from its definition: row (half, i) of a head becomes row (i, half)."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import smollm2

    original = weights(heads * 8, 4).numpy()
    permuted = np.empty_like(original)
    for head in range(heads):
        for half in range(2):
            for i in range(4):
                permuted[head * 8 + 2 * i + half] = original[head * 8 + half * 4 + i]
    assert np.array_equal(smollm2.halves(torch.from_numpy(permuted), heads).numpy(), original)
