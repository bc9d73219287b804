"""`from_pretrained(…, quantization_config=nc.hf.QuantizationConfig("int8"))`: low-bit weights at load.

The model keeps its class; linears and stacked experts get low-bit weights as `nc.quantize` gives them with
`inplace=True`. `import nc.hf` registers the two classes with transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from nc.api.workflow import quantize
from nc.config import WeightOnlyConfig
from nc.errors import ConfigError, StateError

#: As transformers calls it in config.json.
METHOD = "nc"
#: Weights → the configuration. Eight bits with activations rounded row by row run in integers.
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"w_dtype": "int8", "group_size": -1, "act_dtype": "int8"},
    "int4": {"w_dtype": "int4", "group_size": 32},
}


@register_quantization_config(METHOD)
class QuantizationConfig(QuantizationConfigMixin):
    """How weights are quantized while a model is loaded. All else of the model is fp32.

    Attributes:
        weights: "int8" or "int4".
        quant_method: "nc".

    Raises:
        ConfigError: other weights, or another option.
    """

    quant_method: Any  # transformers' own are members of an enumeration

    def __init__(self, weights: str = "int8", quant_method: str = METHOD, **others: Any) -> None:
        if others:
            msg = (
                f"QuantizationConfig has no {', '.join(others)}; for more than weights: "
                "nc.quantize(model, nc.WeightOnlyConfig(…)) after from_pretrained."
            )
            raise ConfigError(msg)
        if weights not in FORMATS:
            msg = (
                f"QuantizationConfig has no weights {weights!r}; it has {', '.join(FORMATS)}. Others: "
                "nc.quantize(model, nc.WeightOnlyConfig(…)) after from_pretrained."
            )
            raise ConfigError(msg)
        self.quant_method, self.weights = quant_method, weights


@register_quantizer(METHOD)
class Quantizer(HfQuantizer):
    """Quantizes a model whose weights transformers has loaded."""

    quantization_config: QuantizationConfig

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        """Quantize in place; transformers ignores what this returns."""
        if self.pre_quantized:
            msg = (
                f"config.json says quant_method={METHOD!r}, but transformers loads weights in float only: "
                "load the folder of the float model with this configuration, or an artefact with nc.load()."
            )
            raise StateError(msg)
        config = WeightOnlyConfig(**FORMATS[self.quantization_config.weights])
        quantize(model, config, inplace=True)
        model.save_pretrained = _refuse_to_save
        return model

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        """Return the model as it is; transformers 4 asks for the method."""
        return model

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return fp32: weights are quantized from it, and the rest computes in it."""
        return torch.float32

    update_torch_dtype = update_dtype  # its name in transformers 4

    def is_serializable(self, safe_serialization: bool | None = None) -> bool:
        """Return False: transformers would write tensors that it can't read without this package."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False."""
        return False


def _refuse_to_save(*_: Any, **__: Any) -> None:
    msg = (
        "A model that was quantized while it was loaded is saved with nc.save(model, folder) and loaded with "
        "nc.load(folder): transformers would fill what it can't read with random weights, and only warn."
    )
    raise StateError(msg)
