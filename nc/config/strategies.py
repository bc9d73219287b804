"""The strategies: static, SmoothQuant, dynamic and weight-only quantization. Each is a table of fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nc.algorithms import POST, POST_STAGES, PRE, PRE_STAGES
from nc.algorithms.bias_correction import BiasCorrection
from nc.algorithms.solvers import RTN, SOLVERS, Solver
from nc.algorithms.transforms import TRANSFORMS, Transform
from nc.config.base import QuantConfig
from nc.config.fields import (
    ConfigField,
    double_quant,
    flag,
    group_size,
    number,
    one_of,
    plain_object,
    plain_objects,
    precisions,
    range_algorithm,
    ratio_or_auto,
    register_algorithms,
    register_range_algorithm,
    transforms,
)
from nc.errors import ConfigError, UnknownFieldError
from nc.formats import DTYPES, SCALE_DTYPES, SCALE_MODES, TensorFormat, dtype, low_bit
from nc.formats.checks import require
from nc.numerics.low_bit import ACT_DTYPES

_WEIGHTS = {
    "w_dtype": ConfigField("int8", one_of("int8", "fp32", "bf16")),
    "w_sym": ConfigField(True, flag),
    "w_granularity": ConfigField("per_channel", one_of("per_channel", "per_tensor")),
    "w_algo": ConfigField("minmax", one_of("minmax", "mse")),
}
_STATIC = {
    **_WEIGHTS,
    "act_dtype": ConfigField("uint8", one_of("uint8", "int8", "fp32", "bf16")),
    "act_sym": ConfigField(False, flag),
    "act_granularity": ConfigField("per_tensor", one_of("per_tensor", "per_channel")),
    "act_algo": ConfigField("minmax", range_algorithm, register=register_range_algorithm),
    "excluded_precisions": ConfigField((), precisions),
    "remainder": ConfigField("fp32", one_of("fp32", "bf16")),
    "percentile": ConfigField(99.999, number(50.0, 100.0)),
    "pre": ConfigField((), transforms(PRE_STAGES, PRE), outer=True, register=register_algorithms(PRE)),
    "post": ConfigField(
        (BiasCorrection(),), transforms(POST_STAGES, POST), outer=True, register=register_algorithms(POST)
    ),
}


#: Fields of SmoothQuant's search for alpha.
_SEARCH = ("init_alpha", "alpha_min", "alpha_max", "alpha_step", "shared_criterion", "do_blockwise")


class StaticQuantConfig(QuantConfig):
    """Static int8 quantization: activation ranges come from calibration.

    Args:
        w_dtype: "int8", "fp32" to leave the operator alone, or "bf16" to compute it in bf16.
        w_sym: symmetric weights. False is refused, because CPU kernels ignore a weight zero point.
        w_granularity: "per_channel" (output channels) or "per_tensor".
        w_algo: "minmax", or "mse" (the clipped range with the least error).
        act_dtype: "uint8", "int8", "fp32" to leave the operator alone, or "bf16" to compute it in bf16.
        act_sym: symmetric activations (zero point 128 for uint8, 0 for int8).
        act_granularity: "per_tensor". "per_channel" is refused, because no CPU kernel has it.
        act_algo: how ranges are found; "auto" tries several algorithms for each tensor.
            docs/how-to/calibrate.md says when to use which.
        excluded_precisions: `("bf16",)` keeps an operator out of bf16, even if `remainder` asks for it.
        remainder: precision of convolutions, linears and matmuls that should be int8 but have no int8 kernel:
            "fp32", or "bf16" on a CPU with AVX512-BF16.
        percentile: how much of the data the range covers, in percent, for `act_algo="percentile"`: above 50,
            up to 100.
        pre: algorithms for the fp32 model, applied first and in this order: `Equalization()`,
            `BiasAbsorption()`.
        post: algorithms for the quantized model, applied last: `BiasCorrection()` by default.
        white_list: names, patterns or types of the operators to which these values apply; all others stay
            fp32. "*" means all.

    Raises:
        UnknownFieldError: a field that does not exist; the message has the nearest name.
        ConfigError: a value that does not exist, or fields that contradict each other.
        UnsupportedError: a valid value that no backend implements.

    Example:
        >>> config = StaticQuantConfig(act_sym=True)
        >>> _ = config.set_local("classifier", StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))
    """

    algorithm, alias, family = "static", "static_quant", "static"
    FIELDS = _STATIC


#: Name of the class that Neural Compressor's `StaticQuantConfig` makes.
INT8StaticQuantConfig = StaticQuantConfig


class SmoothQuantConfig(QuantConfig):
    """SmoothQuant (arXiv 2211.10438), then static quantization.

    It moves outliers from activation channels into the weights of linears.

    Args:
        alpha: strength, 0 to 1: `s = max|X|^alpha / max|W|^(1 - alpha)` per channel. "auto" tries
            `alpha_min` to `alpha_max` for each linear and keeps the value with the least output error.
        folding: fold 1/s into the preceding normalisation or linear, if no other operator reads its result.
            Else a multiplication is inserted before the linear.
        scale_sharing: linears that read one tensor share one s. With folding they always do.
        init_alpha: the first alpha that "auto" tries, and keeps if no other one is better.
        alpha_min: lowest alpha that "auto" tries.
        alpha_max: highest alpha that "auto" tries.
        alpha_step: difference between the values that "auto" tries.
        shared_criterion: how the weights and the errors of linears that share one s are combined: "max",
            "min" or "mean".
        do_blockwise: "auto" compares the outputs of whole blocks (a name up to its first number:
            "encoder.layer.0") instead of single linears.
        auto_alpha_args: the last six as a dict, as in Neural Compressor.

    The other arguments and the errors are those of `StaticQuantConfig`.
    """

    algorithm, alias, family = "smooth", "smooth_quant", "static"
    FIELDS = {
        **{name: field for name, field in _STATIC.items() if name not in ("percentile", "pre", "post")},
        "alpha": ConfigField(0.5, ratio_or_auto),
        "folding": ConfigField(False, flag),
        "scale_sharing": ConfigField(False, flag),
        "init_alpha": ConfigField(0.5, number(0.0, 1.0, closed=True)),
        "alpha_min": ConfigField(0.0, number(0.0, 1.0, closed=True)),
        "alpha_max": ConfigField(1.0, number(0.0, 1.0, closed=True)),
        "alpha_step": ConfigField(0.1, number(0.0, 1.0)),
        "shared_criterion": ConfigField("max", one_of("max", "min", "mean")),
        "do_blockwise": ConfigField(False, flag),
        **{name: _STATIC[name] for name in ("percentile", "pre", "post")},
    }

    def __init__(self, *args: Any, auto_alpha_args: Mapping[str, Any] | None = None, **fields: Any) -> None:
        given = {} if auto_alpha_args is None else auto_alpha_args
        known = isinstance(given, Mapping) and set(given) <= set(_SEARCH)
        require(known, "auto_alpha_args", f"a dict with keys out of {', '.join(_SEARCH)}", given)
        super().__init__(*args, **{**given, **fields})

    @classmethod
    def check_values(cls, values: Mapping[str, Any]) -> None:
        """As for all strategies; also checks the limits of alpha."""
        super().check_values(values)
        if values["alpha_min"] > values["alpha_max"]:
            msg = f"alpha_min={values['alpha_min']} is above alpha_max={values['alpha_max']}."
            raise ConfigError(msg)


class DynamicQuantConfig(QuantConfig):
    """Dynamic int8 quantization: int8 weights, activation ranges computed in each call. Needs no calibration.

    It is for linears and recurrent layers, and for convolutions that a rule or the white list names, or their
    type: `StaticQuantConfig().set_local(torch.nn.Conv2d, DynamicQuantConfig())`.

    Matmuls stay fp32 unless a rule or white list names them: `set_local("matmul", DynamicQuantConfig())`.
    Then each row of the left side has a range, and each column of the right one. Values of attention have one
    for each row instead, and probabilities are rounded times these: one that meets a small value takes no
    codes from the others. `native` computes attention so with AVX512-VNNI; elsewhere the report says why it
    is fp32.

    Args:
        w_dtype: "int8", "fp32" to leave the operator alone, or "bf16" to compute it in bf16.
        w_sym: symmetric weights; False is refused, as for static quantization.
        w_granularity: "per_channel" (output channels) or "per_tensor".
        w_algo: "minmax" or "mse".
        act_dtype: "uint8", "int8" (the same results: both have 256 levels around a zero point), "fp32" or
            "bf16".
        act_sym: symmetric activations.
        act_granularity: "per_token" (one range for each row) or "per_tensor". Convolutions
            have "per_tensor", so the result of an image depends on the others of its call.
        act_algo: "minmax".
        excluded_precisions: as for static quantization.
        remainder: as for static quantization.
        keep_inaccurate: keep operators int8 whose own result has less than 10 dB against fp32 on the example
            inputs; by default they stay fp32.
        pre: as for static quantization.
        white_list: as for static quantization.
    """

    algorithm, alias, family = "dynamic", "pt2e_dynamic_quant", "dynamic"
    FIELDS = {
        **_WEIGHTS,
        "act_dtype": ConfigField("uint8", one_of("uint8", "int8", "fp32", "bf16")),
        "act_sym": ConfigField(False, flag),
        "act_granularity": ConfigField("per_token", one_of("per_token", "per_tensor")),
        "act_algo": ConfigField("minmax", one_of("minmax")),
        "excluded_precisions": ConfigField((), precisions),
        "remainder": _STATIC["remainder"],
        "keep_inaccurate": ConfigField(False, flag),
        "pre": _STATIC["pre"],
    }

    @classmethod
    def _check_name(cls, name: str) -> None:
        if name == "skip_slow":
            msg = (
                "DynamicQuantConfig has no field 'skip_slow': convert(..., guard=\"undo\") measures "
                "which operators are slower in int8, and leaves these in fp32."
            )
            raise UnknownFieldError(msg)
        super()._check_name(name)


class WeightOnlyConfig(QuantConfig):
    """Weight-only quantization of linears (also transformers' `Conv1D`), and of embeddings if asked.

    The model keeps its class.

    Four independent choices: the number format (`w_dtype`, `group_size`, `w_sym`, `scale_dtype`,
    `double_quant`), the range rule (`w_algo`), the `transforms`, and the `solver`.
    docs/how-to/quantize-an-llm.md says when to use which.

    Args:
        w_dtype: a number format of docs/reference/number-formats.md, or "fp32" to leave the layer alone.
        group_size: number of neighbouring input channels that share a scale; -1 means one scale per output
            channel.
        w_sym: False stores a zero point for each group.
        w_algo: range rule: "minmax", "mse", or "wls" (weighted least squares; uses calibration data if there
            is any).
        scale_dtype: how scales are stored: "fp32", "fp16", "bf16", "e8m0" (powers of two) or "e4m3" (with one
            more fp32 scale for the whole tensor, as in NVFP4).
        act_dtype: "fp32" leaves activations as they are; "bf16" computes in bf16; "int8" rounds each token to
            8 bits with one scale, "int8_block32" with a scale for each 32 of its elements.
        solver: chooses the codes: `RTN()`, `GPTQ()`, … One for a layer can be set with `set_local`.
        transforms: change weights of the float model first, without changing what it computes: `AWQ()`, … A
            rule gives them to some layers, or `transforms=()` to leave them alone. `Rotation()` changes the
            whole model, so it belongs in the outer configuration only.
        lm_head: number format of the output head, e.g. "int8"; None leaves it float. A rule that names the
            head also quantizes it.
        embedding: number format of embeddings; None leaves them float.
        double_quant: a `DoubleQuant`, which quantizes the scales themselves; True means `DoubleQuant()`, None
            or False leaves the scales as they are.
        float_zero: with `w_sym=False`, store a minimum in the scale's format for each group instead of an
            integer zero point.
        scale_mode: with scale_dtype "e8m0", how the power of two is chosen: "floor", "ceil", "even" or
            "rceil".
        white_list: as for static quantization.

    Raises:
        UnknownFieldError, ConfigError: as for `StaticQuantConfig`.

    Example:
        >>> config = WeightOnlyConfig("int4", group_size=64, lm_head="int8")
        >>> _ = config.set_local(".*down_proj", WeightOnlyConfig("int8"))
    """

    algorithm, alias, family = "weight_only", "weight_only", "weight_only"
    FIELDS = {
        "w_dtype": ConfigField("int4", one_of(*DTYPES, "fp32")),
        "group_size": ConfigField(128, group_size),
        "w_sym": ConfigField(True, flag),
        "w_algo": ConfigField("wls", one_of("minmax", "mse", "wls")),
        "scale_dtype": ConfigField("fp32", one_of(*SCALE_DTYPES)),
        "act_dtype": ConfigField("fp32", one_of(*ACT_DTYPES)),
        "solver": ConfigField(RTN(), plain_object(SOLVERS, Solver)),
        "transforms": ConfigField((), plain_objects(TRANSFORMS, Transform)),
        "lm_head": ConfigField(None, one_of(*DTYPES), outer=True),
        "embedding": ConfigField(None, one_of(*DTYPES), outer=True),
        "double_quant": ConfigField(None, double_quant),
        "float_zero": ConfigField(False, flag),
        "scale_mode": ConfigField("floor", one_of(*SCALE_MODES)),
    }

    @classmethod
    def check_values(cls, values: Mapping[str, Any]) -> None:
        """Raise ConfigError for values that are valid alone, but not together."""
        if values["w_dtype"] != "fp32":
            weight_format(values)

    @classmethod
    def check_local(cls, where: str, given: dict[str, Any], around: Mapping[str, Any]) -> dict[str, Any]:
        """As for all strategies.

        Transforms of the whole model may be repeated, but only the outer configuration can ask for them.
        """
        if "transforms" not in given:
            return given
        whole = [transform for transform in given["transforms"] if transform.level == "model"]
        unknown = next(
            (transform for transform in whole if transform not in around.get("transforms", ())), None
        )
        if unknown is not None:
            msg = (
                f"{where}: {unknown} changes the whole model: what one layer writes, others read. Give it to "
                f"the outer configuration: WeightOnlyConfig(…, transforms=[{type(unknown).__name__}()])."
            )
            raise ConfigError(msg)
        return {
            **given,
            "transforms": tuple(transform for transform in given["transforms"] if transform.level != "model"),
        }


def weight_format(values: Mapping[str, Any], dtype_name: str | None = None) -> TensorFormat:
    """Return the format that the fields of a `WeightOnlyConfig` ask for.

    Args:
        values: by the name of the field.
        dtype_name: instead of `w_dtype`.

    Raises:
        ConfigError: values contradict each other.
    """
    return low_bit(
        dtype=dtype(dtype_name or values["w_dtype"]),
        group_size=values["group_size"],
        symmetric=values["w_sym"],
        scale_dtype=values["scale_dtype"],
        double_quant=values["double_quant"] or None,
        float_zero=values["float_zero"],
        scale_mode=values["scale_mode"],
        tensor_scale=values["scale_dtype"]
        == "e4m3",  # alone it ends at 2^-9, the size of usual weights' scales
    )


def get_default_static_config() -> StaticQuantConfig:
    """`StaticQuantConfig()`: int8 weights per output channel, uint8 affine activations, min-max ranges."""
    return StaticQuantConfig()


def get_default_dynamic_config() -> DynamicQuantConfig:
    """`DynamicQuantConfig()`: int8 weights per output channel, uint8 affine activations per token."""
    return DynamicQuantConfig()


def get_default_sq_config() -> SmoothQuantConfig:
    """`SmoothQuantConfig()`: alpha 0.5, then static quantization."""
    return SmoothQuantConfig()
