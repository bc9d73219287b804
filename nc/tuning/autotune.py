"""Neural Compressor's `autotune`: configurations for the whole model, one at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from nc.api.model_checks import METRIC, check_run_fn, checked_model
from nc.api.workflow import as_tuple, quantize
from nc.capture.export_guards import eval_mode
from nc.config import (
    AnyConfig,
    AutoRoundConfig,
    AWQConfig,
    DynamicQuantConfig,
    GPTQConfig,
    HQQConfig,
    RTNConfig,
    SmoothQuantConfig,
    StaticQuantConfig,
    configs_from,
    get_default_double_quant_config,
    has_weight_only,
)
from nc.errors import ConfigError, InputError, NCError
from nc.formats.checks import check_callable, is_number
from nc.process.warn import warn
from nc.text.plain import shown
from nc.tuning.calibrate import calibrate
from nc.tuning.identity import copied
from nc.tuning.measure import score

#: A part of fp32's metric that may be lost.
_LOSS = 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class TuningConfig:
    """What `autotune` tries, and when it stops.

    Attributes:
        config_set: a configuration, or several in the order in which they are tried; dictionaries as for
            `prepare` work too. A list in a field that takes single values stands for all of them:
            `RTNConfig(bits=[4, 8], use_sym=[True, False])` for four configurations, in which the last
            parameter varies the fastest.
        sampler: called with the list of configurations; gives positions in it, in the order in which they are
            tried. None: all, in order.
        tolerable_loss: the part of fp32's metric that may be lost. A negative part has to be gained.
        max_trials: configurations that are tried at most; those that fail count, and so do positions that the
            sampler gives again.

    Raises:
        ConfigError: nothing to try, or a value that is out of range.
    """

    config_set: Any = None
    sampler: Callable[[Sequence[AnyConfig]], Iterable[int]] | None = None
    tolerable_loss: float = _LOSS
    max_trials: int = 100

    def __post_init__(self) -> None:
        """Check values."""
        loss = self.tolerable_loss
        if not is_number(loss):
            msg = f"TuningConfig: tolerable_loss={shown(loss)}: expected a number, as 0.01 for 1 %."
            raise ConfigError(msg)
        if type(self.max_trials) is not int or self.max_trials < 1:
            msg = f"TuningConfig: max_trials={self.max_trials!r}: expected a whole number from 1."
            raise ConfigError(msg)
        check_callable("sampler", self.sampler, "a function that is called with the configurations")
        self._found()

    def _found(self) -> list[AnyConfig]:
        """Return all configurations, each once, in the order in which they were given."""
        given = self.config_set if isinstance(self.config_set, (list, tuple)) else [self.config_set]
        found = [config for each in given if each is not None for config in configs_from(each)]
        if not found:
            msg = "TuningConfig: config_set has no configuration; get_all_config_set() gives some."
            raise ConfigError(msg)
        return [config for i, config in enumerate(found) if config not in found[:i]]

    def configs(self) -> list[AnyConfig]:
        """Return the configurations in the order in which they are tried, each once; asks the sampler.

        Raises:
            ConfigError: the sampler gives none, or something else than positions.
        """
        found = self._found()
        order = range(len(found)) if self.sampler is None else self.sampler(found)
        distinct: list[AnyConfig] = []
        for index in itertools.islice(order, self.max_trials):  # a sampler may never end
            if type(index) is not int or not 0 <= index < len(found):
                msg = f"TuningConfig: sampler gave {index!r}: expected positions from 0 to {len(found) - 1}."
                raise ConfigError(msg)
            if found[index] not in distinct:
                distinct.append(found[index])
        if not distinct:
            msg = "TuningConfig: sampler gave no position."
            raise ConfigError(msg)
        return distinct


class _Counted:
    """Calls a function with prepared models, and raises where it could do so only once."""

    def __init__(self, run_fn: Callable[..., Any]) -> None:
        self._run_fn = run_fn
        self._calls = 0

    def __call__(self, prepared: torch.nn.Module, *args: Any) -> None:
        """Call the function.

        Raises:
            InputError: it calls this model with nothing, and called an earlier one.
        """
        calls = calibrate(prepared, lambda model: self._run_fn(model, *args), lambda *_: None)
        if self._calls and not calls:
            msg = (
                f"run_fn called an earlier prepared model {self._calls} times, and this one not at all: an "
                "iterator gives its batches once. Give a list or a DataLoader, or make the iterator in it."
            )
            raise InputError(msg)
        self._calls = max(self._calls, calls)


def get_all_config_set() -> list[AnyConfig]:
    """Return static, SmoothQuant, dynamic and weight-only configurations, for `TuningConfig`."""
    static = [
        StaticQuantConfig(act_sym=symmetric, act_algo=algorithm)
        for symmetric, algorithm in itertools.product((False, True), ("kl", "minmax"))
    ]
    smooth = [SmoothQuantConfig(alpha=alpha / 10) for alpha in range(1, 10)]
    weights = [
        kind(bits=4, use_sym=symmetric, group_size=32)
        for kind in (RTNConfig, GPTQConfig, AWQConfig)
        for symmetric in (True, False)
    ]
    return [*static, *smooth, DynamicQuantConfig(), *weights, HQQConfig(bits=4, group_size=32)]


def get_woq_tuning_config() -> list[AnyConfig]:
    """Return RTN, AutoRound, GPTQ and AWQ, asymmetric with groups of 32, for `TuningConfig`."""
    kinds = (RTNConfig, AutoRoundConfig, GPTQConfig, AWQConfig)
    return [kind(use_sym=False, group_size=32) for kind in kinds]


def get_rtn_double_quant_config_set() -> list[AnyConfig]:
    """Return the configurations of `get_default_double_quant_config`, for `TuningConfig`."""
    return [get_default_double_quant_config(name) for name in ("BNB_NF4", "GGML_TYPE_Q4_K")]


def autotune(
    model: torch.nn.Module,
    tune_config: TuningConfig,
    eval_fn: Callable[..., float],
    eval_args: Any = None,
    run_fn: Callable[..., Any] | None = None,
    run_args: Any = None,
    example_inputs: Any = None,
) -> Any:
    """Quantize by one configuration after the other, until one loses no more than is tolerated.

    For decisions by operator, with times, see `nc.tune`.

    Args:
        model: a trained fp32 model; it stays as it is.
        tune_config: what is tried, and when to stop.
        eval_fn: called with a model, and `eval_args`; larger is better.
        eval_args: a tuple of further arguments.
        run_fn: as for `quantize`; it is called for each configuration.
        run_args: likewise.
        example_inputs: likewise; None: those of the first call that `run_fn` makes, or `eval_fn` without it.

    Returns:
        The first model whose metric is at least `fp32 - tolerable_loss * |fp32|`; where none is, the one with
        the best metric, with an `NCWarning`. Configurations that fail, or whose metric is not a finite
        number, are passed over with a warning.

    Raises:
        InputError: `eval_fn` gives no finite number of the float model.
        NCError: the last error, where every configuration fails.
    """
    if not isinstance(tune_config, TuningConfig):
        msg = f"tune_config: expected a TuningConfig, but got {type(tune_config).__name__}."
        raise ConfigError(msg)
    model = checked_model(model)
    check_callable("eval_fn", eval_fn, METRIC)
    if eval_fn is None:
        msg = f"Expected eval_fn to be {METRIC}, but got None."
        raise InputError(msg)
    check_run_fn(run_fn)
    args, configs = as_tuple(eval_args), tune_config.configs()
    wanted = example_inputs is None and not all(map(has_weight_only, configs))
    with eval_mode(model):
        if wanted and run_fn is not None:
            with _first_inputs(model, stop=True) as found:
                run_fn(model, *as_tuple(run_args))
            example_inputs = found[0] if found else None
        with _first_inputs(model) as found:
            fp32 = score(eval_fn, model, *args)
    if wanted and example_inputs is None and found:
        example_inputs = found[0]
    least = fp32 - tune_config.tolerable_loss * abs(fp32)
    best: tuple[float, Any, AnyConfig] | None = None
    failed: NCError | None = None
    run = None if run_fn is None else _Counted(run_fn)
    for config in configs:
        try:
            q_model = quantize(model, config, run, run_args, example_inputs=example_inputs)
            value = score(eval_fn, q_model, *args)
        except NCError as error:
            warn(f"autotune passes {config!r} over: {error}")
            failed = error
            continue
        if value >= least:
            return q_model
        if best is None or value > best[0]:
            best = value, q_model, config
    if best is None:
        assert failed is not None
        raise failed
    value, q_model, config = best
    warn(f"No configuration keeps {least:.6g} of fp32's {fp32:.6g}. The best is {config!r} with {value:.6g}.")
    return q_model


class _Seen(BaseException):
    """The first call of a model was seen; nothing of the user's catches it."""


@contextlib.contextmanager
def _first_inputs(model: torch.nn.Module, *, stop: bool = False) -> Iterator[list[Any]]:
    """Yield a list, which gets the inputs of the first call of a model; `stop` ends the block with that."""
    found: list[Any] = []

    def note(_: torch.nn.Module, *call: Any) -> None:
        if not found:
            positional, named = copied(call)
            found.append(_by_name(model, positional, named) if named else positional)
        if stop:
            raise _Seen

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield found
    except _Seen:
        pass
    finally:
        hook.remove()


def _by_name(model: torch.nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of a call by name, as example inputs are all by position or all by name."""
    return {**dict(zip(inspect.signature(model.forward).parameters, positional, strict=False)), **named}
