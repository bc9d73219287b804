"""Load an exported folder, and run it."""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nc_run import library
from nc_run.abi import FUNCTIONS, STATUS, STATUSES
from nc_run.document import SCHEMA, Call, Document, Plan, Stored, document_of
from nc_run.errors import (
    ArtefactCorruptError,
    ArtefactMissingError,
    ArtefactSchemaError,
    BackendError,
    BackendUnavailableError,
    InputError,
    VerificationError,
)
from nc_run.json_text import parsed
from nc_run.plan_memory import PlanMemory, whole
from nc_run.texts import Rows, rows_of

PLAN, DATA, CHECKSUMS = "plan.json", "data.bin", "checksums.json"
#: Of outputs against those of the export, in dB, where their bits differ: the CPU is another one.
_LEAST_DB = 40.0
_Array = npt.NDArray[Any]


def load(
    folder: str | os.PathLike[str],
    *,
    threads: int | None = None,
    check: bool = True,
    most_bytes: int = 1 << 34,
) -> Model:
    """Load what `nc.export_runner` wrote; nothing of it is executed code.

    Constants stay in the file, which all processes that load it share. Replace a folder by renaming another
    one: a file that is made shorter while it is loaded ends the process.

    Args:
        folder: its path.
        threads: the most that a call runs on; None: as many as this process has CPUs. The plan is the one for
            the most threads up to it.
        check: compute checksums, and compare the outputs for the example with those of the export.
        most_bytes: of memory beside the constants, for each thread that calls the model.

    Raises:
        InputError: there is no such number of threads.
        ArtefactMissingError: a file is not there.
        ArtefactCorruptError: a file is damaged, or a plan would use memory that it does not have.
        ArtefactSchemaError: a newer nc wrote it.
        BackendUnavailableError: this CPU lacks an instruction set that it needs.
        VerificationError: it computes something else than where it was exported.
    """
    if threads is not None and (type(threads) is not int or threads < 1):
        msg = f"Expected threads to be None or a number from 1 on, but got {threads!r}."
        raise InputError(msg)
    path = Path(folder)
    raw = _bytes(path / PLAN)
    data = _mapped(path / DATA)
    if check:
        _check_sums(path, {PLAN: raw, DATA: data})
    try:
        value = parsed(raw)
        _check_schema(path, value)
        document = document_of(value)
        plan = _chosen(document, threads or library.cores())
        model = Model(document, plan, data, most_bytes)
        model.prepare()
    except (ValueError, RecursionError) as error:
        if isinstance(error, ArtefactSchemaError):
            raise
        msg = f"{path / PLAN} is damaged: {error}. Export the model again, or copy the folder again."
        raise ArtefactCorruptError(msg) from error
    _check_cpu(plan)
    if check:
        model.check()
    return model


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        msg = f"{path} can't be read: {error.strerror}. Give the folder that nc.export_runner() wrote."
        raise ArtefactMissingError(msg) from error


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    """Return the bytes of a file, read-only, in memory that all processes share."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            # no empty file can be mapped
            memory = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b""
    except OSError as error:
        msg = f"{path} can't be read: {error.strerror}. Give the folder that nc.export_runner() wrote."
        raise ArtefactMissingError(msg) from error
    return np.frombuffer(memory, np.uint8)


def _check_sums(folder: Path, files: dict[str, Any]) -> None:
    path = folder / CHECKSUMS
    raw = _bytes(path)
    try:
        sums = parsed(raw)["sha256"]
        wanted = {name: sums[name] for name in files}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        msg = f"{path} is damaged. Copy the folder again."
        raise ArtefactCorruptError(msg) from error
    for name, content in files.items():
        if hashlib.sha256(content).hexdigest() != wanted[name]:
            msg = f"{folder / name} is truncated or altered. Copy the folder again."
            raise ArtefactCorruptError(msg)


def _check_schema(folder: Path, value: Any) -> None:
    """Raise ArtefactSchemaError for a folder of another version, whose numbers may mean something else."""
    found = value if isinstance(value, dict) else {}
    schema, c_code = found.get("schema"), found.get("c_code")
    if type(schema) is int and schema > SCHEMA:
        msg = f"{folder} has schema {schema}, and this nc-run knows {SCHEMA}. Install a newer nc-run."
        raise ArtefactSchemaError(msg)
    if isinstance(c_code, str) and c_code != library.c_code():
        msg = f"{folder} is for functions of nc {found.get('nc')!s:.20}. Install its nc-run, or export again."
        raise ArtefactSchemaError(msg)


def _chosen(document: Document, most: int) -> Plan:
    fitting = [plan for plan in document.plans if plan.threads <= most]
    if fitting:
        return max(fitting, key=lambda plan: plan.threads)
    return min(document.plans, key=lambda plan: plan.threads)


def _check_cpu(plan: Plan) -> None:
    for function, isa in dict.fromkeys((call.function, call.isa) for call in plan.calls):
        why = library.why_not(function, isa)
        if why:
            msg = (
                f"The folder was exported for another CPU: {function} can't run here, {why}. Export it here."
            )
            raise BackendUnavailableError(msg)


class _Local(threading.local):
    """Memory of a thread."""

    def __init__(self) -> None:
        self.memory: PlanMemory | None = None
        self.table = np.zeros((0, 4), np.int64)


class Model:
    """A loaded model; any number of threads may call it at once, and a process that is forked from this one.

    Attributes:
        inputs: names of the inputs, in order.
        outputs: names of the outputs.
    """

    def __init__(
        self, document: Document, plan: Plan, constants: npt.NDArray[np.uint8], most_bytes: int
    ) -> None:
        self.inputs = tuple(each.name for each in document.inputs)
        self.outputs = tuple(document.outputs)
        self._document, self._plan, self._constants = document, plan, constants
        self._most_bytes, self._local = most_bytes, _Local()

    def __call__(self, *args: _Array, **kwargs: _Array) -> dict[str, _Array]:
        """Return the outputs by name.

        Args:
            args: inputs in order.
            kwargs: inputs by name.

        Raises:
            InputError: they do not fit the model.
            IndexError: a number among them, such as that of a token, is out of range.
            BackendError: a function failed.
        """
        inputs = self._bound(args, kwargs)
        if self._document.texts is None:
            outputs = [value.copy() for value in self._run(inputs, 1, 1)]
        else:
            rows = rows_of(self._document.texts, self.inputs, inputs)
            outputs = self._of_texts(rows)
        return dict(zip(self.outputs, outputs, strict=True))

    def _bound(self, args: Sequence[_Array], kwargs: dict[str, _Array]) -> list[_Array]:
        if len(args) > len(self.inputs):
            msg = f"{len(args)} inputs; the model has {', '.join(self.inputs)}."
            raise InputError(msg)
        given = dict(zip(self.inputs, args, strict=False))
        twice, unknown = set(given) & set(kwargs), set(kwargs) - set(self.inputs)
        missing = set(self.inputs) - set(given) - set(kwargs)
        for what, names in (("given twice", twice), ("unknown", unknown), ("missing", missing)):
            if names:
                msg = (
                    f"{', '.join(sorted(names))}: {what}. The model has the inputs {', '.join(self.inputs)}."
                )
                raise InputError(msg)
        given |= kwargs
        return [self._checked(i, given[name]) for i, name in enumerate(self.inputs)]

    def _checked(self, index: int, value: Any) -> _Array:
        """Return an input; raises InputError where dtype or sizes differ."""
        named = self._document.inputs[index]
        if not isinstance(value, np.ndarray) or value.dtype != named.dtype:
            found = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
            msg = f"Expected {named.name} to be an array of {named.dtype}, but got {found}."
            raise InputError(msg)
        if self._document.texts is None:
            sizes = self._plan.inputs[index].shape(1, 1)
            if value.shape != sizes:
                msg = f"Expected {named.name} to have the sizes {sizes}, but got {value.shape}."
                raise InputError(msg)
        return value

    def _of_texts(self, rows: Rows) -> list[_Array]:
        assert self._document.texts is not None
        count, texts = int(rows.inputs[-3].shape[0]), rows.texts
        found = self._run(rows.inputs, count, texts)
        of_tokens = self._document.texts.of_tokens
        return [
            rows.padded(value) if is_of_tokens else value.copy()
            for value, is_of_tokens in zip(found, of_tokens, strict=True)
        ]

    def prepare(self) -> None:
        """Lay memory out for the smallest call, and check the plan for it; raises ValueError."""
        self._memory(1, 1)

    def check(self) -> None:
        """Compare the outputs for the example with those of the export; raises VerificationError."""
        for probe in self._document.probes:
            wanted = [self._stored(each) for each in probe.outputs]
            try:
                found = self(*(self._stored(each) for each in probe.inputs))
            except (InputError, IndexError) as error:
                msg = f"The folder is damaged: its example does not fit the model: {error}"
                raise ArtefactCorruptError(msg) from error
            for name, expected in zip(self.outputs, wanted, strict=True):
                _compare(name, found[name], expected)

    def _stored(self, stored: Stored) -> _Array:
        begin, size = stored.at
        if not 0 <= begin <= begin + size <= len(self._constants) or begin % 64:
            msg = f"The folder is damaged: {DATA} has no array at {begin}."
            raise ArtefactCorruptError(msg)
        return self._constants[begin : begin + size].view(stored.dtype).reshape(stored.sizes)

    def _memory(self, rows: int, texts: int) -> PlanMemory:
        """Return this thread's memory, for so many rows and texts at least."""
        found = self._local.memory
        if found is None or rows > found.rows or texts > found.texts:
            most = (rows, texts) if found is None else (_grown(rows, found.rows), _grown(texts, found.texts))
            self._local.memory = None  # before there is more
            most = whole(most[0]), whole(most[1])
            found = PlanMemory(self._plan, self._constants, *most, self._most_bytes)
            rows_of_table = [
                (library.address(call.function), how, tensors, count)
                for call, (how, tensors, count) in zip(self._plan.calls, found.calls, strict=True)
            ]
            self._local.table = np.array(rows_of_table, np.int64).reshape(-1, 4)
            self._local.memory = found
        return found

    def _run(self, inputs: Sequence[_Array], rows: int, texts: int) -> list[_Array]:
        """Return the outputs, which the next call of this thread overwrites."""
        try:
            memory = self._memory(rows, texts)
        except (ValueError, MemoryError) as error:
            msg = f"There is no memory for {rows} rows of {texts} texts: {error}."
            raise InputError(msg) from error
        memory.resize(rows, texts)
        memory.put(inputs, rows, texts)
        table = self._local.table
        failed = _runner()(None, None, 0, None, table.ctypes.data, len(table))
        if failed:
            raise _error(self._plan.calls[(failed & 0xFFFFFFFF) - 1], failed >> 32)
        return memory.outputs(rows, texts)


def _grown(wanted: int, had: int) -> int:
    """Return a size of memory: by half more at least, because all of it is made anew."""
    return had if wanted <= had else max(wanted, had * 3 // 2)


def _runner() -> Any:
    function = library.library("runner").nc_run
    pointer, number = ctypes.c_void_p, ctypes.c_long
    function.restype, function.argtypes = number, (pointer, pointer, number, pointer, pointer, number)
    return function


def _error(call: Call, status: int) -> Exception:
    row = FUNCTIONS[call.function]
    if status == STATUS.number("other_index") and row.index:
        return IndexError(f"{call.operator}: {row.index}")
    meanings = tuple(STATUSES.values())
    why = meanings[status] if 0 <= status < len(meanings) else f"status {status}"
    return BackendError(f"{call.operator}: {call.function} failed: {why}")


def _compare(name: str, found: _Array, expected: _Array) -> None:
    """Raise VerificationError unless values are those of the export, but for rounding on another CPU."""
    if found.shape == expected.shape and found.tobytes() == expected.tobytes():
        return
    if found.shape == expected.shape and np.isfinite(expected.astype(np.float64)).all():
        error = float(np.square(found.astype(np.float64) - expected).sum())
        power = float(np.square(expected.astype(np.float64)).sum())
        if error == 0 or (power > 0 and 10 * math.log10(power / error) >= _LEAST_DB):
            return
    msg = f"The output {name!r} for the example is not that of the export. Export the model on this machine."
    raise VerificationError(msg)
