"""Backends by name. An engine is imported in its own branch below, and only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from nc.backends import cpu
from nc.backends.auto_order import Race, in_order, race_for
from nc.backends.base import Backend, Option, check_available, exports_of, options_of, precautions_for
from nc.backends.reference import ReferenceBackend
from nc.capture.precautions import Precautions
from nc.errors import BackendError, BackendUnavailableError, ConfigError, NCError, UnknownBackendError, UnsupportedError

_T = TypeVar("_T")

BUILT_IN = ("ipex", "native", "openvino", "reference")
#: What "auto" tries, in this order unless another one was measured to be faster (`nc.backends.auto_order`); not the reference, which
#: computes in fp32, and not OpenVINO, which is asked for by name.
AUTO = ("native", "ipex")

#: Options that one engine or another has, as `convert` and `load` take them when nobody says anything.
DEFAULTS: dict[str, object] = {"isolate": "auto", "compile": False, "verify_sizes": True, "verify_kernels": "always"}

_REGISTERED: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Make a backend of your own known under its `name`; the protocol is `nc.backends.base.Backend`.

    Raises:
        ConfigError: the name is taken, or a row of its capabilities names a dtype that does not exist.
    """
    if backend.name in (*BUILT_IN, "auto", *_REGISTERED):
        msg = f"A backend named {backend.name!r} exists already; choose another name."
        raise ConfigError(msg)
    backend.capabilities()
    _REGISTERED[backend.name] = backend


def backend_names() -> tuple[str, ...]:
    """All names that `get_backend` knows."""
    return (*BUILT_IN, *_REGISTERED)


def registered_backends() -> tuple[str, ...]:
    """Names of the backends that are not part of nc."""
    return tuple(_REGISTERED)


def available_backends() -> dict[str, str]:
    """Every backend with why it can't run here; "" for those that can."""
    return {name: get_backend(name).why_unavailable() for name in backend_names()}


def get_backend(name: str) -> Backend:
    """Return the backend of that name; nothing is imported of an engine yet.

    Raises:
        UnknownBackendError: no backend has that name.
    """
    match name:
        case "reference":
            return ReferenceBackend()
        case "ipex":
            from nc.backends.ipex import IpexBackend

            return IpexBackend()
        case "native":
            from nc.backends.native import NativeBackend

            return NativeBackend()
        case "openvino":
            from nc.backends.openvino import OpenVINOBackend

            return OpenVINOBackend()
        case _ if name in _REGISTERED:
            return _REGISTERED[name]
        case _:
            msg = f"No backend is called {name!r}; known: auto, {', '.join(backend_names())}."
            raise UnknownBackendError(msg)


def candidates(model: str | None = None) -> tuple[str, ...]:
    """Return what "auto" tries, in this order, for a kind of model; None: before it is known."""
    return (*in_order(AUTO, _race(model)), *_REGISTERED)


def _race(model: str | None) -> Race | None:
    return race_for(cpu.features(), model) if model is not None else None


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
    name: str, first: str, attempt: Callable[[Backend], _T], failed: Mapping[str, str] | None = None, model: str | None = None
) -> tuple[_T, str, dict[str, str]]:
    """Plan or lower a model on a backend; for "auto" on the next one when that backend can't.

    Args:
        name: what the user asked for: a backend's name, or "auto".
        first: name of the backend to begin with.
        attempt: what to do with a backend.
        failed: backends that could not compute the model in an earlier step, and why.
        model: its kind, as for `choose_backend`.

    Returns:
        What `attempt` returned, the name of the backend that it returned for, and all backends that could not, with the reason.

    Raises:
        BackendError, UnsupportedError: the backend that was asked for fails, or for "auto" every backend from the first on that can run
            here; the message has all reasons, and the type is that of the failures where they share one, else BackendError.
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
    """Those of the given options that a backend has; the others must be at their defaults, or mean nothing to it.

    Raises:
        ConfigError: an option of other backends only, or a value that it does not take; names the backends that have it.
    """
    own = options_of(backend)
    accepted = {}
    for name, value in given.items():
        if name not in own and value == DEFAULTS.get(name):
            continue
        owners = {backend.name: own[name]} if name in own else _owners(name)
        if owners and not any(value in option.values for option in owners.values()):
            values = ", ".join(map(repr, next(iter(owners.values())).values))
            msg = f"Expected {name} to be one of {values}, but got {value!r}."
            raise ConfigError(msg)
        if name in own:
            accepted[name] = value
        elif not owners or not all(option.protects for option in owners.values()):
            called = " or ".join(f'backend="{owner}"' for owner in owners) or "no backend that is known here"
            msg = f"{name}={value!r} is for {called}; {backend.name!r} has no such option."
            raise ConfigError(msg)
    return accepted


def _owners(option: str) -> dict[str, Option]:
    """Return the backends that have an option."""
    tables = {name: options_of(get_backend(name)) for name in backend_names()}
    return {name: table[option] for name, table in tables.items() if option in table}


def precautions() -> Precautions:
    """Return what capture has to do because of all known backends, run they here or not: the same model gives the same graph."""
    return precautions_for(map(get_backend, backend_names()))


def exporting_backends(format: str) -> tuple[str, ...]:  # noqa: A002
    """Names of the backends that can write a format."""
    return tuple(name for name in backend_names() if format in exports_of(get_backend(name)))


def export_formats() -> tuple[str, ...]:
    """All formats that some backend can write."""
    return tuple(dict.fromkeys(format_ for name in backend_names() for format_ in exports_of(get_backend(name))))


def why_chosen(name: str, chosen: str, failed: Mapping[str, str] | None = None, model: str | None = None) -> str:
    """Why `name` leads to the backend called `chosen`; "" when it was asked for.

    Args:
        name: what the user asked for.
        chosen: the backend that was taken.
        failed: backends that can run here, but could not compute the model, and why; None or empty: no model was tried.
        model: its kind, as for `choose_backend`.
    """
    if name != "auto":
        return ""
    order, race = candidates(model), _race(model)
    before = order[: order.index(chosen)]
    what = "can run here and computes this model" if failed else "can run here"
    both = race is not None and all(side in order and not get_backend(side).why_unavailable() for side in (race.faster, race.slower))
    measured = f" ({race})" if both else ""
    return f'"auto" takes the first of {", ".join(order)} that {what}{measured}' + (f"; {_why_not(before, failed)}" if before else "")


def _why_not(names: Sequence[str], failed: Mapping[str, str] | None = None) -> str:
    reasons = {name: (failed or {}).get(name) or get_backend(name).why_unavailable() for name in names}
    return " ".join(f"{name}: {reason or 'it could not run when the model was prepared.'}" for name, reason in reasons.items())
