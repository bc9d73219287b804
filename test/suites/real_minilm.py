"""The protocol of examples/minilm.py, whose weights and tokenizer come in a package."""

import importlib.util
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location(
    "minilm_of_examples", Path(__file__).resolve().parents[2] / "examples" / "minilm.py"
)
minilm = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(minilm)
