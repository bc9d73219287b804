"""Call functions in C with tensors of exactly the bytes that nc_run.uses says, between pages without rights.

    python test/runner/check_uses.py FOLDER_WITH_NC_RUN CASES [FUNCTIONS]

A byte more that a function reads or writes ends this process; a byte that it does not need is an error too,
where tests of c_fuzz.py have no such byte.
"""

import faulthandler
import random
import sys
from pathlib import Path

import torch

sys.path[:0] = [sys.argv[1], str(Path(__file__).parents[1])]

import c_fuzz  # noqa: E402
from nc_run.uses import USES, uses  # noqa: E402

from nc.kernels.c_code import openmp  # noqa: E402


def flat(value):
    """Return nested numbers as nc_run has them: one, or a flat list."""
    if not isinstance(value, (list, tuple)):
        return value
    return [
        number for part in value for number in (flat(part) if isinstance(part, (list, tuple)) else [part])
    ]


def bytes_of(tensor):
    """Return the memory of a tensor from its first to its last element."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1 if tensor.numel() else 0,), (1,)).view(torch.uint8)


def call(function, fields, tensors, writes=(0,), *, at_end=None):
    """Do what `c_fuzz.call` does, with tensors that end where `uses` says."""
    name = function.row.takes.name
    if fields.get("most_blocks"):  # plans have no pages
        whole_call(function, fields, tensors, writes, at_end=at_end)
        return
    values = {key: flat(value) for key, value in fields.items()}
    given = [bytes_of(tensor) for tensor in tensors]
    found = uses(name, values, [tensor.numel() > 0 for tensor in tensors])
    parts = []
    for index, (use, memory) in enumerate(zip(found, given, strict=True)):
        absent = not memory.numel() and use.optional
        assert absent or use.bytes <= memory.numel(), (
            f"{name}: tensor {index} has {memory.numel()}, not {use}"
        )
        assert use.written == (index in writes) or not use.bytes or absent, f"{name}: tensor {index} is {use}"
        parts.append(memory[: use.bytes].clone())
    whole_call(function, fields, parts, writes, at_end=True)
    for memory, part in zip(given, parts, strict=True):
        memory[: part.numel()] = part


whole_call = c_fuzz.call
c_fuzz.call = call

if __name__ == "__main__":
    faulthandler.enable()
    openmp.threads()
    for name in sys.argv[3:] or [case for case in c_fuzz.CASES if case in USES or case == "bf16_product"]:
        if c_fuzz.possible([name])[name]:
            continue
        for seed in range(int(sys.argv[2])):
            random.seed(f"{name} {seed}")
            torch.manual_seed(random.randrange(2**31))
            print(f"{name} {seed}", end=": ", flush=True)
            print(c_fuzz.CASES[name](), flush=True)
    print("checked")
