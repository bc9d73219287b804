"""Neural Compressor's weight-only configurations.

Its names, parameters and defaults give a `WeightOnlyConfig`.

Each is a function that translates; there is no second engine. All fields of the result are set, so it is
complete in `set_local`, as Neural Compressor's is. Parameters that only control how memory is saved have no
effect, because layers are always quantized block by block; the docstrings name them. A parameter that would
change numbers and has no equivalent gives an `NCWarning` or an `UnsupportedError`.
docs/how-to/migrate-from-neural-compressor.md compares the two.
"""

# ruff: noqa: D417 - names and positions are Neural Compressor's; docstrings refer to each other

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from nc.algorithms.solvers import GPTQ, HQQ, RTN, AutoRound
from nc.algorithms.transforms import AWQ, TEQ
from nc.config import base
from nc.config.alternatives import Alternatives, all_of, single, with_alternatives
from nc.config.base import AnyConfig, QuantConfig
from nc.config.document import check_keys, fields_of
from nc.config.fake_quant import FakeQuantConfig
from nc.config.strategies import WeightOnlyConfig
from nc.errors import ConfigError, UnknownFieldError, UnsupportedError
from nc.formats import DoubleQuant, FakeTensorSpec
from nc.formats.checks import is_whole, require
from nc.process.warn import warn

#: Names of number formats; "int" and "int1" to "int8" are not in it.
_FORMATS = {"nf4": "nf4", "fp4_e2m1": "fp4_e2m1", "fp8_e5m2": "fp8_e5m2", "fp8_e4m3fn": "fp8_e4m3"}
_MX = {
    "int8": "mxint8",
    "fp8_e5m2": "fp8_e5m2",
    "fp8_e4m3": "fp8_e4m3",
    "fp6_e3m2": "fp6_e3m2",
    "fp6_e2m3": "fp6_e2m3",
    "fp4": "fp4_e2m1",
}
_SCALES = {
    f"{prefix}{long}": short
    for long, short in (("float16", "fp16"), ("bfloat16", "bf16"), ("float32", "fp32"))
    for prefix in ("", "torch.")
}
#: What is done instead of what parameters ask for.
_NO_FULL_RANGE = "symmetric ranges are those of use_full_range=False"
_MEASURED = "which layers are in front is measured"
_MX_FLOATS = ("float32", "bfloat16", "float16")
_DOUBLE_QUANT_TYPES: dict[str, dict[str, Any]] = {
    "BNB_NF4": {
        "dtype": "nf4",
        "bits": 4,
        "group_size": 32,
        "use_double_quant": True,
        "double_quant_bits": 8,
        "double_quant_use_sym": False,
        "double_quant_group_size": 256,
    },
    "GGML_TYPE_Q4_K": {
        "dtype": "int",
        "bits": 4,
        "use_sym": False,
        "group_size": 32,
        "use_double_quant": True,
        "double_quant_bits": 6,
        "double_quant_use_sym": True,
        "double_quant_group_size": 8,
    },
}


@with_alternatives
def RTNConfig(
    dtype: str = "int",
    bits: int = 4,
    use_sym: bool = True,
    group_size: int = 32,
    group_dim: int = 1,
    use_full_range: bool = False,
    use_mse_search: bool = False,
    use_layer_wise: bool = True,
    model_path: str = "",
    use_double_quant: bool = False,
    double_quant_dtype: str = "int",
    double_quant_bits: int = 8,
    double_quant_use_sym: bool = False,
    double_quant_group_size: int = 256,
    quant_lm_head: bool = False,
    white_list: Any = "*",
) -> WeightOnlyConfig:
    """Round to nearest; ranges from the smallest and largest weight of a group.

    Args:
        dtype: "int" (of `bits` bits), "int2" to "int8", "nf4", "fp4_e2m1", "fp8_e5m2", "fp8_e4m3fn", or
            "fp32" to leave layers alone.
        bits: 2 to 8, for dtype "int".
        use_sym: False stores a zero point for each group. Floating-point formats have none.
        group_size: number of neighbouring input channels that share a scale; -1: all.
        group_dim: 1, the only one.
        use_full_range: not used: a symmetric group's largest weight gets the largest code. True gives an
            `NCWarning`.
        use_mse_search: range rule "mse", for each group (in Neural Compressor one ratio for a layer).
        use_layer_wise, model_path: no effect; weights are those of the model that is given.
        use_double_quant: quantize the scales too.
        double_quant_dtype: "int" or "intN".
        double_quant_bits: of a scale's code.
        double_quant_use_sym: no effect; codes of scales are unsigned, without a zero point.
        double_quant_group_size: number of scales that share an outer scale.
        quant_lm_head: quantize the output head too.
        white_list: as for `WeightOnlyConfig`.

    Raises:
        ConfigError: a value that does not exist.
        UnsupportedError: a value that is Neural Compressor's only.
    """
    given = locals()
    _no_effect("RTNConfig", use_full_range=(use_full_range, False, _NO_FULL_RANGE))
    return _weights(given)


@with_alternatives
def GPTQConfig(
    dtype: str = "int",
    bits: int = 4,
    use_sym: bool = True,
    group_size: int = 32,
    use_mse_search: bool = False,
    use_layer_wise: bool = False,
    use_block_wise: bool = False,
    model_path: str = "",
    use_double_quant: bool = False,
    double_quant_dtype: str = "int",
    double_quant_bits: int = 8,
    double_quant_use_sym: bool = False,
    double_quant_group_size: int = 256,
    quant_lm_head: bool = False,
    act_order: bool = False,
    hybrid_order: bool = False,
    fp8_aware: bool = False,
    percdamp: float = 0.01,
    block_size: int = 2048,
    static_groups: bool = False,
    true_sequential: bool = False,
    white_list: Any = "*",
) -> WeightOnlyConfig:
    """GPTQ. Needs calibration data.

    Args:
        act_order: `GPTQ(order="static")`: columns with the largest inputs first, all scales from the original
            weight. Kernels need no permutation.
        hybrid_order: `GPTQ(order="groups")`: whole groups with the largest inputs first.
        fp8_aware: False, the only one.
        percdamp: share of the mean of diag(H) that is added to it.
        block_size: columns whose updates are put together; it changes the time only.
        static_groups: all scales come from the original weight.
        true_sequential: not used: all layers of a block are solved from the same inputs. True gives an
            `NCWarning`.
        use_block_wise: no effect; blocks are always solved in sequence.

    The other parameters and the errors are those of `RTNConfig`.
    """
    given = locals()
    _no_effect(
        "GPTQConfig",
        true_sequential=(true_sequential, False, "all layers of a block are solved from the same inputs"),
    )
    if fp8_aware:
        msg = 'GPTQConfig(fp8_aware=True): there is no such mode; use dtype="fp8_e4m3fn" for weights in FP8.'
        raise UnsupportedError(msg)
    if act_order and hybrid_order:
        msg = "act_order and hybrid_order ask for two orders of the columns; set one of them."
        raise ConfigError(msg)
    order: Any = "static" if act_order else "groups" if hybrid_order else "none"
    solver = GPTQ(damp=percdamp, block=block_size, order=order, static_groups=static_groups)
    return _weights(given, solver=solver)


@with_alternatives
def AWQConfig(
    dtype: str = "int",
    bits: int = 4,
    use_sym: bool = True,
    group_size: int = 32,
    group_dim: int = 1,
    use_full_range: bool = False,
    use_mse_search: bool = False,
    use_layer_wise: bool = False,
    use_double_quant: bool = False,
    double_quant_dtype: str = "int",
    double_quant_bits: int = 8,
    double_quant_use_sym: bool = True,
    double_quant_group_size: int = 256,
    quant_lm_head: bool = False,
    use_auto_scale: bool = True,
    use_auto_clip: bool = True,
    folding: bool = False,
    absorb_layer_dict: Mapping[str, Any] | None = None,
    white_list: Any = "*",
) -> WeightOnlyConfig:
    """AWQ: a scale per input channel, searched; then round to nearest.

    Needs calibration data, but no `example_inputs`.

    Args:
        use_auto_scale: the transform `AWQ()`.
        use_auto_clip: range rule "wls", which finds the range of each group with the least error weighted
            with the inputs.
        folding: no effect: scales are folded into the layer in front where the model stays the same, and are
            left out elsewhere.
        absorb_layer_dict: not used: which layers are in front is measured. A dict with entries gives an
            `NCWarning`.

    The other parameters and the errors are those of `RTNConfig`.
    """
    given = locals()
    _no_effect(
        "AWQConfig",
        use_full_range=(use_full_range, False, _NO_FULL_RANGE),
        absorb_layer_dict=(absorb_layer_dict or {}, {}, _MEASURED),
    )
    rule = "wls" if use_auto_clip else "minmax"
    transforms = (AWQ(clip=None if use_auto_clip else False),) if use_auto_scale else ()
    return _weights(given, rule=rule, transforms=transforms)


@with_alternatives
def TEQConfig(
    dtype: str = "int",
    bits: int = 4,
    use_sym: bool = True,
    group_size: int = 32,
    group_dim: int = 1,
    use_full_range: bool = False,
    use_mse_search: bool = False,
    use_layer_wise: bool = False,
    use_double_quant: bool = False,
    double_quant_dtype: str = "int",
    double_quant_bits: int = 8,
    double_quant_use_sym: bool = True,
    double_quant_group_size: int = 256,
    quant_lm_head: bool = False,
    absorb_to_layer: Mapping[str, Any] | None = None,
    folding: bool = True,
    white_list: Any = "*",
) -> WeightOnlyConfig:
    """TEQ: a scale per input channel, learned; then round to nearest.

    Needs calibration data, but no `example_inputs`.

    `run_fn` only has to call the model: `convert` learns the scales, from the error of each block's output.

    Args:
        absorb_to_layer: not used: which layers are in front is measured. A dict with entries gives an
            `NCWarning`.
        folding: True: scales are folded into the layer in front. False gives an `NCWarning`.

    The other parameters and the errors are those of `RTNConfig`.
    """
    given = locals()
    _no_effect(
        "TEQConfig",
        use_full_range=(use_full_range, False, _NO_FULL_RANGE),
        absorb_to_layer=(absorb_to_layer or {}, {}, _MEASURED),
        folding=(folding, True, "scales are always folded into the layer in front"),
    )
    return _weights(given, transforms=(TEQ(),))


@with_alternatives
def HQQConfig(
    dtype: str = "int",
    bits: int = 4,
    group_size: int = 64,
    quant_zero: bool = True,
    quant_scale: bool = False,
    scale_quant_group_size: int = 128,
    quant_lm_head: bool = False,
    white_list: Any = "*",
) -> WeightOnlyConfig:
    """HQQ: asymmetric ranges from a half-quadratic optimisation. Needs no data.

    Args:
        quant_zero: True: zero points are whole numbers of `bits` bits (in Neural Compressor 8 bits with a
            scale for each row). False: each group has a minimum in fp32.
        quant_scale: quantize the scales to 8 bits. Minima are quantized with them, so it needs
            `quant_zero=False`.
        scale_quant_group_size: number of scales that share an outer scale.

    The other parameters and the errors are those of `RTNConfig`.
    """
    given = locals()
    if quant_scale and quant_zero:
        msg = (
            "HQQConfig(quant_scale=True) stores minima as codes beside the scales; set quant_zero=False "
            "with it."
        )
        raise UnsupportedError(msg)
    double = DoubleQuant(bits=8, group_size=scale_quant_group_size) if quant_scale else None
    return _weights({**given, "use_sym": False}, double, solver=HQQ(), float_zero=not quant_zero)


@with_alternatives
def AutoRoundConfig(
    dtype: str | None = None,
    bits: int | None = None,
    use_sym: bool | None = None,
    group_size: int | None = None,
    act_bits: int | None = None,
    act_group_size: int | None = None,
    act_sym: bool | None = None,
    act_dtype: str | None = None,
    act_dynamic: bool | None = None,
    super_bits: int | None = None,
    super_group_size: int | None = None,
    enable_full_range: bool = False,
    batch_size: int = 8,
    lr: float | None = None,
    minmax_lr: float | None = None,
    iters: int = 200,
    nsamples: int = 128,
    seed: int = 42,
    enable_quanted_input: bool = True,
    enable_minmax_tuning: bool = True,
    scale_dtype: str = "fp16",
    scheme: str = "W4A16",
    quant_lm_head: bool = False,
    white_list: Any = "*",
    **others: Any,
) -> WeightOnlyConfig:
    """AutoRound: rounding and ranges are learned block by block with signed gradients.

    Needs calibration data.

    Args:
        dtype: "int" or a format of `RTNConfig`; None, like `bits`, `use_sym` and `group_size`, takes what
            `scheme` says.
        act_bits: 16 or more leaves activations alone; 8 rounds each token to 8 bits.
        act_group_size, act_sym, act_dtype, act_dynamic: `act_bits=8` means per token and dynamic here; others
        give an `UnsupportedError`.
        super_bits, super_group_size: quantize the scales too.
        batch_size: samples in a step.
        lr, minmax_lr: learning rates; None takes those of `AutoRound`.
        iters: steps for each block.
        nsamples: at most so many calibration samples are used.
        seed: of the order of the samples.
        scale_dtype: "fp16", "bf16" or "fp32".
        scheme: "W2A16", "W3A16", "W4A16", "W8A16" (symmetric, groups of 128) or "W4A8", "W8A8" with
            activations of 8 bits.
        others: further parameters of Neural Compressor. Those that would change numbers give an `NCWarning`.

    The other parameters and the errors are those of `RTNConfig`.
    """
    given = locals()
    found = re.fullmatch(r"W([2-8])A(8|16)", str(scheme))
    if found is None:
        msg = (
            f"AutoRoundConfig(scheme={scheme!r}): nc knows W2A16 to W8A16 and W2A8 to W8A8; use "
            "MXQuantConfig for MX formats."
        )
        raise UnsupportedError(msg)
    act_bits = int(found[2]) if act_bits is None else act_bits
    require(is_whole(act_bits, 1), "act_bits", "a whole number of bits", act_bits)
    per_token = (
        act_bits == 8
        and act_group_size in (None, -1)
        and act_dynamic in (None, True)
        and act_dtype in (None, "int")
    )
    if act_bits < 16 and not per_token:
        msg = (
            "AutoRoundConfig: activations stay as they are (act_bits=16) or get 8 bits for each token "
            "(act_bits=8, act_dynamic=True)."
        )
        raise UnsupportedError(msg)
    unknown = set(others) - _AUTO_ROUND_OTHERS.keys()
    if unknown:
        msg = f"AutoRoundConfig has no parameter {sorted(unknown)[0]!r}."
        raise UnknownFieldError(msg)
    _no_effect(
        "AutoRoundConfig",
        act_sym=(act_sym, None, "the 8 bits of a token are symmetric"),
        enable_full_range=(enable_full_range, False, "symmetric ranges have no code for the negative end"),
        enable_minmax_tuning=(enable_minmax_tuning, True, "ranges are learned with the rounding"),
        enable_quanted_input=(
            enable_quanted_input,
            True,
            "blocks always get the inputs that the quantized model gives them",
        ),
        **{
            name: (value, *_AUTO_ROUND_OTHERS[name])
            for name, value in others.items()
            if _AUTO_ROUND_OTHERS[name][1]
        },
    )
    solver = AutoRound(steps=iters, batch=batch_size, samples=nsamples, lr=lr, range_lr=minmax_lr, seed=seed)
    double = None if super_bits is None else DoubleQuant(bits=super_bits, group_size=super_group_size or -1)
    scheme_says = {"dtype": "int", "bits": int(found[1]), "use_sym": True, "group_size": 128}
    return _weights(
        {name: scheme_says.get(name) if value is None else value for name, value in given.items()},
        double,
        solver=solver,
        scale_dtype=_SCALES.get(str(scale_dtype), scale_dtype),
        act_dtype="int8" if act_bits == 8 else "fp32",
    )


@with_alternatives
def MXQuantConfig(
    w_dtype: str = "int8",
    act_dtype: str = "int8",
    out_dtype: str = "bfloat16",
    blocksize: int = 32,
    round_method: str = "nearest",
    weight_only: bool = False,
    white_list: Any = "*",
) -> QuantConfig:
    """Return the MX formats of the OCP.

    They have elements of 4 to 8 bits in blocks, each with a power of two as its scale.

    Args:
        w_dtype: "int8", "fp8_e5m2", "fp8_e4m3", "fp6_e3m2", "fp6_e2m3" or "fp4"; a name of a float leaves
            layers alone.
        act_dtype: likewise for the inputs of linears, whose scales are found in each call.
        out_dtype: not used: linears return the dtype that they compute in.
        blocksize: number of neighbours that share a scale.
        round_method: of elements "nearest" or "even" (half to even, as the OCP's text allows both).
        weight_only: leave activations alone.

    Returns:
        With `weight_only` (or a float as `act_dtype`) a `WeightOnlyConfig`, which stores the weights in the
        format. Otherwise a `FakeQuantConfig`, which simulates both on the reference backend: `prepare` then
        needs `example_inputs`.

    Raises:
        ConfigError, UnsupportedError: a value that does not exist, or is Neural Compressor's only.
    """
    known = (*_MX, *_MX_FLOATS)
    for name, value in (("w_dtype", w_dtype), ("act_dtype", act_dtype)):
        if value in ("int4", "int2"):
            msg = (
                f"MXQuantConfig({name}={value!r}): the OCP's text has no such format; use fp4, or "
                f"WeightOnlyConfig({value!r})."
            )
            raise UnsupportedError(msg)
        require(value in known, name, f"one of {', '.join(known)}", value)
    require(out_dtype in _MX_FLOATS, "out_dtype", f"one of {', '.join(_MX_FLOATS)}", out_dtype)
    if round_method not in ("nearest", "even"):
        require(
            round_method in ("dither", "floor"),
            "round_method",
            "one of nearest, even, floor, dither",
            round_method,
        )
        msg = (
            f"MXQuantConfig(round_method={round_method!r}): elements are rounded to the nearest; simulate "
            "others with FakeQuantConfig."
        )
        raise UnsupportedError(msg)
    if w_dtype in _MX_FLOATS:
        return WeightOnlyConfig(w_dtype="fp32", white_list=white_list)
    if weight_only or act_dtype in _MX_FLOATS:
        fields: dict[str, Any] = {
            "w_algo": "minmax",
            "scale_dtype": "e8m0",
            "scale_mode": "floor",
            "solver": RTN(),
        }
        return WeightOnlyConfig(
            _MX[w_dtype], group_size=blocksize, w_sym=True, white_list=white_list, **fields
        )
    weight, activation = (
        FakeTensorSpec(
            dtype=_MX[name], granularity="per_group", group_size=blocksize, scale_type="e8m0", dynamic=dynamic
        )
        for name, dynamic in ((w_dtype, None), (act_dtype, True))
    )
    return FakeQuantConfig(
        weight=weight, input=activation, white_list=["Linear"] if white_list == "*" else white_list
    )


def get_default_rtn_config(processor_type: Any = None) -> WeightOnlyConfig:
    """`RTNConfig()`. The machine makes no difference: layers are always quantized in sequence."""
    return RTNConfig()


def get_default_gptq_config(processor_type: Any = None) -> WeightOnlyConfig:
    """`GPTQConfig()`."""
    return GPTQConfig()


def get_default_AutoRound_config(processor_type: Any = None) -> WeightOnlyConfig:
    """`AutoRoundConfig()`."""
    return AutoRoundConfig()


def get_default_awq_config() -> WeightOnlyConfig:
    """`AWQConfig()`."""
    return AWQConfig()


def get_default_teq_config() -> WeightOnlyConfig:
    """`TEQConfig()`."""
    return TEQConfig()


def get_default_hqq_config() -> WeightOnlyConfig:
    """`HQQConfig()`."""
    return HQQConfig()


def get_default_mx_config() -> QuantConfig:
    """`MXQuantConfig()`."""
    return MXQuantConfig()


def get_default_double_quant_config(type: str = "BNB_NF4") -> WeightOnlyConfig:  # Neural Compressor's name
    """Return a configuration with quantized scales.

    It is "BNB_NF4" (NF4, groups of 32, scales of 8 bits) or "GGML_TYPE_Q4_K" (4 bits with minima, scales of 6
    bits).

    Raises:
        ConfigError: another type.
    """
    require(type in _DOUBLE_QUANT_TYPES, "type", f"one of {', '.join(_DOUBLE_QUANT_TYPES)}", type)
    return RTNConfig(**_DOUBLE_QUANT_TYPES[type])


#: What makes a configuration of a dictionary, by Neural Compressor's name for it.
FACTORIES: dict[str, Callable[..., QuantConfig]] = {
    "rtn": RTNConfig,
    "gptq": GPTQConfig,
    "awq": AWQConfig,
    "teq": TEQConfig,
    "hqq": HQQConfig,
    "autoround": AutoRoundConfig,
    "mx_quant": MXQuantConfig,
}


def config_from(value: object) -> AnyConfig:
    """As `nc.config.base.config_from`.

    It also takes {"rtn": fields} and {"rtn": {"global": fields, "local": {key: fields}}}, and several of
    them.

    Raises:
        ConfigError: it is nothing of that kind, or has several values for a field.
    """
    config: AnyConfig = single(_read(value))
    return config


def configs_from(value: object) -> tuple[AnyConfig, ...]:
    """Return the configurations that a value stands for, which may have several values for a field.

    Raises:
        ConfigError: it is nothing that `config_from` takes.
    """
    return all_of(_read(value))


def _read(value: object) -> AnyConfig | Alternatives:
    if not isinstance(value, dict) or not set(value) & FACTORIES.keys():
        return base.read(value)
    first, *others = (
        _from_fields(FACTORIES[name], fields or {}) if name in FACTORIES else base.read({name: fields})
        for name, fields in value.items()
    )
    total: Any = first
    for other in others:
        total = total + other
    return total  # type: ignore[no-any-return]


def _from_fields(factory: Callable[..., QuantConfig], data: object) -> QuantConfig:
    fields = fields_of(data)
    if not {"global", "local"} & set(fields):
        return _called(factory, fields)
    check_keys(fields, set(), {"global", "local"})
    config = _called(factory, fields_of(fields.get("global") or {}))
    for key, local in fields_of(fields.get("local") or {}).items():
        config.set_local(key, _called(factory, fields_of(local)))
    return config


def _called(factory: Callable[..., QuantConfig], fields: Mapping[str, Any]) -> QuantConfig:
    """Call a factory; raise UnknownFieldError for a name that is not a parameter."""
    try:
        inspect.signature(factory).bind(**fields)
    except TypeError as error:
        msg = f"{factory.__name__}: {error}; it has {', '.join(inspect.signature(factory).parameters)}."
        raise UnknownFieldError(msg) from error
    return factory(**fields)


def _weights(
    given: Mapping[str, Any], double: DoubleQuant | None = None, *, rule: str = "minmax", **fields: Any
) -> WeightOnlyConfig:
    """Return the configuration with all fields given.

    Args:
        given: what a factory takes, by its names.
        double: how scales are quantized, where `given` does not have the names for it.
        rule: the range rule, without `use_mse_search`.
        fields: of the configuration, in place of those that follow from `given`.
    """
    white_list, use_sym, group_dim = given["white_list"], given["use_sym"], given.get("group_dim", 1)
    if given.get("use_double_quant"):
        double = _double_quant(*(given[f"double_quant_{name}"] for name in ("dtype", "bits", "group_size")))
    if given["dtype"] == "fp32":
        return WeightOnlyConfig(w_dtype="fp32", white_list=white_list)
    if group_dim != 1:
        require(group_dim == 0, "group_dim", "1", group_dim)
        msg = "group_dim=0: groups along the output channels have no kernel; use group_dim=1."
        raise UnsupportedError(msg)
    name = _format(given["dtype"], given["bits"])
    is_integer = name.startswith("int")
    found: dict[str, Any] = {
        "w_dtype": name,
        "group_size": given["group_size"],
        "w_sym": use_sym or not is_integer,
        "w_algo": "mse" if given.get("use_mse_search") else rule,
        "scale_dtype": "fp32",
        "act_dtype": "fp32",
        "solver": RTN(),
        # codes of scales go with codes of minima
        "float_zero": double is not None and is_integer and not use_sym,
        "double_quant": False if double is None else double,
        "scale_mode": "floor",
        "transforms": (),
        **fields,
    }
    if given["quant_lm_head"]:
        found["lm_head"] = name
    return WeightOnlyConfig(white_list=white_list, **found)


def _format(dtype: str, bits: int) -> str:
    """Our name of a number format."""
    if dtype == "int":
        require(
            isinstance(bits, int) and not isinstance(bits, bool) and 2 <= bits <= 8,
            "bits",
            "a whole number from 2 to 8",
            bits,
        )
        return f"int{bits}"
    found = re.fullmatch(r"int([2-8])", str(dtype))
    if found is not None:
        return str(dtype)
    if dtype in ("fp4", "fp4_e2m1_bnb", "fp8_e5m2fnuz", "fp8_e4m3fnuz"):
        way_out = (
            '"nf4" or "fp4_e2m1"'
            if dtype.startswith("fp4")
            else f'"{dtype.removesuffix("uz")}"'.replace("e5m2fn", "e5m2")
        )
        msg = f"dtype={dtype!r}: no kernel and no file format for CPUs has it; use dtype={way_out}."
        raise UnsupportedError(msg)
    require(dtype in _FORMATS, "dtype", f"one of int, int2 to int8, {', '.join(_FORMATS)}, fp32", dtype)
    return _FORMATS[dtype]


def _double_quant(dtype: str, bits: int, group_size: int) -> DoubleQuant:
    found = re.fullmatch(r"int([1-8]?)", str(dtype))
    if found is None:
        msg = (
            f'double_quant_dtype={dtype!r}: scales are quantized to whole numbers; use "int" and '
            "double_quant_bits."
        )
        raise UnsupportedError(msg)
    return DoubleQuant(bits=int(found[1]) if found[1] else bits, group_size=group_size)


def _no_effect(title: str, **given: tuple[Any, Any, str]) -> None:
    """Warn of parameters that are given and change nothing: (value, default, what is done instead)."""
    for name, (value, default, instead) in given.items():
        if value != default:
            warn(f"{title}({name}={value!r}) has no effect: {instead}.")


#: Other parameters of AutoRoundConfig: default, and what is done instead where another value would change
#: numbers.
_AUTO_ROUND_OTHERS: dict[str, tuple[Any, str]] = {
    "amp": (True, ""),
    "lr_scheduler": (None, "the learning rate falls linearly to 0"),
    "low_gpu_mem_usage": (False, ""),
    "seqlen": (2048, ""),
    "sampler": ("rand", "samples are shuffled with `seed`"),
    "nblocks": (1, "one block is solved after the other"),
    "gradient_accumulate_steps": (1, "each step has `batch_size` samples"),
    "not_use_best_mse": (False, "the best step is kept"),
    "dynamic_max_gap": (-1, "all steps are made"),
    "use_layer_wise": (True, ""),
    "to_quant_block_names": (None, "use white_list to name layers"),
    "export_format": ("auto_round", ""),
    "enable_norm_bias_tuning": (False, "norms and biases stay as they are"),
    "enable_torch_compile": (False, ""),
    "device_map": (0, ""),
    "quant_nontext_module": (False, "use white_list to name layers"),
    "extra_data_dir": (None, ""),
    "processor": (None, ""),
    "image_processor": (None, ""),
    "template": (None, ""),
    "truncation": (False, ""),
    "enable_adam": (False, "steps are signed gradients"),
    "target_bits": (None, "give layers their bits with set_local"),
    "options": (("MXFP4", "MXFP8"), ""),
    "shared_layers": (None, ""),
    "ignore_scale_zp_bits": (False, ""),
    "auto_scheme_method": ("default", ""),
    "auto_scheme_device_map": (None, ""),
    "auto_scheme_batch_size": (None, ""),
    "output_dir": ("./tmp_auto_round", ""),
}
