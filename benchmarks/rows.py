"""Products of rounded rows (`rows.c`) alone: products of two numbers a second, for layers of encoders.

    python benchmarks/rows.py [--format codes bf16] [--rows 128 197 2048] [--threads 2]

Layers take turns, each with weights of its own; the least time of a layer counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from nc.backends.native.plans.row_linears import BF16, CODES, RowFormat, code, pack
from nc.kernels.c_code import abi
from nc.kernels.c_code.calls import call_packed
from nc.kernels.c_code.isas import NUMBERS
from nc.process.unavailable import Unavailable

#: Inputs, outputs, what follows, and whether a tensor is added: MiniLM and BERT-base.
LAYERS = (
    *((width, 3 * width, "identity", False) for width in (384, 768)),
    *((width, width, "identity", True) for width in (384, 768)),
    *((width, 4 * width, "gelu_erf", False) for width in (384, 768)),
    *((4 * width, width, "identity", True) for width in (384, 768)),
)
#: Calls of each layer, and weights of a layer that take turns: more than the second cache holds.
CALLS, WEIGHTS = 12, 3


def layer(
    form: RowFormat, rows: int, inputs: int, outputs: int, activation: str, *, added: bool, threads: int
) -> Callable[[], None]:
    """Return a call of the product alone, of rows that are rounded already."""
    found = code(form)
    if isinstance(found, Unavailable):
        raise SystemExit(found.reason)
    weight = torch.randint(-63, 64, (outputs, inputs), dtype=torch.int8)
    packed, sums = pack(form, weight.to(torch.bfloat16) if form.bf16 else weight)
    x, memory = torch.randn(rows, inputs), torch.zeros(form.held(rows, inputs), dtype=form.dtype)
    sizes: dict[str, abi.Value] = {"rows": rows, "inputs": inputs, "threads": threads}
    isa = NUMBERS[found.isa]
    of_codes = {} if form.bf16 else {"symmetric": False, "per_row": True, "isa": isa}
    call_packed(found.rounds, found.rounds.packed(sizes | {"stride": inputs} | of_codes), [memory, x])
    how = {"outputs": outputs, "isa": isa, "bf16": form.bf16, "alpha": 0.0, "beta": 0.0}
    fields = found.product.packed(sizes | how | {"activation": abi.ACTIVATION.number(activation)})
    filled = packed.shape[0] * packed.shape[2]
    tensors = [torch.empty(rows, outputs), memory, packed, sums, torch.rand(filled), torch.rand(filled)]
    tensors += [torch.randn(rows, outputs)] if added else []
    return lambda: call_packed(found.product, fields, tensors)


def main() -> None:
    """Print a line for each layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--format", nargs="+", choices=("codes", "bf16"), default=["codes", "bf16"])
    parser.add_argument("--rows", nargs="+", type=int, default=[128, 197, 2048])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.format:
        form = BF16 if name == "bf16" else CODES
        for rows in options.rows:
            for inputs, outputs, activation, added in LAYERS:
                sizes = form, rows, inputs, outputs, activation
                calls = [layer(*sizes, added=added, threads=options.threads) for _ in range(WEIGHTS)]
                least = float("inf")
                for _ in range(CALLS):
                    for call in calls:
                        start = time.perf_counter()
                        call()
                        least = min(least, time.perf_counter() - start)
                speed = rows * inputs * outputs / least / 1e9
                size = f"{name:5} {rows:5} x {inputs:4} -> {outputs:4}"
                print(f"{size}: {1e3 * least:7.3f} ms, {speed:4.0f} GMAC/s")


if __name__ == "__main__":
    main()
