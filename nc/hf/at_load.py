"""`from_pretrained(…, quantization_config=nc.hf.QuantizationConfig("int8"))`: low-bit weights at load.

The model keeps its class; linears and stacked experts get low-bit weights as `nc.quantize` gives them with
`inplace=True`. `save_pretrained` and `from_pretrained` write and read them. `import nc.hf` registers the two
classes with transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from nc.api.workflow import quantize
from nc.config import WeightOnlyConfig
from nc.errors import ConfigError, UnsupportedError
from nc.hf.saved_layers import check_layers, let_save, low_bit_layers, put_empty_layers, tensors_of

#: As transformers calls it in config.json.
METHOD = "nc"
#: The attention of models that name none; "": transformers chooses it.
ATTENTION: ContextVar[str] = ContextVar("attention", default="")
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
        layers: of a saved model, names of its low-bit layers; None: the model's weights are float.
        quant_method: "nc".

    Raises:
        ConfigError: other weights, or another option.
    """

    quant_method: Any  # transformers' own are members of an enumeration

    def __init__(
        self,
        weights: str = "int8",
        quant_method: str = METHOD,
        layers: Sequence[str] | None = None,
        **others: Any,
    ) -> None:
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
        self.layers = None if layers is None else list(layers)

    @property
    def rules(self) -> WeightOnlyConfig:
        """The configuration of `nc.quantize`."""
        return WeightOnlyConfig(**FORMATS[self.weights])


@register_quantizer(METHOD)
class Quantizer(HfQuantizer):
    """Quantizes a model whose weights transformers has loaded, or lets it load low-bit ones."""

    quantization_config: QuantizationConfig

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> Any:
        """Give a model, which has no values yet, the layers that the file has."""
        if self.pre_quantized:
            saved = self.quantization_config.layers
            put_empty_layers(model, self.quantization_config.rules, saved, checkpoint_files)
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        """Quantize in place, or find kernels for what was loaded; transformers ignores what this returns."""
        if self.pre_quantized:
            check_layers(model)
        else:
            quantize(model, self.quantization_config.rules, inplace=True)
        self.quantization_config.layers = low_bit_layers(model)
        if self.is_serializable():
            let_save(model)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return what `save_pretrained` writes, and no metadata."""
        return tensors_of(model), {}

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Refuse to dequantize.

        Raises:
            UnsupportedError: always.
        """
        msg = "Low-bit weights stay low-bit ones: load the float model without quantization_config."
        raise UnsupportedError(msg)

    def update_attn_implementation(self, config: Any) -> Any:
        """Return a model's configuration, with `ATTENTION` where none was asked for."""
        if ATTENTION.get():
            config._attn_implementation = ATTENTION.get()
        return config

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return fp32: weights are quantized from it, and the rest computes in it."""
        return torch.float32

    update_torch_dtype = update_dtype  # its name in transformers 4

    def get_new_dtype(self, *_: Any) -> None:
        """Return None: tensors of the file keep their dtype."""

    def is_serializable(self, safe_serialization: bool | None = None) -> bool:
        """Return whether `save_pretrained` can ask for what it writes, as transformers 5 does."""
        return hasattr(HfQuantizer, "get_state_dict_and_metadata")

    @property
    def is_trainable(self) -> bool:
        """True: `Trainer` takes no other model, not even to evaluate it. Low-bit weights do not learn."""
        return True

    is_qat_trainable = is_trainable
