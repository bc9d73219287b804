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
    input_groups,
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
)
from nc.formats.tensor_format import PRESETS, SCALE_DTYPES, SCALE_MODES, DoubleQuant, TensorFormat, low_bit

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
    "TensorFormat",
    "dtype",
    "granularity",
    "input_groups",
    "low_bit",
    "per_block",
    "per_channel",
    "per_group",
]
