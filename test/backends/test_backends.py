"""What backends say of themselves."""

from nc.backends import backend_names, get_backend
from nc.backends.table import support_table
from nc.formats.rule_key import KIND_NAMES
from nc.graph.catalogue import PRODUCTS

NAMES = backend_names()


def test_the_table_has_every_kind_and_only_what_a_backend_claims():
    lines = support_table([get_backend(name) for name in NAMES]).splitlines()
    assert lines[0] == "| operator | `ipex` | `native` | `openvino` | `reference` |"
    rows = {
        line.split(" | ")[0].removeprefix("| "): line.removesuffix(" |").split(" | ")[1:]
        for line in lines[2 : 2 + len(KIND_NAMES)]
    }
    for kind, names in KIND_NAMES.items():
        for name, cell in zip(NAMES, rows[names[0]], strict=True):
            row = get_backend(name).capabilities().row(kind)
            assert cell.endswith("fp32") == (row is None)
            assert ("bf16" in cell) == (name != "ipex" and kind in PRODUCTS)
            assert row is None or all(dtype in cell for dtype in (*row.activations, *row.weights))
