"""A plan in memory that is laid out for so many rows and texts, and checked for them.

What fits for these fits for fewer: sizes, strides and offsets only grow with rows and texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nc_run.abi import CONSTANTS
from nc_run.affine import Affine
from nc_run.document import Array, Call, Place, Plan
from nc_run.memory import ALIGNMENT, Block, aligned, solve
from nc_run.uses import Use, uses

_Words = npt.NDArray[np.int64]


class PlanMemory:
    """Memory for inputs, blocks and the numbers that functions get.

    Args:
        plan: checked by itself.
        constants: data.bin.
        rows, texts: the most of both.
        most_bytes: of the memory.

    Attributes:
        calls: [calls, 3]: addresses of structure and tensors, and the number of tensors.

    Raises:
        ValueError: a tensor would be outside of its block, input or constant, or the memory is larger than
            `most_bytes`.
    """

    def __init__(
        self, plan: Plan, constants: npt.NDArray[np.uint8], rows: int, texts: int, most_bytes: int
    ) -> None:
        self.rows, self.texts, self._plan = rows, texts, plan
        self._constants = constants.ctypes.data
        sizes = [each.bytes(rows, texts) for each in plan.inputs]
        sizes += [size.at(rows, texts) for size in plan.blocks]
        self._sizes, self._count = sizes, len(constants)
        for call in plan.calls:
            self._check(call)
        for output in plan.outputs:
            use = Use(output.bytes(rows, texts), align=np.dtype(output.dtype).itemsize)
            self._check_tensor(output, use)
        blocks = [Block(size, *life) for size, life in zip(sizes, self._lives(), strict=True)]
        offsets, total = solve(blocks)
        if total > most_bytes:
            msg = f"{rows} rows of {texts} texts need {total} bytes, more than {most_bytes}"
            raise ValueError(msg)
        memory = np.zeros(total + ALIGNMENT, np.uint8)
        skipped = aligned(memory.ctypes.data) - memory.ctypes.data
        self._memory = memory
        self._begins = [skipped + offset for offset in offsets]
        self._put_words()

    def _root(self, place: Place | Array) -> int:
        """Return the number of a block: inputs come first."""
        if place.input is not None:
            return place.input
        assert place.block is not None, "a constant has no block"
        return len(self._plan.inputs) + place.block

    def _lives(self) -> list[tuple[int, int]]:
        """Return the first and the last call that need each block."""
        last = len(self._plan.calls)
        lives = [[last, -1] for _ in self._sizes]
        used = [(i, place) for i, call in enumerate(self._plan.calls) for place in call.tensors]
        for i, place in used:
            if place.constant is None:
                life = lives[self._root(place)]
                life[:] = min(life[0], i), max(life[1], i)
        for number in range(len(self._plan.inputs)):
            lives[number][0] = 0
        for output in self._plan.outputs:
            lives[self._root(output)][1] = last
        return [(first, max(first, end)) for first, end in lives]

    # ---- checks ----

    def _check(self, call: Call) -> None:
        present = [not place.nothing for place in call.tensors]
        found = uses(call.function, call.at(self.rows, self.texts), present)
        pairs = list(zip(call.tensors, found, strict=True))
        written = {self._root(place) for place, use in pairs if use.written and place.constant is None}
        for place, use in pairs:
            if place.nothing:
                continue
            self._check_tensor(place, use)
            if use.written and (place.constant is not None or place.input is not None):
                msg = f"{call.function} would write a constant or an input"
                raise ValueError(msg)
            if use.decides and place.constant is None and self._root(place) in written:
                msg = f"{call.function} would write what decides about addresses"
                raise ValueError(msg)

    def _check_tensor(self, place: Place | Array, use: Use) -> None:
        if isinstance(place, Place) and place.constant is not None:
            begin, size = place.constant
            inside = min(begin, size) >= 0 and begin + size <= self._count
            fits = inside and use.bytes <= size and not begin % ALIGNMENT and place.offset == Affine(0)
        else:
            end = place.offset.at(self.rows, self.texts) + use.bytes
            aligned_by = not any(part % use.align for part in place.offset)
            fits = end <= self._sizes[self._root(place)] and aligned_by
        if not fits:
            msg = f"{use.bytes} bytes are not inside of memory"
            raise ValueError(msg)

    # ---- numbers ----

    def _put_words(self) -> None:
        """Put structures and addresses of all calls into one piece of memory."""
        parts: tuple[list[int], list[int], list[int]] = ([], [], [])
        begins = []
        for call in self._plan.calls:
            begins.append((len(parts[0]), len(parts[0]) + len(call.words[0]), len(call.tensors)))
            addresses = [self._address(place) for place in call.tensors]
            for i, part in enumerate(parts):
                part += [*call.words[i], *(address[i] for address in addresses)]
        base, of_row, of_text = (np.array(part, np.int64) for part in parts)
        self._words: _Words = base.copy()
        (changing,) = np.nonzero(of_row | of_text)
        self._changing = changing, base[changing], of_row[changing], of_text[changing]
        begin = self._words.ctypes.data
        self.calls = [(begin + 8 * how, begin + 8 * tensors, count) for how, tensors, count in begins]

    def _address(self, place: Place) -> Affine:
        if place.nothing:
            return Affine(0)
        if place.constant is not None:
            return Affine(self._constants + place.constant[0])
        begin = self._memory.ctypes.data + self._begins[self._root(place)]
        offset: Affine = place.offset
        return Affine(begin + offset.base, offset.of_row, offset.of_text)

    def resize(self, rows: int, texts: int) -> None:
        """Set the numbers of all calls to these rows and texts, for which there is memory."""
        changing, base, of_row, of_text = self._changing
        self._words[changing] = base + rows * of_row + texts * of_text

    def put(self, inputs: Sequence[npt.NDArray[Any]], rows: int, texts: int) -> None:
        """Copy the inputs of a call to where the plan reads them."""
        for number, (array, value) in enumerate(zip(self._plan.inputs, inputs, strict=True)):
            self._view(number, array, Affine(0), rows, texts)[...] = value

    def outputs(self, rows: int, texts: int) -> list[npt.NDArray[Any]]:
        """Return the outputs, which the next call overwrites."""
        found = self._plan.outputs
        return [self._view(self._root(each), each, each.offset, rows, texts) for each in found]

    def _view(self, root: int, array: Array, offset: Affine, rows: int, texts: int) -> npt.NDArray[Any]:
        dtype = np.dtype(array.dtype)
        strides = [stride.at(rows, texts) * dtype.itemsize for stride in array.strides]
        begin = self._begins[root] + offset.at(rows, texts)
        return np.ndarray(array.shape(rows, texts), dtype, self._memory.data, begin, strides)


def whole(count: int) -> int:
    """Return the next multiple of 16: functions round up the rows that they keep."""
    panel: int = CONSTANTS.panel
    return -(-count // panel) * panel
