"""What tests of rounded rows share: models, and the functions in C for each instruction set."""

import c_fuzz
import pytest
import torch
from models import quantized
from suites.rows_code import code_of, isas_to_test
from torch.nn import functional as F

from nc import DynamicQuantConfig
from nc.backends.native.plans import row_linears as row_format
from nc.kernels.c_code import abi
from nc.kernels.c_code.calls import call_once
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


@pytest.fixture(params=isas_to_test())
def on_isa(request):
    """The functions of an instruction set."""
    return code_of(row_format.CODES, request.param)


def rounded(on_isa, x, *, symmetric=False, per_row=True):
    """Memory of the codes of rows."""
    rows, inputs = x.shape
    memory = torch.full((row_format.CODES.held(rows, inputs),), 99, dtype=torch.uint8)
    fields = {"rows": rows, "inputs": inputs, "stride": inputs, "symmetric": symmetric, "threads": 2}
    fields |= {"per_row": per_row, "isa": NUMBERS[on_isa.isa]}
    call_once(on_isa.rounds, fields, [memory, x, *([] if per_row else [torch.empty(rows, 2)])])
    return memory


def product(on_isa, memory, rows, weight, *factors, name="identity", alpha=0.0, beta=0.0, other=None):
    """The result of rounded rows, with scales of the weight and a bias as factors."""
    outputs, inputs = weight.shape
    packed, sums = row_format.pack(row_format.CODES, weight)
    fields = {"rows": rows, "inputs": inputs, "outputs": outputs, "threads": 2, "isa": NUMBERS[on_isa.isa],
              "bf16": False, "activation": abi.ACTIVATION.number(name), "alpha": alpha, "beta": beta}  # fmt: skip
    y = torch.full((rows, outputs), 7.0)
    filled = [F.pad(values, (0, len(sums) - outputs)) for values in factors]
    tensors = [y, memory, packed, sums, *filled, *([] if other is None else [other])]
    c_fuzz.call(on_isa.product, fields, tensors, at_end=True)
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
