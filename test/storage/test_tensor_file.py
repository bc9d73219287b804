"""Files of safetensors written piece by piece: the bytes are those of the safetensors library."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nc.errors import ArtefactCorruptError
from nc.storage import tensor_file

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def tensors():
    torch.manual_seed(0)
    found = {f"layer.{dtype}": (torch.randn(3, 5) * 9).to(dtype) for dtype in DTYPES}
    return {
        **found,
        "b": torch.randn(2, 3, 4),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "a": torch.ones(7, dtype=torch.uint8),
    }


def test_the_bytes_are_those_of_the_library(tmp_path):
    save_file(tensors(), tmp_path / "theirs")
    hashed = hashlib.sha256()
    tensor_file.write(tmp_path / "ours", tensors(), hashed.update)
    raw = (tmp_path / "ours").read_bytes()
    assert raw == (tmp_path / "theirs").read_bytes()
    assert hashed.hexdigest() == hashlib.sha256(raw).hexdigest()


@pytest.mark.parametrize("start", [0, 3])
def test_a_single_value_may_have_any_stride(start, tmp_path):
    one = torch.arange(16, dtype=torch.float32).as_strided((1, 1), (16, 8), start)
    assert one.is_contiguous()
    tensor_file.write(tmp_path / "one", {"one": one, "none": torch.empty(0, 3)}, lambda _: None)
    assert load_file(tmp_path / "one")["one"].tolist() == [[start]]


def test_tensors_are_read_where_they_lie(tmp_path):
    save_file(tensors(), tmp_path / "file", metadata={"format": "pt"})
    raw = bytearray((tmp_path / "file").read_bytes())
    found = tensor_file.views(raw)
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        name: (t.dtype, t.shape) for name, t in tensors().items()
    }
    assert all(
        torch.equal(t.reshape(-1).view(torch.uint8), tensors()[n].reshape(-1).view(torch.uint8))
        for n, t in found.items()
    )
    before = found["b"].clone()
    raw[:] = bytes(len(raw))
    assert not torch.equal(found["b"], before)


@pytest.mark.parametrize("begin", [-1, 1, 4])
def test_tensors_that_overlap_or_leave_gaps_are_refused(begin, tmp_path):
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    header["b"] = {"dtype": "U8", "shape": [4], "data_offsets": [8 + begin, 12 + begin]}
    text = json.dumps(header).encode()
    with pytest.raises(ValueError, match="the tensor 'b' does not begin where the one before it ends"):
        tensor_file.views(bytearray(len(text).to_bytes(8, "little") + text + bytes(20)))


def test_tensors_come_from_other_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "_PIECE", 7)
    save_file(
        {f"x.{name}": tensor for name, tensor in tensors().items()},
        tmp_path / "source",
        metadata={"format": "pt"},
    )
    stored = tensor_file.stored_in(tmp_path / "source")
    assert all(
        torch.equal(stored[f"x.{name}"].read().view(torch.uint8), t.view(torch.uint8))
        for name, t in tensors().items()
        if t.dim()
    )
    mixed = {
        name: stored[f"x.{name}"] if index % 2 else tensor
        for index, (name, tensor) in enumerate(tensors().items())
    }
    tensor_file.write(tmp_path / "mixed", mixed)
    tensor_file.write(tmp_path / "memory", tensors())
    assert (tmp_path / "mixed").read_bytes() == (tmp_path / "memory").read_bytes()
    assert torch.equal(load_file(tmp_path / "mixed")["b"], tensors()["b"])


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw[:-1],
        lambda raw: raw[:20],
        lambda raw: b"x" * 50,
        lambda raw: raw.replace(b"F64", b"F99"),
    ],
)
def test_what_is_no_such_file_is_refused(change, tmp_path):
    save_file(tensors(), tmp_path / "file")
    (tmp_path / "file").write_bytes(change((tmp_path / "file").read_bytes()))
    with pytest.raises(ArtefactCorruptError, match="file cannot be read"):
        tensor_file.stored_in(tmp_path / "file")


def test_a_file_that_is_cut_while_it_is_read_is_noticed(tmp_path):
    save_file({"a": torch.ones(100)}, tmp_path / "file")
    stored = tensor_file.stored_in(tmp_path / "file")["a"]
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:-4])
    with pytest.raises(ArtefactCorruptError, match="became shorter"):
        stored.read()
    with pytest.raises(ArtefactCorruptError, match="became shorter"):
        tensor_file.write(tmp_path / "copy", {"a": stored})
