"""Backends by name.

`ENGINES` is where an engine is registered; it is imported when it is asked for, and no other one with it.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from nc.backends.auto_order import Race, in_order, race_for
from nc.backends.base import Backend, Exporter, Option, check_available, precautions_for
from nc.capture.precautions import Precautions
from nc.errors import (
    BackendError,
    BackendUnavailableError,
    ConfigError,
    NCError,
    UnknownBackendError,
    UnsupportedError,
)
from nc.kernels import cpu
from nc.nn import QuantLinear

_T = TypeVar("_T")

#: The engines of nc: name → the class, as "module:class".
ENGINES: Mapping[str, str] = {
    "ipex": "nc.backends.ipex:IpexBackend",
    "native": "nc.backends.native:NativeBackend",
    "onnx": "nc.backends.onnx:OnnxBackend",
    "openvino": "nc.backends.openvino:OpenVINOBackend",
    "reference": "nc.backends.reference:ReferenceBackend",
}
#: What "auto" tries, in this order unless another one was measured to be faster (`nc.backends.auto_order`);
#: not the reference, which computes in fp32, and not OpenVINO, which is asked for by name.
AUTO = ("native", "ipex")

#: Options that one engine or another has, as `convert` and `load` take them when nobody says anything.
DEFAULTS: dict[str, object] = {
    "isolate": "auto",
    "compile": False,
    "verify_sizes": True,
    "verify_kernels": "always",
    "padding": "skipped",
}

_REGISTERED: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Make a backend of your own known under its `name`; its class derives from `nc.backends.base.Backend`.

    Raises:
        ConfigError: it does not, the name is taken, or a row of its capabilities names a dtype that does not
            exist.
    """
    if not isinstance(backend, Backend):
        msg = (
            "Expected an object whose class derives from nc.backends.base.Backend, but got a "
            f"{type(backend).__name__}."
        )
        raise ConfigError(msg)
    if backend.name in (*ENGINES, "auto", *_REGISTERED):
        msg = f"A backend named {backend.name!r} exists already; choose another name."
        raise ConfigError(msg)
    backend.capabilities()
    _REGISTERED[backend.name] = backend


def backend_names() -> tuple[str, ...]:
    """All names that `get_backend` knows."""
    return tuple(backend.name for backend in _engines() if backend.runs_models)


def registered_backends() -> tuple[str, ...]:
    """Names of the backends that are not part of nc, without those that run no models."""
    return tuple(backend.name for backend in _REGISTERED.values() if backend.runs_models)


def available_backends() -> dict[str, str]:
    """Every backend with why it can't run here; "" for those that can."""
    return {name: get_backend(name).why_unavailable() for name in backend_names()}


def get_backend(name: str) -> Backend:
    """Return the backend of that name; nothing is imported of an engine yet.

    Raises:
        UnknownBackendError: no backend has that name.
    """
    backend = _engine(name)
    if backend is None or not backend.runs_models:
        msg = f"No backend is called {name!r}; known: auto, {', '.join(backend_names())}."
        raise UnknownBackendError(msg)
    return backend


def _engine(name: str) -> Backend | None:
    """Return the engine of a name; None where there is none."""
    return _built_in(name) if name in ENGINES else _REGISTERED.get(name)


@functools.cache
def _built_in(name: str) -> Backend:
    backend: Backend = pkgutil.resolve_name(ENGINES[name])()
    return backend


def _engines() -> tuple[Backend, ...]:
    """Return all engines: those of nc, and those that users registered."""
    return (*map(_built_in, ENGINES), *_REGISTERED.values())


def candidates(model: str | None = None) -> tuple[str, ...]:
    """Return what "auto" tries, in this order, for a kind of model; None: before it is known."""
    return (*in_order(AUTO, _race(model)), *registered_backends())


def _race(model: str | None) -> Race | None:
    return race_for(cpu.machine_features(), model) if model is not None else None


def choose_backend(name: str = "auto", model: str | None = None) -> Backend:
    """Return the backend to use.

    Args:
        name: one of `backend_names()`, or "auto" for the first int8 engine that can run here.
        model: kind of the model, see `nc.backends.auto_order`; None: before it is known.

    Raises:
        UnknownBackendError: no backend has that name.
        BackendUnavailableError: it can't run here, or for "auto" no engine can; says what to install.
    """
    if name != "auto":
        backend = get_backend(name)
        check_available(backend)
        return backend
    for candidate in candidates(model):
        backend = get_backend(candidate)
        if not backend.why_unavailable():
            return backend
    msg = (
        "No int8 engine can run here. "
        + _why_not(candidates(model))
        + ' To compute the quantized model without an engine, slowly and in fp32, say backend="reference".'
    )
    raise BackendUnavailableError(msg)


def first_that_can(
    name: str,
    first: str,
    attempt: Callable[[Backend], _T],
    failed: Mapping[str, str] | None = None,
    model: str | None = None,
) -> tuple[_T, str, dict[str, str]]:
    """Plan or lower a model on a backend; for "auto" on the next one when that backend can't.

    Args:
        name: what the user asked for: a backend's name, or "auto".
        first: name of the backend to begin with.
        attempt: what to do with a backend.
        failed: backends that could not compute the model in an earlier step, and why.
        model: its kind, as for `choose_backend`.

    Returns:
        What `attempt` returned, the name of the backend that it returned for, and all backends that could
        not, with the reason.

    Raises:
        BackendError, UnsupportedError: the backend that was asked for fails, or for "auto" every backend from
            the first on that can run here; the message has all reasons, and the type is that of the failures
            where they share one, else BackendError.
    """
    order = candidates(model)
    if name != "auto":
        return attempt(get_backend(first)), first, {}
    errors: dict[str, NCError] = {}
    for candidate in order[order.index(first) :]:
        backend = get_backend(candidate)
        if backend.why_unavailable():
            continue
        try:
            result = attempt(backend)
        except (BackendError, UnsupportedError) as error:
            errors[candidate] = error
        else:
            return result, candidate, {**(failed or {}), **{key: str(error) for key, error in errors.items()}}
    found = list(errors.values())
    if len(found) == 1 and not failed:
        raise found[0]
    types = {type(error) for error in found}
    reasons = {**(failed or {}), **{key: str(error) for key, error in errors.items()}}
    msg = "No engine computes this model. " + " ".join(f"{key}: {reason}" for key, reason in reasons.items())
    raise (types.pop() if len(types) == 1 else BackendError)(msg) from found[-1]


def engine_options(backend: Backend, **given: Any) -> dict[str, Any]:
    """Return the given options that a backend has.

    The others must be at their defaults, or have no meaning for it.

    Raises:
        ConfigError: an option of other backends only, or a value that it does not take; names the backends
            that have it.
    """
    own = backend.options
    accepted = {}
    for name, value in given.items():
        if name not in own and value == DEFAULTS.get(name):
            continue
        owners = {backend.name: own[name]} if name in own else _owners(name)
        if owners and not any(value in option.values for option in owners.values()):
            next(iter(owners.values())).check(name, value)
        if name in own:
            accepted[name] = value
        elif not owners or not all(option.protects for option in owners.values()):
            called = " or ".join(f'backend="{owner}"' for owner in owners) or "no backend that is known here"
            msg = f"{name}={value!r} is for {called}; {backend.name!r} has no such option."
            raise ConfigError(msg)
    return accepted


def _owners(option: str) -> dict[str, Option]:
    """Return the backends that have an option."""
    return {backend.name: backend.options[option] for backend in _engines() if option in backend.options}


def precautions() -> Precautions:
    """Return what capture has to do because of all known backends, run they here or not.

    So the same model gives the same graph.
    """
    return precautions_for(_engines())


def export_formats() -> tuple[str, ...]:
    """All formats that some engine can write; those of engines that run no models come last."""
    ordered = sorted(_engines(), key=lambda backend: not backend.runs_models)
    return tuple(dict.fromkeys(format_ for backend in ordered for format_ in backend.exports))


def exporter_for(format: str, backend: str) -> tuple[Exporter, Backend | None]:
    """Return what writes a format for a model of a backend.

    Args:
        format: its name.
        backend: the name of the model's backend.

    Returns:
        The exporter, and the engine whose form of the quantized graph it needs; None: it needs the model's
        own engine model.

    Raises:
        UnsupportedError: no backend has the format, or it is a form of the models of other backends; the
            message names them.
    """
    own = get_backend(backend).exports.get(format)
    if own is not None and not own.from_graph:
        return own, None
    engines = [engine for engine in _engines() if format in engine.exports]
    found = next((engine for engine in engines if engine.exports[format].from_graph), None)
    if found is not None:
        return found.exports[format], found
    if engines:
        others = " or ".join(f'backend="{engine.name}"' for engine in engines)
        msg = f"Backend {backend!r} has no form {format!r}; load or convert with {others}."
    else:
        msg = f"No backend writes the format {format!r}; there are {', '.join(map(repr, export_formats()))}."
    raise UnsupportedError(msg)


def plan_token(
    module: fx.GraphModule, layers: Sequence[QuantLinear]
) -> Callable[..., Sequence[torch.Tensor]]:
    """Return what computes one token of a language model, by the first engine of "auto" that has plans of it.

    See `Backend.plan_token`.

    Raises:
        BackendUnavailableError: that engine has none on this machine, or no engine has plans.
    """
    for name in candidates():
        found = get_backend(name).plan_token(module, layers)
        if found is not None:
            return found
    msg = "No engine has plans of tokens."
    raise BackendUnavailableError(msg)


def why_chosen(
    name: str, chosen: str, failed: Mapping[str, str] | None = None, model: str | None = None
) -> str:
    """Why `name` leads to the backend called `chosen`; "" when it was asked for.

    Args:
        name: what the user asked for.
        chosen: the backend that was taken.
        failed: backends that can run here, but could not compute the model, and why; None or empty: no model
            was tried.
        model: its kind, as for `choose_backend`.
    """
    if name != "auto":
        return ""
    order, race = candidates(model), _race(model)
    before = order[: order.index(chosen)]
    what = "can run here and computes this model" if failed else "can run here"
    both = race is not None and all(
        side in order and not get_backend(side).why_unavailable() for side in (race.faster, race.slower)
    )
    measured = f" ({race})" if both else ""
    return f'"auto" takes the first of {", ".join(order)} that {what}{measured}' + (
        f"; {_why_not(before, failed)}" if before else ""
    )


def _why_not(names: Sequence[str], failed: Mapping[str, str] | None = None) -> str:
    reasons = {name: (failed or {}).get(name) or get_backend(name).why_unavailable() for name in names}
    return " ".join(
        f"{name}: {reason or 'it could not run when the model was prepared.'}"
        for name, reason in reasons.items()
    )
