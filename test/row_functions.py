"""What tests of rounded rows share: models, and the functions in C for each instruction set."""

import pytest
import torch
from models import quantized
from torch.nn import functional as F

from nc import DynamicQuantConfig
from nc.backends.native.plans import rows as row_format
from nc.kernels.c_code import abi, build, limit
from nc.kernels.c_code.calls import call_once, function_of
from nc.kernels.c_code.isas import NUMBERS
from nc.numerics.int16_pairs import limit_pairs


def dynamic(model, x, **options):
    return quantized(model.eval(), x, DynamicQuantConfig(**options), "native")


def called(q, *inputs):
    """Names of the functions in C that a call makes, in order."""
    return [
        k.implementation.removeprefix("c:").split()[0]
        for step in q.engine.steps(list(inputs))
        for k in step.kernels
    ]


def isas_to_test():
    """Those of this CPU, and AVX-VNNI where AVX512-VNNI has its instruction in another encoding."""
    found = row_format.isas(row_format.CODES)
    return [*found, "avx_vnni"] if "avx512_vnni" in found and "avx_vnni" not in found else list(found)


@pytest.fixture(params=isas_to_test())
def on_isa(request, tmp_path_factory, monkeypatch):
    """An instruction set, and its functions that round rows and multiply them."""
    if request.param in row_format.isas(row_format.CODES):
        code = row_format.code(row_format.CODES)
        return request.param, code.rounds, code.product
    monkeypatch.delenv(limit.VARIABLE, raising=False)  # a limit to AVX512-VNNI forbids the code of AVX-VNNI
    monkeypatch.setattr(build, "_compiler", lambda: "cc -DNC_TEST_EVEX")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))
    library = build.load_on_threads("rows")
    return request.param, function_of(library, "round_rows"), function_of(library, "row_product")


def rounded(on_isa, x, *, symmetric=False, per_row=True):
    """Memory of the codes of rows."""
    isa, rounds, _ = on_isa
    rows, inputs = x.shape
    memory = torch.full((row_format.CODES.held(rows, inputs),), 99, dtype=torch.uint8)
    fields = {"rows": rows, "inputs": inputs, "stride": inputs, "symmetric": symmetric, "threads": 2}
    fields |= {"per_row": per_row, "isa": NUMBERS[isa]}
    call_once(rounds, fields, [memory, x, *([] if per_row else [torch.empty(rows, 2)])])
    return memory


def product(on_isa, memory, rows, weight, *factors, name="identity", alpha=0.0, beta=0.0, other=None):
    """The result of rounded rows, with scales of the weight and a bias as factors."""
    isa, _, multiplies = on_isa
    outputs, inputs = weight.shape
    packed, sums = row_format.pack(row_format.CODES, weight)
    fields = {"rows": rows, "inputs": inputs, "outputs": outputs, "threads": 2, "isa": NUMBERS[isa],
              "bf16": False, "activation": abi.ACTIVATION.number(name), "alpha": alpha, "beta": beta}  # fmt: skip
    y = torch.full((rows, outputs), 7.0)
    filled = [F.pad(values, (0, len(sums) - outputs)) for values in factors]
    call_once(multiplies, fields, [y, memory, packed, sums, *filled, *([] if other is None else [other])])
    return y


def weight_for(isa, outputs, inputs):
    """Any codes; pairs fit 16 bits where AVX2 adds them."""
    weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    return limit_pairs(weight.float()).to(torch.int8) if isa == "avx2" else weight


def with_codes(memory, codes):
    """The same memory, which has other codes: unpacked ones are a copy."""
    rows, inputs = codes.shape
    many, depth = -(-rows // 16) * 16, -(-inputs // 64) * 64
    filled = F.pad(codes, (0, depth - inputs, 0, many - rows))
    memory[: many * depth] = filled.view(many // 16, 16, depth // 64, 64).transpose(1, 2).flatten()
    return memory
