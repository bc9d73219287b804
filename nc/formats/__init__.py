"""Frozen values that all packages share.

They are dtypes, granularities, requests of operators, and capabilities of backends.
"""

from nc.formats.dtypes import DTYPES, INT8, UINT8, DType, dtype
from nc.formats.fake_spec import FakeSpec, FakeTensorSpec
from nc.formats.granularities import (
    PER_CHANNEL,
    PER_COLUMN,
    PER_TENSOR,
    PER_TOKEN,
    Granularity,
    granularity,
    per_block,
    per_channel,
    per_group,
)
from nc.formats.specs import (
    BF16,
    FLOAT,
    Capabilities,
    Mode,
    OpSpec,
    OpSupport,
    QParams,
    SmoothSpec,
    TensorSpec,
)
from nc.formats.weight_format import PRESETS, SCALE_DTYPES, SCALE_MODES, DoubleQuant, WeightFormat

__all__ = [
    "BF16",
    "DTYPES",
    "FLOAT",
    "INT8",
    "PER_CHANNEL",
    "PER_TENSOR",
    "PER_COLUMN",
    "PER_TOKEN",
    "PRESETS",
    "SCALE_DTYPES",
    "SCALE_MODES",
    "UINT8",
    "Capabilities",
    "DType",
    "DoubleQuant",
    "FakeSpec",
    "FakeTensorSpec",
    "Granularity",
    "Mode",
    "OpSpec",
    "OpSupport",
    "QParams",
    "SmoothSpec",
    "TensorSpec",
    "WeightFormat",
    "dtype",
    "granularity",
    "per_block",
    "per_channel",
    "per_group",
]
