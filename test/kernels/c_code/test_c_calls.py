"""What functions in C check of their calls, and random sizes between pages that can't be touched (c_fuzz.py)."""

import os
import subprocess
import sys
from pathlib import Path

import c_fuzz
import pytest
import torch

from nc.backends import available_backends
from nc.backends.native.plans import c_functions
from nc.errors import BackendError
from nc.kernels.c_code import abi
from nc.kernels.c_code.calls import call_once, call_packed, words
from nc.kernels.onednn.runner import CallList, failed_call, failure

_WHY = available_backends()["native"] or c_functions.why_unavailable()
pytestmark = [pytest.mark.isas, pytest.mark.skipif(bool(_WHY), reason=_WHY)]


def fuzz(*options):
    done = subprocess.run(
        [sys.executable, c_fuzz.__file__, *options], capture_output=True, text=True, timeout=3000, check=False
    )
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
    """Calls of the functions of one case: function, fields, tensors."""
    calls = []

    def call(function, fields, tensors, writes=(0,)):
        calls.append((function, dict(fields), list(tensors)))
        call_once(function, fields, tensors)

    c_fuzz.random.seed(7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c_fuzz, "call", call)
        c_fuzz.CASES[name]()
    return calls


@pytest.mark.parametrize("name", c_fuzz.CASES)
def test_another_size_is_refused(name):
    if why := c_fuzz.possible()[name]:
        pytest.skip(why)
    for function, fields, tensors in recorded(name):
        packed = function.packed(fields)
        assert int.from_bytes(packed[:8], "little") == len(packed) == function.row.takes.size
        for size in (0, len(packed) - 8, len(packed) + 8):
            with pytest.raises(BackendError, match=f"{function.name!r} failed: .* another count of numbers"):
                call_packed(function, size.to_bytes(8, "little") + packed[8:], tensors)


@pytest.mark.parametrize("name", c_fuzz.CASES)
def test_another_count_of_tensors_is_refused(name):
    if why := c_fuzz.possible()[name]:
        pytest.skip(why)
    for function, fields, tensors in recorded(name):
        nothing = [torch.empty(0)] * 30
        for such in (tensors[: function.row.least - 1], [*tensors, *nothing][: function.row.most + 1]):
            with pytest.raises(BackendError, match=f"{function.name!r} failed: .* another count of tensors"):
                call_once(function, fields, such)


def test_an_attention_with_fewer_followers_than_it_says_is_refused():
    if why := c_fuzz.possible()["int8_attention"]:
        pytest.skip(why)
    ((function, fields, tensors),) = recorded("int8_attention")
    for change in ({"before": fields["before"] + 1}, {"behind": fields["behind"] + 1}):
        with pytest.raises(BackendError, match="another count of tensors"):
            call_once(function, fields | change, tensors)


def test_what_follows_an_attention_is_added_or_multiplied():
    if why := c_fuzz.possible()["int8_attention"]:
        pytest.skip(why)
    ((function, fields, tensors),) = recorded("int8_attention")
    unknown = [len(abi.FOLLOWER.members)] * abi.CONSTANTS.most_followers
    other = fields | {"before": 1, "behind": 0, "followers": unknown, "texts": False}
    with pytest.raises(BackendError, match="it knows no such operation"):
        call_once(function, other, [*tensors[:5], torch.zeros(1)])


def changed(value, at, to):
    """Nested numbers with another one at some indices."""
    if not at:
        return to
    return [changed(part, at[1:], to) if i == at[0] else part for i, part in enumerate(value)]


#: Function → a field, indices in it, what to put there, and what is wrong then.
WRONG = {
    "text_sums": [
        ("texts", (), -1, "size"),
        ("width", (), -1, "size"),
        ("step", (), 2, "size"),
        ("rows", (), -1, "size"),
    ],
    "map": [
        ("operator", (), 22, "operation"),
        ("operator", (), -1, "operation"),
        ("dims", (), 0, "size"),
        ("dims", (), 9, "size"),
        ("sizes", (0,), -1, "size"),
        ("dtypes", (0,), 3, "dtype"),
        ("dtypes", (0,), -1, "dtype"),
        ("dtypes", (1,), 4, "dtype"),
    ],
    "dynamic_attention": [
        ("batch", (), -1, "size"),
        ("heads", (), -1, "size"),
        ("rows", (), -1, "size"),
        ("keys", (), 0, "size"),
        ("keys", (), 65537, "size"),
        ("width", (), 0, "size"),
        ("width", (), 513, "size"),
        ("wide", (), 0, "size"),
        ("parts", (), 0, "size"),
        ("threads", (), 0, "size"),
        ("bytes", (), 64, "size"),
        ("mask", (), 3, "operation"),
        ("mask", (), -1, "operation"),
    ],
    "float_attention": [
        ("batch", (), -1, "size"),
        ("heads", (), -1, "size"),
        ("rows", (), -1, "size"),
        ("group", (), 0, "size"),
        ("group", (), 7, "size"),
        ("keys", (), 0, "size"),
        ("width", (), 0, "size"),
        ("wide", (), 0, "size"),
        ("parts", (), 0, "size"),
        ("threads", (), 0, "size"),
        ("bytes", (), 64, "size"),
        ("mask", (), 3, "operation"),
        ("mask", (), -1, "operation"),
    ],
    "flash": [
        *(("isa", (), isa, "instruction set") for isa in (-1, 1, 3, 6)),
        *(("dtype", (), dtype, "dtype") for dtype in (-1, 2)),
        ("texts", (), -1, "size"),
        ("heads", (), 0, "size"),
        ("group", (), 0, "size"),
        ("group", (), 7, "size"),
        ("rows", (), -1, "size"),
        ("keys", (), -1, "size"),
        ("width", (), 0, "size"),
        ("width", (), 257, "size"),
        ("wide", (), 0, "size"),
        ("wide", (), 257, "size"),
        ("left", (), -2, "size"),
        ("right", (), -2, "size"),
        ("softcap", (), -1.0, "size"),
        ("most_blocks", (), -1, "tensors"),
        ("added_places", (), -1, "tensors"),
        ("distances", (), -1, "tensors"),
        ("distances", (), 4, "tensors"),
        ("query_columns", (), -1, "tensors"),
        ("key_columns", (), 4, "tensors"),
        ("bytes", (), 64, "size"),
        ("threads", (), 0, "size"),
    ],
    "bf16_rows": [
        ("rows", (), -1, "size"),
        ("inputs", (), 0, "size"),
        ("stride", (), 0, "size"),
        ("threads", (), 0, "size"),
    ],
    "bf16_product": [
        ("isa", (), 0, "instruction set"),
        ("rows", (), -1, "size"),
        ("inputs", (), 0, "size"),
        ("outputs", (), 0, "size"),
        ("threads", (), 0, "size"),
        ("activation", (), 8, "operation"),
    ],
    "round_rows": [
        *(("isa", (), isa, "instruction set") for isa in (-1, 2, 6)),
        ("rows", (), -1, "size"),
        ("inputs", (), 0, "size"),
        ("stride", (), 1, "size"),
        ("threads", (), 0, "size"),
    ],
    "norm_rows": [
        *(("isa", (), isa, "instruction set") for isa in (-1, 2, 6)),
        ("rows", (), -1, "size"),
        ("inputs", (), 0, "size"),
        ("inputs", (), 8193, "size"),
        ("stride", (), 0, "size"),
        ("threads", (), 0, "size"),
        *(("norm", (), norm, "operation") for norm in (-1, 0, 3)),
    ],
    "row_chain": [
        *(("isa", (), isa, "instruction set") for isa in (-1, 2, 4, 6)),
        ("rows", (), -1, "size"),
        ("inputs", (), 0, "size"),
        ("inputs", (), 65537, "size"),
        ("outputs", (), 0, "size"),
        ("threads", (), 0, "size"),
        *(("activation", (), number, "operation") for number in (-1, 8)),
        *(("norm", (), norm, "operation") for norm in (-1, 3)),
    ],
    "row_product": [
        *(("isa", (), isa, "instruction set") for isa in (-1, 2, 4, 6)),
        ("rows", (), -1, "size"),
        ("inputs", (), 0, "size"),
        ("inputs", (), 65537, "size"),
        ("outputs", (), 0, "size"),
        ("threads", (), 0, "size"),
        ("activation", (), 8, "operation"),
        ("activation", (), -1, "operation"),
    ],
    "mean": [
        ("to", (), 3, "dtype"),
        ("to", (), 4, "dtype"),
        ("of", (), 5, "dtype"),
        ("of", (), -1, "dtype"),
        ("rows", (), -1, "size"),
        ("width", (), -1, "size"),
    ],
    "norm": [
        ("to", (), 3, "dtype"),
        ("of", (), 4, "dtype"),
        ("rows", (), -1, "size"),
        ("width", (), -1, "size"),
    ],
    "place": [
        ("bytes", (), -1, "size"),
        ("rows", (), -1, "size"),
    ],
    "codes": [
        ("to", (), 0, "dtype"),
        ("images", (), -1, "size"),
        ("channels", (), 2, "size"),
        ("pixels", (), -1, "size"),
    ],
    "round_images": [
        ("images", (), -1, "size"),
        ("channels", (), -1, "size"),
        ("pixels", (), -1, "size"),
        ("threads", (), 0, "size"),
    ],
    "spoil": [("elements", (), -1, "size")],
    "attention": [
        ("batch", (), -1, "size"),
        ("heads", (), -1, "size"),
        ("rows", (), -1, "size"),
        ("group", (), 0, "size"),
        ("keys", (), -1, "size"),
        ("width", (), -1, "size"),
        ("width", (), 513, "size"),
        ("value_width", (), -1, "size"),
        ("value_width", (), 513, "size"),
        ("mask", (), 3, "operation"),
        ("mask", (), -1, "operation"),
        ("mask_dtype", (), 5, "dtype"),
        ("q_dtype", (), 4, "dtype"),
        ("k_dtype", (), 4, "dtype"),
        ("v_dtype", (), 4, "dtype"),
        ("y_dtype", (), 3, "dtype"),
    ],
    "rotary": [
        ("to", (), 1, "dtype"),
        ("half", (), 257, "size"),
        ("half", (), -1, "size"),
        ("sizes", (0,), -1, "size"),
        ("sizes", (1,), -1, "size"),
        ("sizes", (2,), -1, "size"),
    ],
    "int8_attention": [
        ("batch", (), -1, "size"),
        ("heads", (), -1, "size"),
        ("rows", (), -1, "size"),
        ("keys", (), 0, "size"),
        ("width", (), 0, "size"),
        ("width", (), 513, "size"),
        ("wide", (), 0, "size"),
        ("parts", (), 0, "size"),
        ("bytes", (), 64, "size"),
        ("threads", (), 0, "size"),
        *(("isa", (), isa, "instruction set") for isa in (-1, 2, 4, 6)),
        ("before", (), -1, "size"),
        ("behind", (), 17, "size"),
        ("to", (), 1, "dtype"),
    ],
    "code_product": [
        *(("isa", (), isa, "instruction set") for isa in (-1, 2, 4, 6)),
        ("threads", (), 0, "size"),
        ("outputs", (), 0, "size"),
        ("inputs", (), 0, "size"),
        ("inputs", (), 3, "size"),
        ("inputs", (), 65540, "size"),
        ("rows", (), -1, "size"),
        ("added", (), 4, "operation"),
        ("added", (), -1, "operation"),
        ("activation", (), 8, "operation"),
        ("to", (), 1, "dtype"),
    ],
    "depthwise": [
        ("threads", (), 0, "size"),
        ("outputs", (), 15, "size"),
        ("activation", (), -1, "operation"),
        ("added", (), 3, "operation"),
        ("to", (), 2, "dtype"),
        ("images", (), -1, "size"),
        ("window", (0,), 65, "size"),
        ("window", (1,), 65, "size"),
        ("window", (1,), 0, "size"),
        ("image", (0,), 0, "size"),
        ("result", (0,), 0, "size"),
        ("result", (1,), 0, "size"),
    ],
    "low_bit": [
        ("rows", (), -1, "size"),
        ("stride", (), 1, "size"),
        ("block", (), -3, "size"),
        ("block", (), 33, "size"),
        ("block", (), 1 << 20, "size"),
    ],
    "low_bit_blocks": [
        ("rows", (), -1, "size"),
        ("stride", (), 0, "size"),
        ("block", (), -3, "size"),
    ],
    "recurrent": [
        ("cell", (), 4, "operation"),
        ("cell", (), -1, "operation"),
        ("isa", (), 2, "may use"),
        ("isa", (), 6, "may use"),
        ("threads", (), 0, "size"),
        ("steps", (), -1, "size"),
        ("rows", (), -1, "size"),
        ("features", (), 1 << 17, "size"),
        ("hidden", (), 0, "size"),
        ("hidden", (), 1 << 17, "size"),
        ("state", (), 0, "size"),
        ("state", (), 1 << 17, "size"),
    ],
}
#: The same of the structure that describes a weight.
WRONG_WEIGHTS = {
    "low_bit": (
        abi.LOW_BIT_WEIGHT,
        {
            "size": (64, "numbers"),
            "outputs": (0, "size"),
            "inputs": (0, "size"),
            "padded": (33, "size"),
            "group": (0, "size"),
            "bits": (5, "size"),
            "isa": (9, "may use"),
            "scale_dtype": (3, "dtype"),
        },
    ),
    "low_bit_blocks": (
        abi.LOW_BIT_BLOCKS_WEIGHT,
        {
            "size": (64, "numbers"),
            "outputs": (0, "size"),
            "inputs": (0, "size"),
            "groups": (0, "size"),
            "held": (9, "size"),
            "coding": (4, "dtype"),
            "parts": (4, "size"),
            "isa": (1, "may use"),
            "scale_dtype": (-1, "dtype"),
        },
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_function_has_no_code_or_room_for_is_refused(name):
    if why := c_fuzz.possible()[name]:
        pytest.skip(why)
    function, fields, tensors = recorded(name)[-1]
    for field, at, value, why in WRONG[name]:
        with pytest.raises(BackendError, match=f"C function {function.name!r} failed: .*{why}"):
            call_once(function, fields | {field: changed(fields[field], at, value)}, tensors)


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_a_weight_that_a_function_has_no_code_or_room_for_is_refused(name):
    function, fields, tensors = recorded(name)[-1]
    structure, wrong = WRONG_WEIGHTS[name]
    names = ["size", *(field.name for field in structure.fields)]
    for field, (value, why) in wrong.items():
        given = tensors[2].clone()
        given[names.index(field)] = value
        with pytest.raises(BackendError, match=f"C function {function.name!r} failed: .*{why}"):
            call_once(function, fields, [*tensors[:2], given, *tensors[3:]])


def test_a_recurrent_layer_without_its_cells_is_refused():
    if why := c_fuzz.possible()["recurrent"]:
        pytest.skip(why)
    function, fields, tensors = recorded("recurrent")[-1]
    lstm = fields | {"cell": abi.CELL.number("lstm"), "rows": 1, "steps": 1}
    with pytest.raises(BackendError, match="another count of tensors"):
        call_once(function, lstm, [*tensors[:3], torch.empty(0), *tensors[4:]])


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
        fields = c_functions.map_fields("copy", [4], [3, 3], [[1], [1]])
        call_once(c_functions.function("map"), fields, [y, x])
    assert y.tolist() == [-1] * 4


def test_what_is_no_number_has_an_exponential():
    """Its integer part is none: the shift of a negative number."""
    x, y = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0]), torch.zeros(4)
    call_once(c_functions.function("map"), c_functions.map_fields("exp", [4], [0, 0], [[1], [1]]), [y, x])
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
    function, good = c_functions.function("map"), c_functions.map_fields("copy", [4], [0, 0], [[1], [1]])
    x, y = torch.rand(4), torch.zeros(4)
    for fields in (good, good | {"operator": 99}):
        calls.add_function(function, function.packed(fields), [(None, y.data_ptr()), (None, x.data_ptr())])
    run = (runner(source.maker.library)[0] if by == "C" else PythonRunner(source.maker.library)).bind(
        calls, source.maker.stream()
    )
    index, status = failed_call(run([]))
    assert (index, words(status)) == (1, "it knows no such operation")
    assert torch.equal(y, x)
