"""Quantized models where transformers' own are expected.

`import nc.hf` needs transformers, and sentence-transformers only where a function says so.
"""

from nc.hf.at_load import QuantizationConfig as QuantizationConfig
from nc.hf.attention import register_attention as register_attention
from nc.hf.export import Exported as Exported
from nc.hf.export import export as export
from nc.hf.model import QuantizedTransformer as QuantizedTransformer
from nc.hf.quantize import load as load
from nc.hf.quantize import quantize as quantize
from nc.hf.sentence import load_sentence_transformer as load_sentence_transformer
from nc.hf.sentence import quantize_sentence_transformer as quantize_sentence_transformer
