"""What functions in C check of their calls, and random sizes between pages that can't be touched (c_fuzz.py)."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import c_fuzz
import pytest
import torch

from nc.backends import available_backends
from nc.backends.native import recurrent
from nc.backends.native.plans import c_functions
from nc.errors import BackendError
from nc.kernels.c_code import failures
from nc.kernels.onednn.runner import CallList, call_once, failed_call, failure

_WHY = available_backends()["native"] or c_functions.why_unavailable()
pytestmark = [pytest.mark.isas, pytest.mark.skipif(bool(_WHY), reason=_WHY)]


def fuzz(*options):
    done = subprocess.run([sys.executable, c_fuzz.__file__, *options], capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, f"{done.stdout[-600:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_some_random_sizes():
    found = fuzz("--cases", "12")
    for name, why in c_fuzz.possible().items():
        assert (f"{name}: skipped" if why else f"{name}: 12 cases") in found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", c_fuzz.CASES)
def test_many_random_sizes(name):
    fuzz("--functions", name, "--cases", "600", "--seed", "1000")


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("beyond", [-1, 0])
def test_what_is_written_outside_of_a_tensor_is_noticed(at_end, beyond):
    copy = c_fuzz.Guarded(torch.zeros(10), at_end)
    inside = -1 if at_end else 40
    torch.frombuffer((c_fuzz.ctypes.c_char * 1).from_address(copy.address + inside), dtype=torch.uint8)[0] = 1
    with pytest.raises(AssertionError, match="something in front of" if at_end else "something behind"):
        copy.finish(True)


def test_an_input_that_is_written_is_noticed():
    copy = c_fuzz.Guarded(torch.zeros(10), True)
    torch.frombuffer((c_fuzz.ctypes.c_char * 1).from_address(copy.address), dtype=torch.uint8)[0] = 1
    with pytest.raises(AssertionError, match="an input was written"):
        copy.finish(False)


def recorded(name):
    """Calls of the functions of one case: function, numbers, tensors."""
    calls = []

    def call(function, numbers, tensors, writes=(0,)):
        calls.append((function, list(numbers), list(tensors)))
        call_once(function, numbers, tensors)

    c_fuzz.random.seed(7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c_fuzz, "call", call)
        c_fuzz.CASES[name]()
    return calls


@pytest.mark.parametrize("name", [name for name in c_fuzz.CASES if name != "recurrent"])
def test_other_counts_are_refused(name):
    if why := c_fuzz.possible()[name]:
        pytest.skip(why)
    for function, numbers, tensors in recorded(name):
        for given, such, why in (
            (numbers[:-1], tensors, "numbers"),
            ([*numbers, 0], tensors, "numbers"),
            ([], tensors, "(numbers|size)"),
            (numbers, tensors[:1], "(numbers|tensors)"),
            (numbers, tensors * 3, "(numbers|tensors)"),
        ):
            with pytest.raises(BackendError, match=f"C function {function.name!r} failed: .*{why}"):
                call_once(function, given, such)


#: Function → what to change of its numbers → what is wrong then.
WRONG = {
    "map": {(0, 22): "operation", (0, -1): "operation", (1, 0): "size", (1, 9): "size", "y": "dtype"},
    "mean": {(0, 2 + 1): "dtype", (0, 4): "dtype", (1, 5): "dtype", (1, -1): "dtype", (2, -1): "size", (3, -1): "size"},
    "norm": {(0, 3): "dtype", (1, 4): "dtype", (2, -1): "size", (3, -1): "size"},
    "place": {(0, -1): "size", (1, -1): "size"},
    "image": {(0, -1): "size", (1, -1): "size"},
    "attention": {
        (0, -1): "size",
        (1, -1): "size",
        (2, 0): "size",
        (3, -1): "size",
        (4, -1): "size",
        (4, 513): "size",
        (5, 513): "size",
        (6, 3): "operation",
        (7, 4): "dtype",
        (10, 3): "dtype",
    },
    "rotary": {(0, 1): "dtype", (1, 257): "size", (1, -1): "size", (2, -1): "size", (4, -1): "size"},
    "int8_attention": {
        (3, 0): "size",
        (4, 513): "size",
        (4, 0): "size",
        (5, 0): "size",
        (28, 64): "size",
        (27, 0): "size",
        (0, -1): "size",
        (2, -1): "size",
        (29, 0): "size",
    },
    "product": {
        (0, 0): "size",
        (1, 0): "size",
        (2, 4): "operation",
        (3, 3): "operation",
        (4, 8): "operation",
        (11, 3): "size",
        (13, -1): "size",
    },
    "depthwise": {
        (1, 15): "size",
        (2, 3): "operation",
        (16, 65): "size",
        (17, 65): "size",
        (11, -1): "size",
        (14, 0): "size",
        (15, 0): "size",
    },
    "low_bit": {(0, -1): "size", (1, 1): "size", (2, -3): "size", (2, 33): "size", (2, 1 << 20): "size"},
    "low_bit_blocks": {(0, -1): "size", (1, 0): "size", (2, -3): "size"},
}
#: The same of the numbers that describe a weight.
WRONG_WEIGHTS = {
    "low_bit": {0: (0, "size"), 1: (0, "size"), 2: (33, "size"), 3: (0, "size"), 4: (5, "size"), 6: (9, "may use"), 7: (3, "dtype")},
    "low_bit_blocks": {
        **{0: (0, "size"), 1: (0, "size"), 2: (0, "size"), 3: (9, "size")},
        **{4: (4, "dtype"), 5: (4, "size"), 6: (1, "may use"), 7: (-1, "dtype")},
    },
}
#: Field of a recurrent layer → what it is not → what is wrong then.
WRONG_LAYERS = {
    "bytes": (8, "numbers"),
    "kind": (4, "operation"),
    "isa": (2, "may use"),
    "threads": (0, "size"),
    "steps": (-1, "size"),
    "rows": (-1, "size"),
    "hidden": (1000, "size"),
    "state": (1000, "size"),
    "input": (recurrent._CMatrix(1000, 5), "size"),
    "recurrent": (recurrent._CMatrix(5, 1000), "size"),
    "projection": (recurrent._CMatrix(5, 1000), "size"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_function_has_no_code_or_room_for_is_refused(name):
    if why := c_fuzz.possible()[name]:
        pytest.skip(why)
    function, numbers, tensors = recorded(name)[-1]
    for change, why in WRONG[name].items():
        index, value = (2 + numbers[1], 5) if change == "y" else change
        given = [value if i == index else n for i, n in enumerate(numbers)]
        if name == "map" and index == 1:  # with as many numbers as so many dimensions take
            given = [numbers[0], value, *[1] * (value + len(tensors) * (value + 1))]
        with pytest.raises(BackendError, match=f"C function {function.name!r} failed: .*{why}"):
            call_once(function, given, tensors)


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_a_weight_that_a_function_has_no_code_or_room_for_is_refused(name):
    function, numbers, tensors = recorded(name)[-1]
    for index, (value, why) in WRONG_WEIGHTS[name].items():
        given = tensors[2].clone()
        given[index] = value
        with pytest.raises(BackendError, match=f"C function {function.name!r} failed: .*{why}"):
            call_once(function, numbers, [*tensors[:2], given, *tensors[3:]])


@pytest.mark.parametrize("field", WRONG_LAYERS)
def test_a_recurrent_layer_that_does_not_fit_is_refused(field):
    if recurrent.why_unavailable():
        pytest.skip(recurrent.why_unavailable())
    value, why = WRONG_LAYERS[field]
    found = c_fuzz.recurrent_call()
    setattr(found.layer, field, value)
    assert why in failures.words(recurrent._code().function(ctypes.byref(found.layer)))


def test_a_recurrent_layer_without_its_cells_is_refused():
    if recurrent.why_unavailable():
        pytest.skip(recurrent.why_unavailable())
    found = next(call for call in iter(c_fuzz.recurrent_call, None) if call.layer.c and call.layer.rows)
    found.layer.c = 0
    assert "tensors" in failures.words(recurrent._code().function(ctypes.byref(found.layer)))


def test_sanitizers_are_asked_for_before_c_code_is_loaded():
    """c_fuzz.py imported what loads low_bit.c first, which ran without them."""
    done = subprocess.run(
        [sys.executable, "-c", "import nc, sanitizers; sanitizers.use()"],
        env={**os.environ, "NC_SANITIZED": "1", "PYTHONPATH": str(Path(c_fuzz.__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "RuntimeError: nc was imported before" in done.stderr


def test_codes_are_no_dtype_of_sums():
    """`store` wrote bf16 for every dtype that it does not know."""
    x, y = torch.ones(4, dtype=torch.int64), torch.full((4,), -1)
    with pytest.raises(BackendError, match="'map' failed: it knows no such dtype"):
        call_once(c_functions.function("map"), [c_functions._OPERATORS.index("copy"), 1, 4, 3, 1, 3, 1], [y, x])
    assert y.tolist() == [-1] * 4


def test_what_is_no_number_has_an_exponential():
    """Its integer part is none: the shift of a negative number."""
    x, y = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0]), torch.zeros(4)
    call_once(c_functions.function("map"), [c_functions._OPERATORS.index("exp"), 1, 4, 0, 1, 0, 1], [y, x])
    assert y[0].isnan()
    assert y[1:].tolist() == [float("inf"), 0.0, pytest.approx(torch.e)]


@pytest.mark.parametrize("status", [1, 8, -1, 2**31 - 1])
def test_which_call_of_a_list_failed_and_how(status):
    index, found = failed_call(failure(70000, status))
    assert index == 70000
    assert found & 0xFFFFFFFF == status & 0xFFFFFFFF


@pytest.mark.parametrize("by", ["C", "ctypes"])
def test_lists_tell_which_function_failed(by):
    from models import library

    from nc.kernels.onednn.runner import PythonRunner, runner

    source = library()
    calls = CallList()
    good = [c_functions._OPERATORS.index("copy"), 1, 4, 0, 1, 0, 1]
    x, y = torch.rand(4), torch.zeros(4)
    for numbers in (good, [99, *good[1:]]):
        calls.add_function(c_functions.function("map"), numbers, [(None, y.data_ptr()), (None, x.data_ptr())])
    run = (runner(source.maker.library)[0] if by == "C" else PythonRunner(source.maker.library)).bind(calls, source.maker.stream())
    index, status = failed_call(run([]))
    assert (index, failures.words(status)) == (1, "it knows no such operation")
    assert torch.equal(y, x)


def test_words_are_those_of_the_header():
    text = (Path(failures.__file__).parent / "calls.h").read_text()
    names = text.split("enum {")[1].split("}")[0].split(",")
    assert len(names) == len(failures._WORDS)
    assert names[failures.INDEX].strip() == "OTHER_INDEX"
