"""What to say of a name that the package does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: Names of Neural Compressor 2.x, and what does the same here.
_OF_2X = {
    "PostTrainingQuantConfig": "StaticQuantConfig(), DynamicQuantConfig() or WeightOnlyConfig()",
    "quantization": "quantize(model, config, run_fn, example_inputs=…), or prepare() and convert()",
    "AccuracyCriterion": "TuningConfig(tolerable_loss=…) for autotune()",
    "TuningCriterion": "TuningConfig(max_trials=…) for autotune()",
    "MixedPrecisionConfig": 'StaticQuantConfig(w_dtype="bf16", act_dtype="bf16")',
    "mix_precision": 'prepare() and convert() with StaticQuantConfig(w_dtype="bf16", act_dtype="bf16")',
    "Quantization": "quantize(model, config, run_fn, example_inputs=…)",
}


def hint(name: str, known: Iterable[str]) -> str:
    """Return a sentence for a name that is missing, with a space before it; "" if none is near."""
    if name in _OF_2X:
        return f" It is a name of Neural Compressor 2.x; here write {_OF_2X[name]}."
    public = [each for each in known if not each.startswith("_")]
    near = difflib.get_close_matches(name, public, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
