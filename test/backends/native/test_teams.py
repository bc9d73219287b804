"""Functions in C leave the threads of the OpenMP library as they are.

A smaller team would end some, and the next make new ones.
"""

import sys
from pathlib import Path

import pytest
import torch
from suites.code_products import check, multiply, paired
from suites.int8_attention import case
from suites.low_bit import form, weight
from suites.low_bit_c import HERE
from suites.rows_code import isas_to_test

from nc.backends import available_backends
from nc.backends.native.operators import int8_attention
from nc.backends.native.plans import c_functions
from nc.backends.native.plans import row_linears as row_format
from nc.kernels.c_code.calls import call_once
from nc.kernels.low_bit import compiled

THREADS = 6
_WHY = (
    available_backends()["native"]
    or c_functions.why_unavailable()
    or ("" if sys.platform == "linux" else "reads /proc")
)
pytestmark = [pytest.mark.isas, pytest.mark.skipif(bool(_WHY), reason=_WHY or "it can run")]


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def norm():
    x, factor = torch.randn(100, 512), torch.ones(512)
    fields = {"to": 0, "of": 0, "rows": 100, "width": 512, "centred": True, "epsilon": 1e-5}
    fields |= {"inverse": 1.0, "zero_point": 0, "threads": THREADS}
    return lambda: call_once(c_functions.function("norm"), fields, [x, x.clone(), factor, factor])


def image():
    x, y = torch.randn(1, 3, 64, 300), torch.zeros(64 * 300 * 3, dtype=torch.uint8)
    fields = {"to": 4, "images": 1, "channels": 3, "pixels": 64 * 300}
    fields |= {"inverse": 1.0, "zero_point": 0, "threads": THREADS}
    return lambda: call_once(c_functions.function("codes"), fields, [y, x])


def rounding():
    x, y = torch.randn(1, 3, 64, 300), torch.zeros(64 * 300 * 3, dtype=torch.uint8)
    fields = {"images": 1, "channels": 3, "pixels": 64 * 300, "channels_last": False, "symmetric": False}
    tensors = [y, torch.zeros(2), x, torch.zeros(THREADS, 2)]
    return lambda: call_once(c_functions.function("round_images"), fields | {"threads": THREADS}, tensors)


def attention():
    made = case(batch=1, count=2, rows=64, keys=64, width=64, wide=64)
    planned = made.planned()
    return lambda: planned(*made.inputs)


def product():
    x, w = torch.randint(0, 256, (61, 64), dtype=torch.uint8), paired(64, 64)
    shape, isa = ((61, 64), (64, 1)), isas_to_test()[0]
    how = None, "nothing", None, THREADS
    return lambda: check(
        lambda *given: multiply(isa, *given), x, w, x.double() @ w.double().T, shape, *how, zero_point=0
    )


def low_bit():
    packed = weight(form("int4", 64), 400, 512)
    layout, bias, x = compiled.pack(packed, next(iter(HERE.values()))), torch.zeros(400), torch.randn(1, 512)
    return lambda: compiled.linear(x, layout, packed, bias, -1)


CALLS = {
    "norm": (norm, ""),
    "image": (image, ""),
    "rounding": (rounding, ""),
    "attention": (attention, int8_attention.why_not_batches() if not _WHY else ""),
    "code product": (product, row_format.why_unavailable(row_format.CODES) if not _WHY else ""),
    "low-bit": (low_bit, "" if HERE else "this CPU has none of the instruction sets"),
}


@pytest.mark.parametrize("name", CALLS)
def test_threads_stay(name):
    make, why = CALLS[name]
    if why:
        pytest.skip(why)
    call, x, y = make(), torch.randn(2**20), torch.empty(2**20)

    def with_all_threads():
        torch.add(x, 1.0, out=y)
        return set(Path("/proc/self/task").iterdir())

    with_all_threads()
    call()
    before = with_all_threads()
    assert len(before) >= THREADS
    for _ in range(3):
        call()
        assert with_all_threads() == before
