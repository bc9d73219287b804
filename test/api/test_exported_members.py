"""The public names, and nothing else."""

import ast
import subprocess
import sys
import types
from pathlib import Path

import nc

PUBLIC = {
    "ArtefactCorruptError", "ArtefactError", "ArtefactMissingError", "ArtefactOperatorError", "ArtefactSchemaError", "ArtefactWriteError", "AutoConfig",
    "BackendError", "BackendUnavailableError", "BiasAbsorption", "BiasCorrection", "CalibrationError", "CaptureError",
    "ChannelScaling",
    "Comparison", "ComposedConfig", "ConfigError", "DynamicQuantConfig", "Equalization",
    "FakeQuantConfig", "FakeTensorSpec",
    "INT8StaticQuantConfig", "InputError", "NCError", "NCWarning", "NotCalibratedError", "PatternError",
    "SmoothQuantConfig", "StateError", "StaticQuantConfig", "UnknownBackendError", "UnknownFieldError", "UnmatchedRuleError",
    "UnmatchedTypeWarning", "UnsupportedError", "VerificationError", "WeightOnlyConfig", "WeightRounding", "__version__",
    "accelerate_generation", "available_backends", "compare", "convert",
    "describe",
    "export_model", "export_onnx", "export_openvino", "export_pt2", "export_runner", "export_torchscript",
    "get_default_dynamic_config", "get_default_sq_config", "get_default_static_config",
    "load", "prepare", "quantize", "register_backend", "report", "save", "QuantizedModel",
    "Front", "FrontPoint", "TuningConfig", "autoquant", "autotune", "get_all_config_set",
    "get_rtn_double_quant_config_set", "get_woq_tuning_config", "tune",
    "AWQ", "AutoRound", "DoubleQuant", "GPTQ", "HQQ", "RTN", "Rotation", "Smooth", "TEQ", "export_weights", "import_weights",
    "AWQConfig", "AutoRoundConfig", "GPTQConfig", "HQQConfig", "MXQuantConfig", "RTNConfig", "TEQConfig",
    "get_default_AutoRound_config", "get_default_awq_config", "get_default_double_quant_config", "get_default_gptq_config",
    "get_default_hqq_config", "get_default_mx_config", "get_default_rtn_config", "get_default_teq_config",
}  # fmt: skip


def test_public_names():
    assert {name for name in dir(nc) if not isinstance(getattr(nc, name), types.ModuleType)} == PUBLIC
    assert nc.hf.quantize, "modules of the package need no import of their own"


def test_type_checkers_know_what_is_imported_late():
    tree = ast.parse(Path(nc.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    known = {alias.asname: each.module for each in block.body for alias in each.names}
    assert known == nc._MODULES


def test_import_needs_no_torch():
    """The command's help comes at once, and names are imported when they are used."""
    code = "import sys, nc; assert 'torch' not in sys.modules; nc.StaticQuantConfig; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_functions_and_classes_have_docstrings():
    assert not [name for name in PUBLIC - {"__version__"} if not getattr(nc, name).__doc__]


def test_parameters_of_the_front_door():
    import inspect

    def parameters(function):
        return list(inspect.signature(function).parameters)

    assert parameters(nc.prepare)[:4] == ["model", "quant_config", "inplace", "example_inputs"]
    assert set(parameters(nc.prepare)[4:]) == {"backend", "dynamic_shapes", "strict", "placement"}
    assert inspect.signature(nc.prepare).parameters["inplace"].default is False
    assert parameters(nc.convert)[:3] == ["model", "quant_config", "inplace"]
    assert set(parameters(nc.convert)[3:]) == {
        "backend",
        "verify",
        "verify_sizes",
        "isolate",
        "compile",
        "padding",
        "measure",
        "guard",
        "progress",
    }
    assert parameters(nc.quantize)[:6] == [
        "model",
        "quant_config",
        "run_fn",
        "run_args",
        "inplace",
        "example_inputs",
    ]
    assert parameters(nc.save) == ["model", "checkpoint_dir", "format", "card"]
    assert parameters(nc.load)[:4] == ["model_name_or_path", "original_model", "format", "device"]
    assert parameters(nc.describe)[:3] == ["model", "quant_config", "example_inputs"]
