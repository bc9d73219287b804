"""Files of other tools: tiny layouts computed by hand, round trips bit for bit, refusals, altered files.

The judges are in test/judges.
"""

import copy
import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from suites.small_llama import random_llama

from nc.errors import (
    ArtefactCorruptError,
    ArtefactError,
    ArtefactMissingError,
    ArtefactSchemaError,
    ConfigError,
    NCWarning,
    StateError,
    UnsupportedError,
)
from nc.formats.tensor_format import DoubleQuant, low_bit
from nc.interchange import export_weights, gguf, gguf_writer, import_weights, read_weights
from nc.nn import QuantEmbedding, QuantLinear
from nc.numerics.group_ranges import choose
from nc.numerics.groups import encode
from nc.numerics.packed_weight import PackedWeight, pack


def weights(rows=16, columns=64, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def quantized(weight=None, rule="minmax", **fields):
    """Round to nearest."""
    form = low_bit(**{"dtype": "int4", "group_size": 32, "scale_dtype": "fp16", **fields})
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
            head = (
                b"GGUF"
                + struct.pack("<IQQ", 3, 1, 0)
                + struct.pack("<Q", 1)
                + name
                + struct.pack("<IQQIQ", 2, 32, 1, code, 0)
            )
            path = tmp_path / f"{code}.gguf"
            path.write_bytes(head + bytes(-len(head) % 32) + block)
            read = gguf.read(path)
            assert torch.equal(read.float("w"), expected[code][None])
            gguf_writer.write(tmp_path / "again.gguf", {"w": read.packed("w")})
            assert (tmp_path / "again.gguf").read_bytes().rstrip(b"\0").endswith(block.rstrip(b"\0"))

    def test_floats_and_values_come_back(self, tmp_path):
        tensors = {str(d): weights(3, 5).to(d) for d in (torch.float32, torch.float16, torch.bfloat16)}
        values = {
            "a": "text é",
            "b": True,
            "c": -3,
            "d": 2**40,
            "e": 0.5,
            "f": ["x", ""],
            "g": [1, 2],
            "h": [],
            "i": [0.25, 1.5],
        }
        gguf_writer.write(tmp_path / "a.gguf", tensors, values)
        file = gguf.read(tmp_path / "a.gguf")
        known = {"general.quantized_by": "written by nc", "general.alignment": 32}
        assert file.values == {**known, "general.quantization_version": 2, **values}
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
        with pytest.raises(
            UnsupportedError,
            match=r"Tensor 'layer.q': GGUF cannot hold .* group_size=32, scale_dtype=\"fp16\"",
        ):
            gguf_writer.write(tmp_path / "a.gguf", {"layer.q": quantized(**fields)})
        assert not (tmp_path / "a.gguf").exists()

    def test_double_quantized_scales_are_refused(self, tmp_path):
        form = low_bit(dtype="int4", group_size=32, scale_dtype="fp16", double_quant=DoubleQuant())
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
        gguf_writer.write(
            tmp_path / "a.gguf", {"w": quantized(), "b": torch.ones(3)}, {"k": ["a", "bc"], "n": [1, 2]}
        )
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
        with pytest.raises(ArtefactError, match=r"a\.gguf' exists, and is not an earlier result"):
            gguf_writer.write(path, {"w": nan})
        path.unlink()
        for _ in range(2):
            gguf_writer.write(path, {"w": nan})
        with pytest.raises(ArtefactCorruptError, match="'w' .* not finite"):
            gguf.read(path).packed("w")
        with pytest.raises(ArtefactError, match="no tensor 'v'"):
            gguf.read(path).float("v")

    def test_other_types_are_listed_and_refused_when_read(self, tmp_path):
        head = (
            b"GGUF"
            + struct.pack("<IQQ", 3, 1, 0)
            + struct.pack("<Q", 1)
            + b"w"
            + struct.pack("<IQQIQ", 2, 256, 1, 12, 0)
        )
        (tmp_path / "a.gguf").write_bytes(head + bytes(-len(head) % 32 + 144))
        file = gguf.read(tmp_path / "a.gguf")
        assert file.tensors["w"].type == "type 12"
        with pytest.raises(UnsupportedError, match="type 12; nc reads F32, F16, BF16, Q4_0, Q4_1, Q8_0"):
            file.float("w")


@pytest.mark.parametrize("heads", [1, 3])
def test_rows_of_rotary_heads_are_put_back(heads):
    """Against llama.cpp's permutation, written from its definition.

    Row (half, i) of a head becomes row (i, half).
    """
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import smollm2

    original = weights(heads * 8, 4).numpy()
    permuted = np.empty_like(original)
    for head in range(heads):
        for half in range(2):
            for i in range(4):
                permuted[head * 8 + 2 * i + half] = original[head * 8 + half * 4 + i]
    assert np.array_equal(smollm2.halves(torch.from_numpy(permuted), heads).numpy(), original)


FORMATS = ("compressed-tensors", "gptq", "awq", "quark")
ASYM = {"dtype": "uint4", "symmetric": False}


def words(rows):
    """Words of eight nibbles, the first in the lowest bits, as int32."""
    return torch.tensor(
        [[sum(int(n) << 4 * i for i, n in enumerate(word)) for word in row] for row in rows]
    ).to(torch.int32)


def written(weight, path, format, name="a.b"):
    export_weights({name: weight}, path, format)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    return load_file(path / "model.safetensors"), config


def changed(path, change, config=None):
    """Files with other tensors or another quantization_config."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    if config:
        document = json.loads((path / "config.json").read_text())
        document["quantization_config"].update(config)
        (path / "config.json").write_text(json.dumps(document))


def with_a_zero_of_0():
    """A weight of which a zero point is 0, so that version 1 of GPTQ cannot hold it."""
    weight = quantized(dtype="uint4", symmetric=False)
    weight.zero[3, 0] &= 0xF0
    return weight


def negative():
    """A symmetric weight some of whose scales are negative."""
    weight = quantized(rule="wls")
    assert 0 < (weight.scale < 0).sum() < weight.scale.numel()
    return weight


class TestRoundTrips:
    @pytest.mark.parametrize("format", FORMATS)
    @pytest.mark.parametrize(
        "fields", [{}, {"group_size": 16}, {"group_size": -1}, ASYM, {**ASYM, "group_size": -1}]
    )
    def test_four_bits(self, format, fields, tmp_path):
        weight = quantized(**fields)
        if not weight.form.symmetric:
            assert (weight.params.zero != 8).any()
        export_weights({"a.b": weight}, tmp_path, format)
        found = read_weights(tmp_path)
        assert (found.format, list(found.layers), found.tensors) == (format, ["a.b"], {})
        same(found.layers["a.b"].weight, weight)

    @pytest.mark.parametrize(
        ("format", "bits"),
        [("compressed-tensors", 2), ("compressed-tensors", 8), ("gptq", 2), ("gptq", 8), ("quark", 8)],
    )
    @pytest.mark.parametrize("symmetric", [True, False])
    def test_other_bits(self, format, bits, symmetric, tmp_path):
        weight = quantized(dtype=f"{'' if symmetric else 'u'}int{bits}", symmetric=symmetric)
        if not symmetric:
            weight.zero[:] |= 0b0101  # no zero point of 0
        export_weights({"a.b": weight}, tmp_path, format)
        same(read_weights(tmp_path).layers["a.b"].weight, weight)

    def test_symmetric_weights_with_negative_scales_stay_symmetric_in_compressed_tensors(self, tmp_path):
        weight = negative()
        tensors, config = written(weight, tmp_path, "compressed-tensors")
        assert config["config_groups"]["group_0"]["weights"]["symmetric"] is True
        assert (tensors["a.b.weight_scale"] < 0).any()
        same(read_weights(tmp_path).layers["a.b"].weight, weight)

    @pytest.mark.parametrize("format", [name for name in FORMATS if name != "compressed-tensors"])
    def test_negative_scales_are_turned_without_changing_a_weight(self, format, tmp_path):
        weight = negative()
        tensors, _ = written(weight, tmp_path, format)
        scale = next(t for name, t in tensors.items() if name.endswith(("scale", "scales")))
        assert (scale > 0).all()
        found = read_weights(tmp_path).layers["a.b"].weight
        assert torch.equal(found.dequantize(), weight.dequantize())
        turned = weight.params.scale < 0
        assert torch.equal(found.params.zero, torch.where(turned, 7.0, 8.0))

    @pytest.mark.parametrize("format", FORMATS)
    def test_negative_scales_of_others_are_read(self, format, tmp_path):
        """AutoRound writes such files."""
        weight = quantized()
        export_weights({"a.b": weight}, tmp_path, format)

        def turn(tensors):
            name = next(name for name in tensors if name.endswith(("scale", "scales")))
            tensors[name] = -tensors[name]

        changed(tmp_path, turn)
        assert torch.equal(read_weights(tmp_path).layers["a.b"].weight.dequantize(), -weight.dequantize())

    @pytest.mark.parametrize("scale_dtype", ["fp32", "bf16", "fp16"])
    @pytest.mark.parametrize("format", ["compressed-tensors", "quark"])
    def test_scales_keep_their_dtype(self, format, scale_dtype, tmp_path):
        weight = quantized(scale_dtype=scale_dtype)
        export_weights({"a.b": weight}, tmp_path, format)
        same(read_weights(tmp_path).layers["a.b"].weight, weight)

    def test_powers_of_two_as_scales_are_exact_in_fp32(self, tmp_path):
        weight = quantized(scale_dtype="e8m0")
        export_weights({"a.b": weight}, tmp_path)
        found = read_weights(tmp_path).layers["a.b"].weight
        assert found.form.scale_dtype == "fp32"
        assert torch.equal(found.dequantize(), weight.dequantize())

    def test_odd_shapes_in_compressed_tensors(self, tmp_path):
        for columns, rows in ((60, 5), (24, 3)):
            weight = quantized(weights(rows, columns), group_size=12, **ASYM)
            export_weights({"a.b": weight}, tmp_path)
            same(read_weights(tmp_path).layers["a.b"].weight, weight)

    def test_layers_may_differ_in_compressed_tensors(self, tmp_path):
        found = {
            "x.0": quantized(),
            "x.1": quantized(group_size=16, **ASYM),
            "y": quantized(dtype="int8", group_size=-1),
            "z": quantized(),
        }
        export_weights(found, tmp_path)
        again = read_weights(tmp_path).layers
        for name, weight in found.items():
            same(again[name].weight, weight)
        groups = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"]
        assert [group["targets"] for group in groups.values()] == [["x.0", "z"], ["x.1"], ["y"]]


class TestLayouts:
    """Small weights, their words written out from the published layouts."""

    CODES = torch.arange(8 * 32).reshape(8, 32).mul(7).remainder(16).to(torch.uint8)
    ZERO = torch.arange(1, 9).reshape(8, 1)

    def weight(self):
        form = low_bit(dtype="uint4", group_size=-1, symmetric=False, scale_dtype="fp16")
        scale = torch.arange(1, 9).reshape(8, 1) / 8
        from nc.numerics.groups import GroupParams

        return pack(self.CODES, GroupParams(scale, self.ZERO.float()), form)

    def test_gptq(self, tmp_path):
        tensors, config = written(self.weight(), tmp_path, "gptq")
        assert torch.equal(tensors["a.b.qweight"], words(self.CODES.reshape(8, 4, 8)).T)
        assert torch.equal(tensors["a.b.qzeros"], words((self.ZERO - 1).reshape(1, 1, 8)))
        assert torch.equal(tensors["a.b.scales"], (torch.arange(1, 9)[None] / 8).half())
        assert torch.equal(tensors["a.b.g_idx"], torch.zeros(32, dtype=torch.int32))
        assert (config["checkpoint_format"], config["bits"], config["sym"], config["desc_act"]) == (
            "gptq",
            4,
            False,
            False,
        )
        assert json.loads((tmp_path / "quantize_config.json").read_text()) == config

    def test_symmetric_gptq_has_the_zeros_that_every_reader_knows(self, tmp_path):
        tensors, config = written(quantized(), tmp_path, "gptq")
        assert (tensors["a.b.qzeros"] == 0x77777777).all()
        assert config["sym"]
        assert tensors["a.b.g_idx"].tolist() == [0] * 32 + [1] * 32

    def test_awq(self, tmp_path):
        tensors, config = written(self.weight(), tmp_path, "awq")
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        assert torch.equal(tensors["a.b.qweight"], words(self.CODES.T[:, order].reshape(32, 1, 8)))
        assert torch.equal(tensors["a.b.qzeros"], words(self.ZERO.T[:, order].reshape(1, 1, 8)))
        assert (config["version"], config["bits"], config["zero_point"]) == ("gemm", 4, True)

    def test_compressed_tensors(self, tmp_path):
        tensors, config = written(self.weight(), tmp_path, "compressed-tensors")
        assert torch.equal(tensors["a.b.weight_packed"], words(self.CODES.reshape(8, 4, 8)))
        assert torch.equal(tensors["a.b.weight_zero_point"], words(self.ZERO.reshape(1, 1, 8)))
        assert tensors["a.b.weight_shape"].tolist() == [8, 32]
        scheme = config["config_groups"]["group_0"]
        assert (config["format"], scheme["targets"], scheme["weights"]["strategy"]) == (
            "pack-quantized",
            ["Linear"],
            "channel",
        )
        assert scheme["weights"]["actorder"] is None

    def test_quark(self, tmp_path):
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors, config = written(self.weight(), tmp_path, "quark")
        assert torch.equal(tensors["a.b.weight"], words(self.CODES.T[:, order].reshape(32, 1, 8)))
        assert config["global_quant_config"]["weight"]["dtype"] == "uint4"
        symmetric = quantized(weights(8, 32))
        tensors, config = written(symmetric, tmp_path / "s", "quark")
        signed = (symmetric.unpacked().int() - 8) & 15  # two's complement
        assert torch.equal(tensors["a.b.weight"], words(signed.T[:, order].reshape(32, 1, 8)))
        assert not tensors["a.b.weight_zero_point"].any()
        assert config["global_quant_config"]["weight"]["dtype"] == "int4"

    def test_quark_in_plain_order_is_read(self, tmp_path):
        weight = self.weight()
        export_weights({"a.b": weight}, tmp_path, "quark")

        def plain(tensors):
            tensors["a.b.weight"] = words(self.CODES.T.reshape(32, 1, 8))
            tensors["a.b.weight_zero_point"] = words(self.ZERO.T.reshape(1, 1, 8))

        changed(tmp_path, plain, {"export": {"weight_format": "real_quantized", "pack_method": "order"}})
        same(read_weights(tmp_path).layers["a.b"].weight, weight)


class TestGPTQ:
    def asymmetric(self, zero):
        weight = quantized(**ASYM)
        weight.zero[0, 0] = zero
        return weight

    def test_version_1_unless_a_zero_point_is_0_and_that_is_said(self, tmp_path, recwarn):
        weight = self.asymmetric(0x53)
        weight.zero[weight.zero & 15 == 0] |= 1
        weight.zero[weight.zero >> 4 == 0] |= 16
        assert written(weight, tmp_path / "1", "gptq")[1]["checkpoint_format"] == "gptq"
        assert not recwarn
        weight.zero[3, 0] &= 0xF0
        with pytest.warns(NCWarning, match=r"Layer 'a.b' .* zero point is 0, .* version 2"):
            _, config = written(weight, tmp_path / "2", "gptq")
        assert config["checkpoint_format"] == "gptq_v2"
        for folder in "12":
            weight.zero[3, 0] = weight.zero[3, 0] & 0xF0 | (folder == "1")
            if folder == "2":
                same(read_weights(tmp_path / folder).layers["a.b"].weight, weight)

    def test_a_zero_point_that_wrapped_in_version_1_is_read_as_0_and_doubted(self, tmp_path):
        weight = quantized()
        export_weights({"a.b": weight}, tmp_path, "gptq")
        changed(tmp_path, lambda t: t["a.b.qzeros"].__setitem__((0, 0), 0x7777777F))
        with pytest.warns(NCWarning, match="Layer 'a.b': a zero point of 0 in a GPTQ file of version 1"):
            found = read_weights(tmp_path).layers["a.b"].weight
        assert found.params.zero[0, 0] == 0
        assert (found.params.zero[1:] == 8).all()

    def test_groups_of_channels_that_are_not_neighbours_are_refused(self, tmp_path):
        export_weights({"a.b": quantized()}, tmp_path, "gptq")
        changed(tmp_path, lambda t: t["a.b.g_idx"].copy_(torch.arange(64) % 2))
        with pytest.raises(
            UnsupportedError, match=r"Layer 'a.b': .*g_idx.* desc_act=False, static groups or group-aware"
        ):
            read_weights(tmp_path)

    def test_renumbered_groups_are_put_back(self, tmp_path):
        weight = quantized(**ASYM)
        weight.zero[:] |= 0x11
        export_weights({"a.b": weight}, tmp_path, "gptq")

        def renumber(tensors):
            tensors["a.b.g_idx"] = 1 - tensors["a.b.g_idx"]
            for part in ("scales", "qzeros"):
                tensors[f"a.b.{part}"] = tensors[f"a.b.{part}"].flip(0)

        changed(tmp_path, renumber)
        same(read_weights(tmp_path).layers["a.b"].weight, weight)

    def test_a_file_without_g_idx_and_config_json_is_read(self, tmp_path):
        weight = quantized()
        export_weights({"a.b": weight}, tmp_path, "gptq")
        changed(tmp_path, lambda t: t.pop("a.b.g_idx"))
        (tmp_path / "config.json").unlink()
        same(read_weights(tmp_path).layers["a.b"].weight, weight)

    def test_files_of_auto_round_are_read(self, tmp_path):
        weight = quantized()
        export_weights({"a.b": weight}, tmp_path, "gptq")
        changed(tmp_path, dict, {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"})
        same(read_weights(tmp_path).layers["a.b"].weight, weight)

    @pytest.mark.parametrize("layout", ["auto_round", "auto_round:gptqmodel"])
    def test_auto_round_also_stores_zero_points_as_they_are(self, layout, tmp_path):
        weight = with_a_zero_of_0()
        with pytest.warns(NCWarning, match="gptq_v2"):
            export_weights({"a.b": weight}, tmp_path, "gptq")
        said = {"quant_method": "auto-round", "packing_format": layout, "checkpoint_format": None}
        changed(tmp_path, dict, said)
        same(read_weights(tmp_path).layers["a.b"].weight, weight)

    @pytest.mark.parametrize("key", ["checkpoint_format", "format"])
    def test_both_names_of_the_version_are_read(self, key, tmp_path):
        weight = with_a_zero_of_0()
        with pytest.warns(NCWarning, match="gptq_v2"):
            export_weights({"a.b": weight}, tmp_path, "gptq")
        changed(tmp_path, dict, {"checkpoint_format": None, key: "gptq_v2"})
        same(read_weights(tmp_path).layers["a.b"].weight, weight)

    def test_two_versions_in_one_file_are_refused(self, tmp_path):
        export_weights({"a.b": quantized()}, tmp_path, "gptq")
        changed(tmp_path, dict, {"checkpoint_format": "gptq", "format": "gptq_v2"})
        with pytest.raises(UnsupportedError, match="'gptq' and 'gptq_v2'"):
            read_weights(tmp_path)


class TestRefusals:
    @pytest.mark.parametrize(
        ("formats", "fields", "reason"),
        [
            (FORMATS, {**ASYM, "float_zero": True}, "zero points are integers"),
            (FORMATS, {"dtype": "nf4"}, "holds integers, and the weight is nf4"),
            (FORMATS, {"dtype": "fp8_e4m3"}, "holds integers"),
            (FORMATS, {"dtype": "int3"}, "3"),
            (("awq",), {"dtype": "int8"}, "4 bits"),
            (("quark",), {"dtype": "int2"}, "2"),
            (("gptq", "awq"), {"scale_dtype": "fp32"}, "scales in fp16, which"),
            (("gptq", "awq"), {"group_size": 8}, "no groups of 8"),
        ],
    )
    def test_say_layer_reason_and_way_out(self, formats, fields, reason, tmp_path):
        for format in formats:
            with pytest.raises(UnsupportedError, match=f"Layer 'a.b': .*{reason}.*(Quantize|Use|Leave)"):
                export_weights({"a.b": quantized(**fields)}, tmp_path, format)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("format", FORMATS)
    def test_scales_of_two_levels(self, format, tmp_path):
        plain = quantized(scale_dtype="fp32")
        form = low_bit(dtype="int4", group_size=32, double_quant=DoubleQuant())
        weight = PackedWeight(
            form=form,
            shape=plain.shape,
            codes=plain.codes,
            scale=torch.ones(16, 2, dtype=torch.uint8),
            outer_scale=torch.ones(16, 1),
        )
        with pytest.raises(UnsupportedError, match=r"one level of scales.*double_quant=None"):
            export_weights({"a.b": weight}, tmp_path, format)

    @pytest.mark.parametrize(
        ("format", "rows", "columns", "reason"), [("gptq", 12, 64, "N = 12"), ("gptq", 16, 48, "K = 48")]
    )
    def test_shapes(self, format, rows, columns, reason, tmp_path):
        for name in (format, "awq"):
            with pytest.raises(UnsupportedError, match=reason):
                export_weights({"a.b": quantized(weights(rows, columns), group_size=16)}, tmp_path, name)

    @pytest.mark.parametrize("format", ["gptq", "awq", "quark"])
    def test_layers_that_differ(self, format, tmp_path):
        with pytest.raises(
            UnsupportedError,
            match=r"Layer 'b': .*one bit width and group size.*'a' has 4 in groups of 32.*compressed-tensors",
        ):
            export_weights({"a": quantized(), "b": quantized(group_size=16)}, tmp_path, format)

    def test_unknown_formats_and_models_without_low_bit_weights(self, tmp_path):
        with pytest.raises(ConfigError, match="compressed-tensors, gptq, awq, quark, gguf"):
            export_weights({"a": quantized()}, tmp_path, "onnx")
        with pytest.raises(StateError, match="low-bit weights"):
            export_weights(torch.nn.Linear(4, 4), tmp_path)

    def test_weights_are_not_mixed_with_others_in_the_folder(self, tmp_path):
        save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
        with pytest.raises(ArtefactError, match="other weights"):
            export_weights({"a": quantized()}, tmp_path)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(32, 64)
        self.first = torch.nn.Linear(64, 96)
        self.norm = torch.nn.BatchNorm1d(96)
        self.second = torch.nn.Linear(96, 64, bias=False)
        self.head = torch.nn.Linear(64, 32, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("offset", torch.randn(64))

    def forward(self, ids):
        return self.head(self.second(self.norm(self.first(self.table(ids) + self.offset)).relu()))


def net(seed=0, act_dtype="fp32", **fields):
    """(The model with two low-bit linears, a float head tied to the table; the float model.)"""
    torch.manual_seed(seed)
    model = Net().eval()
    float_model = copy.deepcopy(model)
    for name in ("first", "second"):
        linear = getattr(model, name)
        packed = quantized(linear.weight.detach(), **{"rule": "wls", **fields})
        setattr(model, name, QuantLinear(packed, linear.bias, act_dtype))
    return model, float_model


class TestModels:
    IDS = torch.arange(30)

    @pytest.mark.parametrize("format", [*FORMATS, "gguf"])
    def test_a_model_gives_the_same_numbers_after_the_way_through_files(self, format, tmp_path):
        if format == "gguf":  # which holds no integers and scalars
            model, _ = net()
            model.norm = torch.nn.LayerNorm(96)
            other = net(1)[1]
            other.norm = torch.nn.LayerNorm(96)
        else:
            model, other = net()[0], net(1)[1]
        export_weights(model, tmp_path, format)
        again = import_weights(tmp_path, other.train())
        assert again is other
        assert not again.training
        assert isinstance(again.first, QuantLinear)
        assert torch.equal(again(self.IDS), model(self.IDS))
        assert again.head.weight is again.table.weight

    @pytest.mark.parametrize("format", ["compressed-tensors", "gptq", "awq", "quark", "gguf"])
    def test_activations_in_blocks_of_int8_are_refused(self, format, tmp_path):
        with pytest.raises(UnsupportedError, match="int8"):
            export_weights(net(act_dtype="int8_block32")[0], tmp_path, format)
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_with_other_weights_is_refused(self, tmp_path):
        export_weights(net()[0], tmp_path, "gptq")
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        for format in ("gguf", "awq"):
            with pytest.raises(ArtefactError, match="has other weights"):
                export_weights(net(1)[0], tmp_path, format)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    def test_gguf_is_a_file_or_in_a_folder(self, tmp_path):
        for path in (tmp_path / "a.gguf", tmp_path / "folder", tmp_path / "folder.gguf"):
            if path.name == "folder.gguf":
                path.mkdir()
            for seed in (0, 1):  # replaced
                export_weights({"a.b": quantized(weights(seed=seed))}, path, "gguf")
            assert path.is_dir() == path.name.startswith("folder")
            assert read_weights(path).layers

    def test_activations_in_int8_are_written_where_they_can_be(self, tmp_path):
        model, other = net(act_dtype="int8")[0], net(1)[1]
        for format in ("gptq", "awq", "quark", "gguf"):
            with pytest.raises(UnsupportedError, match=r"Layer 'first'.*activations.*compressed-tensors"):
                export_weights(model, tmp_path, format)
        export_weights(model, tmp_path)
        again = import_weights(tmp_path, other)
        assert again.first.act_dtype == "int8"
        assert torch.equal(again(self.IDS), model(self.IDS))

    @pytest.mark.parametrize("symmetric", [True, False])
    def test_eight_bits_and_int8_activations_are_int_quantized(self, symmetric, tmp_path):
        model, other = (
            net(act_dtype="int8", dtype="int8", group_size=-1, symmetric=symmetric, rule="minmax")[0],
            net(1)[1],
        )
        export_weights(model, tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
        assert config["format"] == "int-quantized"
        assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] is True
        assert config["ignore"] == ["head"]
        assert load_file(tmp_path / "model.safetensors")["first.weight"].dtype == torch.int8
        assert torch.equal(import_weights(tmp_path, other)(self.IDS), model(self.IDS))

    def test_an_embedding_is_refused_but_in_gguf(self, tmp_path):
        model, other = net()
        model.norm, other.norm = torch.nn.LayerNorm(96), torch.nn.LayerNorm(96)
        model.table = QuantEmbedding(quantized(model.table.weight.detach()))
        for format in FORMATS:
            with pytest.raises(UnsupportedError, match="Layer 'table': .*embedding=None"):
                export_weights(model, tmp_path, format)
        export_weights(model, tmp_path, "gguf")
        again = import_weights(tmp_path, other)
        assert isinstance(again.table, QuantEmbedding)
        assert torch.equal(again(self.IDS), model(self.IDS))

    def test_a_linear_under_two_names_is_written_once(self, tmp_path):
        model = torch.nn.ModuleDict({"a": QuantLinear(quantized(), torch.ones(16))})
        model["b"] = model["a"]
        export_weights(model, tmp_path)
        assert {name.split(".")[0] for name in load_file(tmp_path / "model.safetensors")} == {"a"}

    def test_a_linear_under_two_names_is_read_into_both(self, tmp_path):
        def twice(linear):
            model = torch.nn.ModuleDict({"a": linear})
            model["b"] = model["a"]
            return model

        export_weights(twice(QuantLinear(quantized(), torch.ones(16))), tmp_path)
        found = import_weights(tmp_path, twice(torch.nn.Linear(64, 16)))
        assert found["b"] is found["a"]
        assert isinstance(found["b"], QuantLinear)

    def test_two_tensors_are_not_read_into_one(self, tmp_path):
        model, tied = net()
        model.head.weight = torch.nn.Parameter(model.head.weight.detach() * 2)
        export_weights(model, tmp_path)
        with pytest.raises(
            ArtefactError,
            match="'head.weight' and 'table.weight' are one tensor in the model and two in the files",
        ):
            import_weights(tmp_path, tied)
        tied.head.weight = torch.nn.Parameter(torch.zeros(32, 64))
        assert torch.equal(import_weights(tmp_path, tied)(self.IDS), model(self.IDS))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda m: setattr(m, "first", torch.nn.Identity()), "no linear or embedding"),
            (
                lambda m: setattr(m, "first", torch.nn.Linear(64, 64)),
                r"shape \[96, 64\], in the model \[64, 64\]",
            ),
            (
                lambda m: setattr(m, "first", torch.nn.Linear(64, 96, bias=False)),
                "a bias in the files, and the model has none",
            ),
            (
                lambda m: setattr(m, "second", torch.nn.Linear(96, 64)),
                "no bias in the files, and the model has one",
            ),
            (lambda m: m.register_buffer("more", torch.ones(1)), "'more' is missing in the files"),
            (lambda m: delattr(m, "offset"), "'offset' is not in the model"),
            (lambda m: m.register_buffer("offset", torch.ones(3)), "'offset' has another shape"),
        ],
    )
    def test_a_model_that_does_not_fit_stays_as_it_was(self, change, message, tmp_path):
        export_weights(net()[0], tmp_path)
        other = net(1)[1]
        change(other)
        before = {name: value.clone() for name, value in other.state_dict().items()}
        with pytest.raises(ArtefactError, match=message):
            import_weights(tmp_path, other)
        after = other.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(value, after[name]) for name, value in before.items())

    def test_a_transformers_model_gets_its_own_config(self, tmp_path):
        model = random_llama(intermediate_size=96, tie_word_embeddings=True)
        for name, module in list(model.named_modules()):
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                model.set_submodule(name, QuantLinear(quantized(module.weight.detach(), group_size=32)))
        export_weights(model, tmp_path / "tied")
        found = json.loads((tmp_path / "tied" / "config.json").read_text())
        assert (found["model_type"], found["architectures"], found["tie_word_embeddings"]) == (
            "llama",
            ["LlamaForCausalLM"],
            True,
        )
        assert found["quantization_config"]["ignore"] == ["lm_head"]
        again = type(model)(model.config)
        ids = torch.arange(10)[None]
        with torch.no_grad():
            assert torch.equal(import_weights(tmp_path / "tied", again)(ids).logits, model(ids).logits)
        model.lm_head = QuantLinear(quantized(model.lm_head.weight.detach()))
        export_weights(model, tmp_path / "head")
        assert json.loads((tmp_path / "head" / "config.json").read_text())["tie_word_embeddings"] is False


class TestAlteredFiles:
    def test_nothing_to_read(self, tmp_path):
        with pytest.raises(ArtefactMissingError, match="no safetensors files"):
            read_weights(tmp_path)
        save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
        with pytest.raises(ArtefactSchemaError, match="quantization_config"):
            read_weights(tmp_path)
        (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "bitsandbytes"}}')
        with pytest.raises(ArtefactSchemaError, match="'bitsandbytes'"):
            read_weights(tmp_path)
        for text in ("{", "[]", "\udcff"):
            (tmp_path / "config.json").write_text(text, errors="surrogateescape")
            with pytest.raises(ArtefactCorruptError, match="is not (a )?JSON"):
                read_weights(tmp_path)

    def test_pickled_weights_are_not_read(self, tmp_path):
        torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
        with pytest.raises(ArtefactMissingError, match="they can run code"):
            read_weights(tmp_path)

    def test_truncation(self, tmp_path):
        export_weights({"a.b": quantized()}, tmp_path)
        whole = (tmp_path / "model.safetensors").read_bytes()
        for length in (0, 7, 100, len(whole) - 1):
            (tmp_path / "model.safetensors").write_bytes(whole[:length])
            with pytest.raises(ArtefactCorruptError, match="truncated or altered"):
                read_weights(tmp_path)

    def test_several_files_are_one_model(self, tmp_path):
        weight = quantized()
        export_weights({"a.b": weight}, tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        (tmp_path / "model.safetensors").unlink()
        names = sorted(tensors)
        for i, part in enumerate((names[:1], names[1:]), 1):
            save_file(
                {name: tensors[name] for name in part}, tmp_path / f"model-0000{i}-of-00002.safetensors"
            )
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "")}))
        same(read_weights(tmp_path).layers["a.b"].weight, weight)
        index.write_text(json.dumps({"weight_map": dict.fromkeys([*names, "c"], "")}))
        with pytest.raises(ArtefactCorruptError, match="lists tensor 'c'"):
            read_weights(tmp_path)
        save_file({names[0]: tensors[names[0]]}, tmp_path / "other.safetensors")
        with pytest.raises(ArtefactCorruptError, match="second time"):
            read_weights(tmp_path)

    @pytest.mark.parametrize("format", FORMATS)
    def test_each_tensor_must_be_there_with_its_shape_and_dtype(self, format, tmp_path):
        """But for what a format leaves out where it is the usual value."""
        optional = {
            "a.b.g_idx",
            *(["a.b.weight_zero_point"] if format in ("compressed-tensors", "quark") else []),
        }
        names = (
            written(quantized(**ASYM), tmp_path / "x", "awq" if format == "awq" else format)[0]
            if format != "gptq"
            else None
        )
        names = names or written(quantized(), tmp_path / "x", "gptq")[0]
        kept = {name: tensor.clone() for name, tensor in names.items()}
        for name, tensor in kept.items():
            changes = {
                "missing": None,
                "longer": torch.cat([tensor, tensor])
                if tensor.shape[0] > 1
                else torch.cat([tensor, tensor, tensor]),
                "flat": tensor.reshape(-1, 1, 1),
                "double": tensor.double(),
            }
            for what, value in changes.items():
                if what == "missing" and name in optional:
                    continue
                altered = {k: v for k, v in {**kept, name: value}.items() if v is not None}
                save_file(altered, tmp_path / "x" / "model.safetensors")
                try:
                    found = read_weights(tmp_path / "x")
                except (ArtefactError, UnsupportedError):
                    continue
                assert what == "missing", (name, what)
                assert not found.layers, (
                    name,
                    what,
                )  # without its main tensor it is no low-bit layer, and the rest is left over
                assert found.tensors

    @pytest.mark.parametrize("format", FORMATS)
    def test_a_scale_that_is_not_finite(self, format, tmp_path):
        export_weights({"a.b": quantized()}, tmp_path, format)

        def spoil(tensors):
            next(t for name, t in tensors.items() if name.endswith(("scale", "scales")))[0, 0] = torch.inf

        changed(tmp_path, spoil)
        with pytest.raises(ArtefactCorruptError, match="Layer 'a.b': a scale is not finite"):
            read_weights(tmp_path)

    @pytest.mark.parametrize(
        ("format", "config"),
        [
            ("compressed-tensors", {"config_groups": []}),
            ("compressed-tensors", {"config_groups": {"g": {"targets": [3]}}}),
            ("compressed-tensors", {"config_groups": {"g": {"targets": ["re:("], "weights": {}}}}),
            ("compressed-tensors", {"config_groups": {}}),
            (
                "compressed-tensors",
                {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 3}}}},
            ),
            (
                "compressed-tensors",
                {
                    "config_groups": {
                        "g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}
                    }
                },
            ),
            ("gptq", {"checkpoint_format": "marlin"}),
            ("awq", {"version": "gemv"}),
            ("awq", {"bits": 8}),
            ("quark", {"global_quant_config": None}),
            ("quark", {"layer_quant_config": {"a.b": {}}}),
            ("quark", {"export": {"weight_format": "fake_quantized"}}),
        ],
    )
    def test_settings_that_are_not_understood(self, format, config, tmp_path):
        export_weights({"a.b": quantized()}, tmp_path, format)
        changed(tmp_path, dict, config)
        with pytest.raises((ArtefactError, UnsupportedError)):
            read_weights(tmp_path)

    @pytest.mark.parametrize(
        ("format", "config"),
        [
            ("compressed-tensors", {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}),
            ("compressed-tensors", {"kv_cache_scheme": {"num_bits": 8}}),
            ("compressed-tensors", {"sparsity_config": {"format": "sparse-24-bitmask"}}),
            ("compressed-tensors", {"format": "marlin-24"}),
            ("compressed-tensors", {"something_new": 1}),
            ("gptq", {"rotation": "hadamard"}),
            ("gptq", {"adapter": {"name": "lora", "rank": 32}}),
            ("gptq", {"is_marlin_format": True}),
            ("gptq", {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}),
            ("gptq", {"quant_method": "auto-round", "act_bits": 8}),
            ("awq", {"format": "gemv"}),
            ("awq", {"something_new": 1}),
            ("quark", {"kv_cache_quant_config": {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3"}}}}),
            ("quark", {"algo_config": [{"name": "rotation", "r3": True}]}),
            ("quark", {"softmax_quant_spec": {"dtype": "fp8_e4m3"}}),
        ],
    )
    def test_settings_that_may_change_results_are_not_passed_over(self, format, config, tmp_path):
        export_weights({"a.b": quantized()}, tmp_path, format)
        changed(tmp_path, dict, config)
        with pytest.raises(UnsupportedError):
            read_weights(tmp_path)
        changed(tmp_path, dict, dict.fromkeys(config))  # nothing is said
        if "format" not in config and "quant_method" not in config:
            assert set(read_weights(tmp_path).layers) == {"a.b"}

    @pytest.mark.parametrize(
        "change",
        [
            {"output_activations": {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}},
            {"input_activations": {"strategy": "tensor"}},
            {"input_activations": {"strategy": None}},
            {"input_activations": {"symmetric": False}},
            {"input_activations": {"dynamic": "local"}},
            {"input_activations": {"group_size": 32}},
            {"weights": {"dynamic": True}},
            {"weights": {"strategy": "attn_head"}},
            {"weights": {"block_structure": [16, 16]}},
            {"smooth": 0.5},
        ],
    )
    def test_schemes_that_compute_something_else(self, change, tmp_path):
        export_weights(net(act_dtype="int8", dtype="int8", group_size=-1)[0], tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
        scheme = config["config_groups"]["group_0"]
        for key, value in change.items():
            scheme[key] = {**scheme[key], **value} if isinstance(scheme.get(key), dict) else value
        changed(tmp_path, dict, config)
        with pytest.raises(UnsupportedError, match="Layer"):
            read_weights(tmp_path)

    def test_settings_of_todays_tools_that_change_nothing_are_taken(self, tmp_path):
        said = {"version": "0.12.1", "sparsity_config": {}, "transform_config": {}, "kv_cache_scheme": None}
        export_weights({"a.b": quantized()}, tmp_path, "compressed-tensors")
        changed(tmp_path, dict, said)
        assert set(read_weights(tmp_path).layers) == {"a.b"}
        meta = {
            "meta": {"quantizer": ["gptqmodel:4.0"], "mse": 0.0},
            "act_group_aware": True,
            "format": "gptq",
        }
        export_weights({"a.b": quantized()}, tmp_path / "g", "gptq")
        changed(tmp_path / "g", dict, meta)
        assert set(read_weights(tmp_path / "g").layers) == {"a.b"}
