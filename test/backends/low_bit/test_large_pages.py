"""Memory in large pages: values, alignment, and when it goes back."""

import gc
import weakref
from pathlib import Path

import pytest
import torch

from nc.process.large_pages import PAGE, LargePages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def large_kb():
    """Of this process, in large pages."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (700, 1000), (3000, 4000)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32])
def test_copies_have_the_same_values(shape, dtype):
    memory = LargePages()
    given = [(torch.rand(shape[::-1]) * 100).to(dtype).permute(*range(len(shape))[::-1]) for _ in range(3)]
    copies = [memory.copied(tensor) for tensor in given]
    for tensor, copy in zip(given, copies, strict=True):
        assert copy.is_contiguous()
        assert torch.equal(copy, tensor)
        assert copy.data_ptr() % 64 == 0 or not copy.numel()


def test_small_tensors_share_pages_and_give_them_back_together():
    memory = LargePages()
    first, second = memory.empty(1000), memory.empty(1000)
    assert first.data_ptr() % PAGE == 0
    assert second.data_ptr() - first.data_ptr() == 1024
    piece = memory._piece()
    if piece is None:
        pytest.skip("this system has no large pages")
    alive = weakref.ref(piece)
    del piece, first
    gc.collect()
    assert alive() is not None
    second.fill_(1)
    del second
    gc.collect()
    assert alive() is None
    assert memory.empty(10).fill_(3).tolist() == [3] * 10


def test_a_piece_that_is_full_is_followed_by_another():
    memory = LargePages()
    parts = [memory.empty(5 << 20).fill_(i) for i in range(4)]
    large = memory.empty(40 << 20).fill_(9)
    parts.append(memory.empty(1 << 20).fill_(4))
    assert [int(part[0]) for part in parts] == [int(part[-1]) for part in parts] == list(range(5))
    assert bool((large == 9).all())


@pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="this system gives no large pages"
)
@pytest.mark.parametrize("size", [6 << 20, 32 << 20])
@pytest.mark.exhaustive
def test_pages_are_large(size):
    before = large_kb()
    kept = LargePages().empty(size).fill_(1)
    assert large_kb() - before >= size // 1024 // 2  # the system may be short of them
    del kept
    gc.collect()
    assert large_kb() <= before + size // 1024 // 4
