"""From what happened to an architecture of the sweep to its row: whether it went through, and why not."""

from __future__ import annotations

import re
from typing import Any

from results_rows import Figure
from sweep_models import Entry

from nc.backends.verify import CHANCE_DB, FLOOR_DB, TOLERANCE_DB

Found = dict[str, Any]
#: Figure of a row → its unit, and the key of what sweep_one.py found.
FIGURES = {
    "int8": ("operators", "int8"),
    "asked": ("operators", "asked"),
    "sqnr": ("dB", "sqnr_db"),
    "sqnr other batch": ("dB", "sqnr_db_other"),
    "reference": ("dB", "reference_db"),
    "reference other batch": ("dB", "reference_db_other"),
    "speed": ("x fp32", "speed"),
    "parameters": ("parameters", "parameters"),
    "seconds": ("s", "seconds"),
}
#: Keys that say what was run, as they are.
SAID = ("size", "engine", "captured", "error", "typed", "padding")


def stored(entry: Entry, backend: str, found: Found) -> tuple[dict[str, Any], dict[str, Figure], str]:
    """Return `what`, the figures and the note of a row of results/architectures.jsonl."""
    why = found.get("reason", "") if found["status"] == "not built" else problem(found)
    status = "not built" if found["status"] == "not built" else "failed" if why else "went through"
    what = {
        "source": entry.source,
        "family": entry.family,
        "model": entry.model,
        "backend": backend,
        "status": status,
    }
    what |= {key: found[key] for key in SAID if key in found}
    what |= {"other batch": found["other"].split(":")[0]} if "other" in found else {}
    figures = {
        name: Figure(found[key], unit) for name, (unit, key) in FIGURES.items() if found.get(key) is not None
    }
    return what, figures, why


def problem(found: Found) -> str:
    """Return why it did not go through; "" if the reference confirms the numbers at both batch sizes."""
    if found["status"] != "ok":
        return _cause(found)
    if found.get("shapes") or found.get("shapes_other"):
        return "outputs of other shapes than the fp32 model's"
    for suffix in ("", "_other"):
        engine, quantized = found.get(f"reference_db{suffix}"), found.get(f"sqnr_db{suffix}")
        if engine is not None and engine < max(FLOOR_DB, min(TOLERANCE_DB, (quantized or 0.0) - CHANCE_DB)):
            return f"the engine is {engine:.0f} dB from its reference" + (
                " at another batch size" if suffix else ""
            )
    return ""


def _cause(found: Found) -> str:
    """Return the innermost reason without names, numbers and paths, so that equal ones meet."""
    text = (found.get("cause") or found.get("reason") or "").lstrip("_")
    text = re.sub(r" \(\w+:\d+\)$", "", text)  # where in nc it was raised
    text = re.sub(r"(/[\w.+-]+){2,}/", "", text)
    text = re.sub(r"\d+", "N", re.sub(r"0x[0-9a-f]+", "…", text))
    return f"{found['error']}: {text.removeprefix(found['error'] + ': ')[:160]}"
