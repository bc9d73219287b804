"""Write nc/backends/ipex/tested_patterns.py: the int8 patterns of every network that the IPEX tests run.

    python test/tested_patterns.py

Run it after a change of placement or of the tests' networks; the tests fail when the file does not cover what
they run.
"""

from __future__ import annotations

from pathlib import Path

import torch
from models import call
from nets import NETS
from suites.architectures import CASES

import nc
from nc.backends.ipex.patterns import patterns

HEAD = '''"""Patterns of int8 operators that the test suite runs through IPEX's fuser; written by test/tested_patterns.py."""

TESTED: frozenset[str] = frozenset(
    {
'''


def collect() -> set[str]:
    """All patterns, from graphs only: nothing is lowered."""
    found: set[str] = set()
    networks = [(net, torch.randn(shape)) for net, shape, _ in NETS.values()]
    networks += [(case.build(), case.inputs(1)) for case in CASES.values()]
    for model, inputs in networks:
        prepared = nc.prepare(model.eval(), nc.StaticQuantConfig(post=()), example_inputs=inputs)
        call(prepared, inputs)
        found |= patterns(prepared.quantized_graph().module)
    return found


def main() -> None:
    """Write the file."""
    target = Path(nc.__file__).parent / "backends" / "ipex" / "tested_patterns.py"
    lines = "".join(f'        "{pattern}",\n' for pattern in sorted(collect()))
    target.write_text(f"{HEAD}{lines}    }}\n)\n", encoding="utf-8")


if __name__ == "__main__":
    main()
