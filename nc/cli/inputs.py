"""Read the inputs of the command line: calibration data, a configuration, the model of a factory."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from nc.api.preparation.base import Preparation
from nc.api.quantized import QuantizedModel
from nc.config import AnyConfig
from nc.config.auto import AutoConfig, auto_or_config
from nc.errors import InputError, NCError
from nc.planning.layer_plan import WeightPlan
from nc.storage import marks
from nc.storage.atomic import resolved
from nc.storage.json_file import json_value
from nc.text.plain import said

Arrays = dict[str, np.ndarray[Any, Any]]


class RequestError(NCError, ValueError):
    """A file, folder or factory named on the command line cannot be used."""


def _is_positional(name: str) -> bool:
    """Return whether numpy.savez made the name, for an array that was given without one."""
    return re.fullmatch(r"arr_\d+", name) is not None


def _names(arrays: Arrays) -> str:
    return ", ".join(sorted(arrays))


def read_npz(path: Path) -> Arrays:
    """Arrays by name of the argument, or arr_0, arr_1 and so on.

    All have the same number of samples; float64 becomes float32.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            msg = "a single array without a name"
            raise ValueError(msg)
        with loaded:
            arrays = {name: loaded[name] for name in loaded.files}
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        msg = (
            f"{path} is not an .npz file of plain arrays; write it with numpy.savez(path, argument=array, …)."
        )
        raise RequestError(msg) from error
    sizes = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if not sizes or 0 in sizes.values() or len(set(sizes.values())) > 1:
        found = ", ".join(f"{name}: {size}" for name, size in sizes.items()) or "no arrays at all"
        msg = (
            f"{path}: expected arrays with the same number of samples (first axis), at least one, but got "
            f"{found}."
        )
        raise RequestError(msg)
    if len({_is_positional(name) for name in arrays}) > 1:
        msg = (
            f"{path}: expected names of arguments for all arrays, or arr_0, arr_1, … for all, but got "
            f"{_names(arrays)}."
        )
        raise RequestError(msg)
    return {name: _to_fp32(name, array) for name, array in arrays.items()}


def check_can_be_made(folder: Path) -> None:
    """Raise RequestError if a folder cannot be made, or replaced.

    A folder is written beside its place, so one is made there for a try.
    """
    existing = next(p for p in resolved(folder).parents if p.exists())
    if not existing.is_dir():
        msg = f"{folder} cannot be written: {existing} is a file."
        raise RequestError(msg)
    try:
        with tempfile.TemporaryDirectory(prefix=".nc-", dir=existing):
            pass
    except OSError as error:
        msg = f"{folder} cannot be written: no folder can be made in {existing} ({error.strerror or error})."
        raise RequestError(msg) from error


def check_page(path: Path) -> None:
    """Raise RequestError if a page can't be written to a path: it replaces earlier pages of nc alone."""
    if path.suffix != ".html":
        msg = f"--html {path}: expected a name that ends in .html."
        raise RequestError(msg)
    if not path.exists() or marks.page(path):
        return
    msg = f"--html {path}: there is a file that is not a page of nc. Give another name, or remove it."
    raise RequestError(msg)


@contextlib.contextmanager
def users_code(what: str) -> Iterator[None]:
    """Run code of the user's: what it prints goes to stderr, and what it raises is a RequestError.

    `SystemExit` and the like too, so that the user's code does not choose the exit code of the command.

    Args:
        what: text before the message of the exception.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (KeyboardInterrupt, RequestError):
        raise
    except BaseException as error:
        msg = f"{what}: {said(error)}; --debug shows the traceback."
        raise RequestError(msg) from error


def _to_fp32(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    try:
        torch.from_numpy(array[:0])
    except TypeError as error:
        msg = f"Array {name!r}: expected numbers, but got dtype {array.dtype}."
        raise RequestError(msg) from error
    if str(array.dtype) == "float64":  # numpy's default, and hardly ever what a model takes
        click.echo(f"nc: warning: array {name!r} is float64 and is read as float32.", err=True)
        return array.astype("float32")
    return array


def read_data(calib: Path | None, example: Path | None) -> tuple[Arrays | None, Arrays]:
    """Calibration data, None when there is none, and example inputs.

    The inputs are those given, or else the first sample of the data.

    Raises:
        RequestError: neither is given, a file cannot be used, or the two have different arguments.
    """
    arrays = read_npz(calib) if calib is not None else None
    if example is not None:
        examples = read_npz(example)
    elif arrays is not None:
        examples = {name: array[:1] for name, array in arrays.items()}
    else:
        msg = (
            "Give --calib FILE.npz with calibration data. If --config needs none (dynamic quantization), "
            "give --example FILE.npz with one batch of inputs to capture the model."
        )
        raise RequestError(msg)
    if arrays is not None and set(examples) != set(arrays):
        msg = (
            f"Expected --example to have the arrays of --calib, {_names(arrays)}, but got {_names(examples)}."
        )
        raise RequestError(msg)
    return arrays, examples


@contextlib.contextmanager
def whence(path: Path | None, examples: Arrays) -> Iterator[None]:
    """Say of inputs that do not fit the model which file they are from.

    The user of the command line gave no `example_inputs`.
    """
    try:
        yield
    except InputError as error:
        msg = (
            f"{str(error).rstrip('.')}. The example inputs are from {path}, which has the arrays "
            f"{_names(examples)}."
        )
        raise RequestError(msg) from error


def check_needs_no_data(prepared: Preparation) -> None:
    """Raise RequestError for a model whose configuration needs calibration data."""
    plan = prepared.plan
    if isinstance(plan, WeightPlan):
        if plan.needs_data:
            msg = (
                "--calib is missing: the solver or the transforms of this configuration need calibration "
                "data."
            )
            raise RequestError(msg)
        return
    if isinstance(prepared.quant_config, AutoConfig):
        msg = (
            "--calib is missing: by default configurations are tried on calibration data. Give --calib "
            "FILE.npz, or give --config one that needs no data, such as DynamicQuantConfig."
        )
        raise RequestError(msg)
    static = [d.operator for d in plan.decisions if d.operator in plan.static]
    if static:
        msg = (
            f"--calib is missing: operators that need calibration data: {len(static)}, e.g. {static[0]!r}. "
            "Give --calib FILE.npz, or give --config a configuration that needs none, such as "
            "DynamicQuantConfig."
        )
        raise RequestError(msg)


def read_config(path: Path) -> AnyConfig | AutoConfig:
    """Return a configuration as `to_json_file` writes it; the error names the file where it is none."""
    value = json_value(path)
    try:
        return auto_or_config(value)
    except (NCError, TypeError) as error:
        msg = f"{path}: {error}"
        raise RequestError(msg) from error


def captured(model: object, folder: Path) -> QuantizedModel:
    """Return what was loaded from a folder; it has to be a captured model, which has example inputs.

    Raises:
        RequestError: it has low-bit weights alone.
    """
    if isinstance(model, QuantizedModel):
        return model
    msg = (
        f"{folder} holds a {type(model).__name__} with low-bit weights and no example inputs to time. In "
        "Python: nc.report(nc.load(…), profile_inputs=…)."
    )
    raise RequestError(msg)


def make_model(factory: str) -> torch.nn.Module:
    """Return the model that "pkg.module:factory" returns, in eval mode."""
    function = named_function(factory, "PKG.MODULE:FACTORY, e.g. my_models:make_encoder")
    with users_code(factory):
        model = function()
    if not isinstance(model, torch.nn.Module):
        msg = f"Expected {factory} to return a torch.nn.Module, but got {type(model).__name__}."
        raise RequestError(msg)
    with users_code(factory):
        return model.eval()  # nobody else holds it, so there is no training flag to keep


def named_function(name: str, form: str = "PKG.MODULE:FUNCTION, e.g. my_metrics:accuracy") -> Any:
    """Return what "pkg.module:function" names; the module may be in the current directory.

    Raises:
        RequestError: there is no such thing, or its module fails.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        msg = f"Expected {form}, but got {name!r}."
        raise RequestError(msg)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with users_code(name):
        try:
            return functools.reduce(getattr, attribute.split("."), importlib.import_module(module_name))
        except (ModuleNotFoundError, AttributeError) as error:
            why = _what_is_missing(error, module_name, attribute)
            if not why:
                raise
            msg = f"{name}: {why}; --debug shows the traceback."
            raise RequestError(msg) from error


def _what_is_missing(error: ModuleNotFoundError | AttributeError, module_name: str, attribute: str) -> str:
    """Return which part of "pkg.module:function" does not exist; "" where something else is missing."""
    if (
        isinstance(error, ModuleNotFoundError)
        and error.name
        and module_name.split(".")[0] == error.name.split(".")[0]
    ):
        return f"there is no module {error.name!r} in {Path.cwd()} or among the installed packages"
    if isinstance(error, AttributeError) and error.name in attribute.split("."):
        callables = [
            name
            for name in dir(error.obj)
            if not name.startswith("_") and callable(getattr(error.obj, name, None))
        ]
        near = difflib.get_close_matches(error.name, callables, n=5)
        has = (
            f"did you mean {', '.join(near)}?"
            if near
            else f"it has {', '.join(callables[:20]) or 'nothing to call'}"
        )
        return f"{module_name} has no {attribute!r}; {has}"
    return ""


def batches(arrays: Arrays, size: int) -> Iterator[Arrays]:
    """All samples, `size` at a time."""
    samples = len(next(iter(arrays.values())))
    for start in range(0, samples, size):
        yield {name: array[start : start + size] for name, array in arrays.items()}


def as_inputs(arrays: Arrays) -> dict[str, torch.Tensor] | tuple[torch.Tensor, ...]:
    """Arguments by name; a tuple when the arrays are called arr_0, arr_1 and so on."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    if not all(map(_is_positional, tensors)):
        return tensors
    order = sorted(tensors, key=lambda name: int(name.removeprefix("arr_")))
    return tuple(tensors[name] for name in order)


def call(model: torch.nn.Module, arrays: Arrays) -> Any:
    """Run a model on one batch."""
    inputs = as_inputs(arrays)
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)
