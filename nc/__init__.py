"""Post-training quantization of PyTorch models for x86-64 CPUs.

Most names are imported when they are used first: `import nc` alone needs no torch.
"""

import importlib as _importlib
import importlib.util as _util
import typing as _typing

from nc._version import __version__ as __version__
from nc.errors import ArtefactCorruptError as ArtefactCorruptError
from nc.errors import ArtefactError as ArtefactError
from nc.errors import ArtefactMissingError as ArtefactMissingError
from nc.errors import ArtefactOperatorError as ArtefactOperatorError
from nc.errors import ArtefactSchemaError as ArtefactSchemaError
from nc.errors import ArtefactWriteError as ArtefactWriteError
from nc.errors import BackendError as BackendError
from nc.errors import BackendUnavailableError as BackendUnavailableError
from nc.errors import CalibrationError as CalibrationError
from nc.errors import CaptureError as CaptureError
from nc.errors import ConfigError as ConfigError
from nc.errors import InputError as InputError
from nc.errors import NCError as NCError
from nc.errors import NCWarning as NCWarning
from nc.errors import NotCalibratedError as NotCalibratedError
from nc.errors import PatternError as PatternError
from nc.errors import StateError as StateError
from nc.errors import UnknownBackendError as UnknownBackendError
from nc.errors import UnknownFieldError as UnknownFieldError
from nc.errors import UnmatchedRuleError as UnmatchedRuleError
from nc.errors import UnmatchedTypeWarning as UnmatchedTypeWarning
from nc.errors import UnsupportedError as UnsupportedError
from nc.errors import VerificationError as VerificationError
from nc.process import installation as _installation
from nc.process import names as _names

if _typing.TYPE_CHECKING:
    from nc.algorithms.bias_absorption import BiasAbsorption as BiasAbsorption
    from nc.algorithms.bias_correction import BiasCorrection as BiasCorrection
    from nc.algorithms.channel_scaling import ChannelScaling as ChannelScaling
    from nc.algorithms.equalization import Equalization as Equalization
    from nc.algorithms.solvers import GPTQ as GPTQ
    from nc.algorithms.solvers import HQQ as HQQ
    from nc.algorithms.solvers import RTN as RTN
    from nc.algorithms.solvers import AutoRound as AutoRound
    from nc.algorithms.transforms import AWQ as AWQ
    from nc.algorithms.transforms import TEQ as TEQ
    from nc.algorithms.transforms import Rotation as Rotation
    from nc.algorithms.transforms import Smooth as Smooth
    from nc.algorithms.weight_rounding import WeightRounding as WeightRounding
    from nc.api.artefact import load as load
    from nc.api.artefact import save as save
    from nc.api.exports import export_model as export_model
    from nc.api.exports import export_onnx as export_onnx
    from nc.api.exports import export_openvino as export_openvino
    from nc.api.exports import export_pt2 as export_pt2
    from nc.api.exports import export_runner as export_runner
    from nc.api.exports import export_torchscript as export_torchscript
    from nc.api.quantized import QuantizedModel as QuantizedModel
    from nc.api.workflow import convert as convert
    from nc.api.workflow import describe as describe
    from nc.api.workflow import prepare as prepare
    from nc.api.workflow import quantize as quantize
    from nc.api.workflow import report as report
    from nc.backends import available_backends as available_backends
    from nc.backends import register_backend as register_backend
    from nc.config import AutoRoundConfig as AutoRoundConfig
    from nc.config import AWQConfig as AWQConfig
    from nc.config import ComposedConfig as ComposedConfig
    from nc.config import DynamicQuantConfig as DynamicQuantConfig
    from nc.config import FakeQuantConfig as FakeQuantConfig
    from nc.config import GPTQConfig as GPTQConfig
    from nc.config import HQQConfig as HQQConfig
    from nc.config import INT8StaticQuantConfig as INT8StaticQuantConfig
    from nc.config import MXQuantConfig as MXQuantConfig
    from nc.config import RTNConfig as RTNConfig
    from nc.config import SmoothQuantConfig as SmoothQuantConfig
    from nc.config import StaticQuantConfig as StaticQuantConfig
    from nc.config import TEQConfig as TEQConfig
    from nc.config import WeightOnlyConfig as WeightOnlyConfig
    from nc.config import get_default_AutoRound_config as get_default_AutoRound_config
    from nc.config import get_default_awq_config as get_default_awq_config
    from nc.config import get_default_double_quant_config as get_default_double_quant_config
    from nc.config import get_default_dynamic_config as get_default_dynamic_config
    from nc.config import get_default_gptq_config as get_default_gptq_config
    from nc.config import get_default_hqq_config as get_default_hqq_config
    from nc.config import get_default_mx_config as get_default_mx_config
    from nc.config import get_default_rtn_config as get_default_rtn_config
    from nc.config import get_default_sq_config as get_default_sq_config
    from nc.config import get_default_static_config as get_default_static_config
    from nc.config import get_default_teq_config as get_default_teq_config
    from nc.config.auto import AutoConfig as AutoConfig
    from nc.formats import DoubleQuant as DoubleQuant
    from nc.formats import FakeTensorSpec as FakeTensorSpec
    from nc.generation import accelerate_generation as accelerate_generation
    from nc.interchange import export_weights as export_weights
    from nc.interchange import import_weights as import_weights
    from nc.parity.compare import Comparison as Comparison
    from nc.parity.compare import compare as compare
    from nc.process import installation as installation
    from nc.tuning.autoquant import autoquant as autoquant
    from nc.tuning.autotune import TuningConfig as TuningConfig
    from nc.tuning.autotune import autotune as autotune
    from nc.tuning.autotune import get_all_config_set as get_all_config_set
    from nc.tuning.autotune import get_rtn_double_quant_config_set as get_rtn_double_quant_config_set
    from nc.tuning.autotune import get_woq_tuning_config as get_woq_tuning_config
    from nc.tuning.front import Front as Front
    from nc.tuning.front import FrontPoint as FrontPoint
    from nc.tuning.tune import tune as tune

#: Names by the module that has them.
_NAMES = {
    "nc.algorithms.bias_absorption": "BiasAbsorption",
    "nc.algorithms.bias_correction": "BiasCorrection",
    "nc.algorithms.channel_scaling": "ChannelScaling",
    "nc.algorithms.equalization": "Equalization",
    "nc.algorithms.solvers": "GPTQ HQQ RTN AutoRound",
    "nc.algorithms.transforms": "AWQ TEQ Rotation Smooth",
    "nc.algorithms.weight_rounding": "WeightRounding",
    "nc.api.artefact": "load save",
    "nc.api.exports": (
        "export_model export_onnx export_openvino export_pt2 export_runner export_torchscript"
    ),
    "nc.generation": "accelerate_generation",
    "nc.api.quantized": "QuantizedModel",
    "nc.tuning.autoquant": "autoquant",
    "nc.tuning.autotune": (
        "TuningConfig autotune get_all_config_set get_rtn_double_quant_config_set get_woq_tuning_config"
    ),
    "nc.tuning.front": "Front FrontPoint",
    "nc.tuning.tune": "tune",
    "nc.api.workflow": "convert describe prepare quantize report",
    "nc.backends": "available_backends register_backend",
    "nc.config": (
        "AutoRoundConfig AWQConfig ComposedConfig DynamicQuantConfig FakeQuantConfig GPTQConfig HQQConfig "
        "INT8StaticQuantConfig MXQuantConfig RTNConfig SmoothQuantConfig StaticQuantConfig TEQConfig "
        "WeightOnlyConfig get_default_AutoRound_config get_default_awq_config "
        "get_default_double_quant_config get_default_dynamic_config get_default_gptq_config "
        "get_default_hqq_config get_default_mx_config get_default_rtn_config get_default_sq_config "
        "get_default_static_config get_default_teq_config"
    ),
    "nc.config.auto": "AutoConfig",
    "nc.formats": "DoubleQuant FakeTensorSpec",
    "nc.interchange": "export_weights import_weights",
    "nc.parity.compare": "Comparison compare",
    "nc.process": "installation",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> _typing.Any:
    """Import a public name, or a module of the package.

    Raises:
        AttributeError: there is none; says what stands for a name of Neural Compressor 2.x, or which is near.
    """
    if name in _MODULES:
        value = getattr(_importlib.import_module(_MODULES[name]), name)
    elif not name.startswith("_") and _util.find_spec(f"nc.{name}") is not None:
        value = _importlib.import_module(f"nc.{name}")
    else:
        msg = f"module 'nc' has no attribute {name!r}.{_names.hint(name, _MODULES)}"
        raise AttributeError(msg, name=name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, and the modules that are imported."""
    public = {name for name in globals() if not name.startswith("_")}
    return sorted({*public, *_MODULES, "__version__"})


_installation.warn_of_others()
