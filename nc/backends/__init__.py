"""Backends by name. An engine is imported in its own branch below, and only when it is asked for."""

from __future__ import annotations

from nc.backends.base import Backend, check_available
from nc.backends.reference import ReferenceBackend
from nc.errors import BackendUnavailableError, ConfigError, UnknownBackendError

BUILT_IN = ("ipex", "native", "reference")
#: What "auto" tries, in this order; not the reference, which computes in fp32.
AUTO = ("ipex", "native")

_REGISTERED: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Make a backend of your own known under its `name`; the protocol is `nc.backends.base.Backend`.

    Raises:
        ConfigError: the name is taken.
    """
    if backend.name in (*BUILT_IN, "auto", *_REGISTERED):
        msg = f"A backend named {backend.name!r} exists already; choose another name."
        raise ConfigError(msg)
    _REGISTERED[backend.name] = backend


def backend_names() -> tuple[str, ...]:
    """All names that `get_backend` knows."""
    return (*BUILT_IN, *_REGISTERED)


def available_backends() -> dict[str, str]:
    """Every backend with why it can't run here; "" for those that can."""
    return {name: get_backend(name).why_unavailable() for name in backend_names()}


def get_backend(name: str) -> Backend:
    """The backend of that name; nothing is imported of an engine yet.

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
        case _ if name in _REGISTERED:
            return _REGISTERED[name]
        case _:
            msg = f"No backend is called {name!r}; known: auto, {', '.join(backend_names())}."
            raise UnknownBackendError(msg)


def choose_backend(name: str = "auto") -> Backend:
    """The backend to use.

    Args:
        name: one of `backend_names()`, or "auto" for the first int8 engine that can run here.

    Raises:
        UnknownBackendError: no backend has that name.
        BackendUnavailableError: it can't run here, or for "auto" no engine can; says what to install.
    """
    if name != "auto":
        backend = get_backend(name)
        check_available(backend)
        return backend
    for candidate in (*AUTO, *_REGISTERED):
        backend = get_backend(candidate)
        if not backend.why_unavailable():
            return backend
    msg = (
        "No int8 engine can run here. "
        + _why_not((*AUTO, *_REGISTERED))
        + ' To compute the quantized model without an engine, slowly and in fp32, say backend="reference".'
    )
    raise BackendUnavailableError(msg)


def why_chosen(name: str, chosen: str) -> str:
    """Why `choose_backend(name)` takes the backend called `chosen`: what comes before it can't run here; "" when it was asked for."""
    if name != "auto":
        return ""
    candidates = (*AUTO, *_REGISTERED)
    before = candidates[: candidates.index(chosen)]
    return f'"auto" takes the first of {", ".join(candidates)} that can run here' + (f"; {_why_not(before)}" if before else "")


def _why_not(names: tuple[str, ...]) -> str:
    return " ".join(f"{name}: {get_backend(name).why_unavailable()}" for name in names)
