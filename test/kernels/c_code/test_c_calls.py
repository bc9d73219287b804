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


def changed(fields, place, value):
    """The fields with another value in a place: a field, or "field[index]" for one of its numbers."""
    name, _, index = place.removesuffix("]").partition("[")
    if index:
        value = [value if i == int(index) else number for i, number in enumerate(fields[name])]
    return fields | {name: value}


#: Function → what is wrong → a value → fields that refuse it, or numbers of fields by their index.
WRONG = {
    "text_sums": {
        "size": {-1: "texts width rows", 2: "step"},
    },
    "map": {
        "operation": {22: "operator", -1: "operator"},
        "size": {0: "dims", 9: "dims", -1: "sizes[0]"},
        "dtype": {3: "dtypes[0]", -1: "dtypes[0]", 4: "dtypes[1]"},
    },
    "dynamic_attention": {
        "size": {
            -1: "batch heads rows",
            0: "keys width wide parts threads",
            65537: "keys",
            513: "width",
            64: "bytes",
        },
        "operation": {3: "mask", -1: "mask"},
    },
    "float_attention": {
        "size": {-1: "batch heads rows", 0: "group keys width wide parts threads", 7: "group", 64: "bytes"},
        "operation": {3: "mask", -1: "mask"},
    },
    "flash": {
        "instruction set": {-1: "isa", 1: "isa", 3: "isa", 6: "isa"},
        "dtype": {-1: "dtype", 2: "dtype"},
        "size": {
            -1: "texts rows keys softcap",
            0: "heads group width wide threads",
            7: "group",
            257: "width wide",
            -2: "left right",
            64: "bytes",
        },
        "tensors": {-1: "most_blocks added_places distances query_columns", 4: "distances key_columns"},
    },
    "bf16_rows": {
        "size": {-1: "rows", 0: "inputs stride threads"},
    },
    "bf16_product": {
        "instruction set": {0: "isa"},
        "size": {-1: "rows", 0: "inputs outputs threads"},
        "operation": {8: "activation"},
    },
    "round_rows": {
        "instruction set": {-1: "isa", 2: "isa", 6: "isa"},
        "size": {-1: "rows", 0: "inputs threads", 1: "stride"},
    },
    "norm_rows": {
        "instruction set": {-1: "isa", 2: "isa", 6: "isa"},
        "size": {-1: "rows", 0: "inputs stride threads", 8193: "inputs"},
        "operation": {-1: "norm", 0: "norm", 3: "norm"},
    },
    "row_chain": {
        "instruction set": {-1: "isa", 2: "isa", 4: "isa", 6: "isa"},
        "size": {-1: "rows", 0: "inputs outputs threads", 65537: "inputs"},
        "operation": {-1: "activation norm", 8: "activation", 3: "norm"},
    },
    "row_product": {
        "instruction set": {-1: "isa", 2: "isa", 4: "isa", 6: "isa"},
        "size": {-1: "rows", 0: "inputs outputs threads", 65537: "inputs"},
        "operation": {8: "activation", -1: "activation"},
    },
    "mean": {
        "dtype": {3: "to", 4: "to", 5: "of", -1: "of"},
        "size": {-1: "rows width"},
    },
    "norm": {
        "dtype": {3: "to", 4: "of"},
        "size": {-1: "rows width"},
    },
    "place": {
        "size": {-1: "bytes rows"},
    },
    "codes": {
        "dtype": {0: "to"},
        "size": {-1: "images pixels", 2: "channels"},
    },
    "round_images": {
        "size": {-1: "images channels pixels", 0: "threads"},
    },
    "spoil": {
        "size": {-1: "elements"},
    },
    "attention": {
        "size": {-1: "batch heads rows keys width value_width", 0: "group", 513: "width value_width"},
        "operation": {3: "mask", -1: "mask"},
        "dtype": {5: "mask_dtype", 4: "q_dtype k_dtype v_dtype", 3: "y_dtype"},
    },
    "rotary": {
        "dtype": {1: "to"},
        "size": {257: "half", -1: "half sizes[0] sizes[1] sizes[2]"},
    },
    "int8_attention": {
        "size": {
            -1: "batch heads rows before",
            0: "keys width wide parts threads",
            513: "width",
            64: "bytes",
            17: "behind",
        },
        "instruction set": {-1: "isa", 2: "isa", 4: "isa", 6: "isa"},
        "dtype": {1: "to"},
    },
    "code_product": {
        "instruction set": {-1: "isa", 2: "isa", 4: "isa", 6: "isa"},
        "size": {0: "threads outputs inputs", 3: "inputs", 65540: "inputs", -1: "rows"},
        "operation": {4: "added", -1: "added", 8: "activation"},
        "dtype": {1: "to"},
    },
    "depthwise": {
        "size": {
            0: "threads window[1] image[0] result[0] result[1]",
            15: "outputs",
            -1: "images",
            65: "window[0] window[1]",
        },
        "operation": {-1: "activation", 3: "added"},
        "dtype": {2: "to"},
    },
    "low_bit": {
        "size": {-1: "rows", 1: "stride", -3: "block", 33: "block", 1 << 20: "block"},
    },
    "low_bit_blocks": {
        "size": {-1: "rows", 0: "stride", -3: "block"},
    },
    "recurrent": {
        "operation": {4: "cell", -1: "cell"},
        "may use": {2: "isa", 6: "isa"},
        "size": {0: "threads hidden state", -1: "steps rows", 1 << 17: "features hidden state"},
    },
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
    for why, places in WRONG[name].items():
        for value, place in ((value, place) for value, names in places.items() for place in names.split()):
            with pytest.raises(BackendError, match=f"C function {function.name!r} failed: .*{why}"):
                call_once(function, changed(fields, place, value), tensors)


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
