"""Backends by name. An engine is imported in its own branch below, and only when it is asked for."""

from __future__ import annotations

from nc.backends.base import Backend, check_available
from nc.backends.reference import ReferenceBackend
from nc.errors import BackendUnavailableError, ConfigError, UnknownBackendError

#: "auto" takes neither the reference, which computes in fp32, nor the native one, which has no dynamic kernels yet, unasked.
BUILT_IN = ("ipex", "native", "reference")
AUTO = ("ipex",)

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
    reasons = []
    for candidate in (*AUTO, *_REGISTERED):
        backend = get_backend(candidate)
        why = backend.why_unavailable()
        if not why:
            return backend
        reasons.append(f"{candidate}: {why}")
    msg = (
        "No int8 engine can run here. "
        + " ".join(reasons)
        + ' To compute the quantized model without an engine, slowly and in fp32, say backend="reference".'
    )
    raise BackendUnavailableError(msg)
