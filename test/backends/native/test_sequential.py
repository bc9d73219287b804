"""How plans divide work among threads: parts in turn on one thread against a real run, and what is predicted."""

import ast
import ctypes
import dataclasses
import json
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import quantized
from torch import nn

import nc
from nc.backends import available_backends
from nc.backends.native import operators
from nc.backends.native.planned import PlannedModel
from nc.backends.native.plans import c_functions, sequential
from nc.backends.native.plans import row_linears as row_format
from nc.backends.native.plans.execution_plan import FunctionCall
from nc.backends.native.plans.sequential import Turns
from nc.kernels.c_code import abi, build, flags, openmp
from nc.kernels.c_code.calls import call_packed, in_memory
from nc.kernels.c_code.isas import NUMBERS
from nc.profiling import scaling
from nc.profiling.profile import EngineCall, Profile
from nc.profiling.scaling import COUNTS, DividedStep, Prediction

_WHY = available_backends()["native"] or c_functions.why_unavailable()
pytestmark = [pytest.mark.isas, pytest.mark.skipif(bool(_WHY), reason=_WHY or "it can run")]

# ---- C: a function that marks its parts

_PROBE = """
#include "openmp.h"

static void mark(void *data, int64_t part, int64_t parts)
{
    for (volatile int i = 0; !part && i < 20000; i++) /* the first part takes longer than the others */
        ;
    ((int64_t *)data)[part] += parts;
}

/* Numbers: parts of each of two regions, threads. */
int nc_probe(const int64_t *how, void *unused, int count, char *const *tensors)
{
    in_parts(mark, tensors[0], how[0], how[2]);
    in_parts(mark, tensors[1], how[1], how[2]);
    return unused || count != 2 ? OTHER_TENSORS : OK;
}
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    """Two regions of parts that mark themselves, on torch's threads: numbers → marks, and what was noted."""
    if not build._compiler():
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("probe")
    (folder / "made.h").write_text(flags.made_header())
    (folder / "probe.c").write_text(_PROBE)
    included = ["-include", str(folder / "made.h"), "-I", str(Path(abi.__file__).parent)]
    target = str(folder / "probe.so")
    command = [*build._compiler().split(), *flags.FLAGS, *included, "-o", target, str(folder / "probe.c")]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(target)
    openmp.connect(library)

    def run(parts, threads, turned):
        marks = [torch.zeros(200, dtype=torch.int64) for _ in range(2)]
        tensors = (ctypes.c_void_p * 2)(*(mark.data_ptr() for mark in marks))
        how = (ctypes.c_int64 * 3)(*parts, threads)
        noted = (ctypes.c_int64 * (abi.TURNS.size // 8))()
        function, given_ = library.nc_probe, how
        if turned:
            addresses = map(ctypes.addressof, (how, noted))
            address = ctypes.cast(library.nc_probe, ctypes.c_void_p).value
            fields = dict(zip(("how", "turns"), addresses, strict=True))
            function, given_ = (
                library.nc_run_in_turn,
                in_memory(abi.IN_TURN.packed(function=address, **fields)),
            )
        assert function(given_, None, 2, tensors) == 0
        return [mark.tolist() for mark in marks], sequential._Note(noted, how).read() if turned else None

    return run


@settings(max_examples=60, deadline=None)
@given(parts=st.tuples(st.integers(0, 99), st.integers(0, 99)), threads=st.integers(1, 5))
def test_parts_in_turn_are_those_of_a_real_run(probe, parts, threads):
    """Each part is done once, by any number of threads, and the parts are counted."""
    real, _ = probe(parts, threads, turned=False)
    marks, turns = probe(parts, threads, turned=True)
    assert marks == real
    done = [sum(mark > 0 for mark in each) for each in real]
    assert done == [max(1, min(each, threads)) for each in parts]
    assert all(mark in (0, count) for each, count in zip(real, done, strict=True) for mark in each)
    assert turns.parts == max(done)
    assert turns.regions == sum(count > 1 for count in done)
    assert [len(each) for each in turns.each] == [turns.parts] * turns.regions
    divided = [count for count in done if count > 1]
    for each, count in zip(turns.each, divided, strict=True):
        assert all(time > 0 for time in each[:count])
        assert not any(each[count:])
        assert each[0] == max(each)
    assert 0 <= turns.longest + turns.alone <= turns.whole * (1 + 1e-9)


def test_parts_are_noted_for_one_call_only(probe):
    """Behind it, threads work again, also behind a call that failed; more threads than there are count."""
    assert probe((99, 3), 64, turned=True)[1].parts == 64
    assert probe((99, 3), 2, turned=False)[0][0][:3] == [2, 2, 0]


# ---- functions of the package: any number of threads computes the same


def norm(threads):
    x, factor = torch.randn(100, 512), torch.ones(512)
    fields = {"to": 0, "of": 0, "rows": 100, "width": 512, "centred": True, "epsilon": 1e-5}
    fields |= {"inverse": 1.0, "zero_point": 0, "threads": threads}
    return "norm", fields, [torch.zeros(100, 512), x, factor, factor]


def place(threads, scatters=False):
    table, rows = torch.randn(50, 512), torch.zeros(100, 512)
    fields = {"bytes": 2048, "rows": 100, "y_stride": 2048, "x_stride": 0, "place_stride": 2048}
    fields |= {"places": 50, "scatters": scatters, "one_index": False, "threads": threads}
    if scatters:
        fields |= {"y_stride": 0, "x_stride": 2048}
    return "place", fields, [*((table, rows) if scatters else (rows, table)), torch.randint(0, 50, (100,))]


def image(threads):
    fields = {"to": 4, "images": 1, "channels": 3, "pixels": 64 * 300}
    fields |= {"inverse": 9.0, "zero_point": 3, "threads": threads}
    return "codes", fields, [torch.zeros(64 * 300 * 3, dtype=torch.uint8), torch.randn(3, 64, 300)]


def turned(name, fields, tensors):
    """Call a function in turn; returns what it noted."""
    return function_turned(c_functions.function(name), fields, tensors)


def function_turned(function, fields, tensors):
    note = sequential._Note((ctypes.c_int64 * (abi.TURNS.size // 8))(), in_memory(function.packed(fields)))
    call = abi.IN_TURN.packed(
        function=function.address, how=ctypes.addressof(note.how), turns=ctypes.addressof(note.memory)
    )
    call_packed(dataclasses.replace(function, address=function.in_turn), call, tensors)
    return note.read()


@pytest.mark.parametrize("threads", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("make", [norm, place, image])
def test_a_function_computes_the_same_in_turn(make, threads):
    torch.manual_seed(0)
    name, fields, tensors = make(1)
    call_packed(c_functions.function(name), c_functions.function(name).packed(fields), tensors)
    expected = tensors[0].clone()
    tensors[0].zero_()
    turns = turned(name, {**fields, "threads": threads}, tensors)
    assert torch.equal(tensors[0], expected)
    assert turns.parts <= threads
    assert (turns.regions, turns.parts > 1) == (int(threads > 1), threads > 1)


@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (100, 1), (3136, 16)])
def test_a_product_with_a_small_weight_has_parts_where_there_are_many_rows(rows, parts):
    if why := row_format.why_unavailable(row_format.CODES):
        pytest.skip(why)
    code = row_format.code(row_format.CODES)
    weight = torch.ones(64, 64, dtype=torch.int8)
    packed, sums = row_format.pack(row_format.CODES, weight)
    y, x = torch.zeros(rows, 64), torch.ones(rows, 64, dtype=torch.uint8)
    fields = {"rows": rows, "inputs": 64, "outputs": 64, "stride": 64, "threads": 16, "to": 0, "added": 0,
              "activation": 0, "isa": NUMBERS[code.isa]}  # fmt: skip
    fields |= dict.fromkeys(("alpha", "beta", "added_scale", "inverse"), 1.0)
    fields |= {"added_zero_point": 0, "zero_point": 0}
    tensors = [y, x, packed, sums * 0, torch.ones(64), torch.zeros(64)]
    assert function_turned(code.codes, fields, tensors).parts == parts
    assert (y == 64).all()


def test_rows_that_go_to_one_place_stay_in_order():
    name, fields, tensors = place(64, scatters=True)
    assert turned(name, fields, tensors).parts == 1


def test_a_place_outside_is_an_error_of_any_part():
    name, fields, tensors = place(64)
    tensors[2][77] = 50
    with pytest.raises(IndexError):
        turned(name, fields, tensors)
    assert turned(*norm(64)).parts == 2  # nothing is left of the call that failed


# ---- plans


class Encoder(nn.Module):
    """An embedding, attention, and products."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(60, 128)
        self.q, self.k, self.v, self.o = (nn.Linear(128, 128) for _ in range(4))
        self.norm, self.up = nn.LayerNorm(128), nn.Linear(128, 64)

    def forward(self, ids):
        h = self.norm(self.words(ids))
        q, k, v = (f(h).view(ids.shape[0], -1, 4, 32).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = torch.softmax(q @ k.transpose(-1, -2) / 32**0.5, -1)
        return self.up(h + self.o((scores @ v).transpose(1, 2).reshape(h.shape)))


@pytest.fixture(scope="module", params=["static", "dynamic"])
def model(request):
    """A quantized model on two threads, its inputs, and what runs its plans."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    ids = torch.randint(0, 60, (2, 96))
    config = nc.StaticQuantConfig() if request.param == "static" else nc.DynamicQuantConfig()
    q = quantized(Encoder().eval(), (ids,), config, "native")
    yield q, (ids,)
    torch.set_num_threads(before)


def plan_of(q, inputs, threads):
    """Return what runs the plans of a model, and its plan for a number of threads."""
    call = getattr(q.engine.profile, "__self__", None)
    if not isinstance(call, PlannedModel):
        pytest.skip("no plans here")
    recorder = call._recorder(call._module, call._source.maker, call._weights, threads=threads)
    return call, recorder.record(inputs)


@pytest.mark.parametrize("threads", COUNTS)
def test_a_plan_for_any_number_of_threads_computes_the_same_in_turn(model, threads):
    q, inputs = model
    with torch.no_grad():
        expected = q.engine.run(inputs)
        call, plan = plan_of(q, inputs, threads)
        turned_plan, notes = sequential.in_turn(plan)
        got = call._separate(turned_plan).watch(inputs, [], lambda *_: None)
    assert all(map(torch.equal, expected, got))
    for entry, note in zip(plan.entries, notes, strict=True):
        assert isinstance(entry, FunctionCall) == (note is not None)
        if note:
            turns = note.read()
            assert 1 <= turns.parts <= threads
            assert (turns.regions > 0) == (turns.parts > 1)


def test_a_profile_predicts_for_other_numbers_of_threads(model):
    q, inputs = model
    profile = q.engine.profile(inputs)
    assert [each.threads for each in profile.predictions] == sorted({*COUNTS, 2})
    for each in profile.predictions:
        assert len(each.steps) == len(profile.steps)
        assert [step.name for step in each.steps] == [step.kernel for step in profile.steps]
        assert all(step.parts <= each.threads for step in each.steps)
        assert 0 <= each.alone + each.assumed + each.unknown <= 1 + 1e-9
    assert profile.predictions[0].barriers == 0
    assert profile.predictions[0].alone > 0
    assert max(step.parts for step in profile.predictions[-1].steps if not step.assumed) > 2
    assert Profile.from_dict(json.loads(json.dumps(dataclasses.asdict(profile)))) == profile
    assert all(str(count) in profile.scaling() for count in COUNTS)


def test_plans_are_not_made_for_the_threads_of_the_process():
    """Operators ask the recorder: a plan may be for another number."""
    folders = [Path(operators.__file__).parent, Path(c_functions.__file__).parent]
    asks = [
        (path.name, node.lineno)
        for path in (path for folder in folders for path in folder.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(("openmp.threads", "get_num_threads"))
    ]
    assert {name for name, _ in asks} == {"any_sizes.py", "sequential.py", "recorder.py"}, asks


# ---- what is predicted, without a machine


def test_least_times_of_two_calls():
    first, second = Turns(1, 2, 10.0, 1.0, ((4.0, 5.0),)), Turns(1, 2, 9.0, 2.0, ((5.0, 2.0),))
    assert first.least(second) == Turns(1, 2, 9.0, 1.0, ((4.0, 2.0),))
    assert (first.longest, first.least(second).longest) == (5.0, 4.0)


def test_what_is_beyond_the_sizes_of_a_note_is_added_to_its_last_part(probe):
    """More parts than it holds, and nothing is written behind it."""
    _, turns = probe((150, 2), 120, turned=True)
    assert turns.parts == 120
    assert [len(each) for each in turns.each] == [abi.CONSTANTS.most_parts] * 2
    assert all(time > 0 for time in turns.each[0])


STEPS = (
    DividedStep(name="product", operators=("a",), parts=16, barriers=1, alone_ms=0.01, divided_ms=1.0),
    DividedStep(name="primitive", parts=16, barriers=1, divided_ms=0.5, assumed=True),
    DividedStep(name="alone", operators=("b", "c"), parts=1, alone_ms=0.4),
    DividedStep(name="torch", unknown_ms=0.2),
)
AT_16 = Prediction(threads=16, steps=STEPS)
AT_1 = Prediction(threads=1, steps=(DividedStep(name="all", parts=1, alone_ms=20.0),))


def test_a_prediction_adds_up_its_steps():
    barriers = 2 * (scaling.BARRIER_MS + 16 * scaling.BARRIER_MS_PER_THREAD)
    assert AT_16.barriers == 2
    assert AT_16.ms == pytest.approx(2.11 + barriers)
    assert AT_16.alone == pytest.approx(0.41 / AT_16.ms)
    assert AT_16.assumed == pytest.approx(0.5 / AT_16.ms)
    assert AT_16.unknown == pytest.approx(0.2 / AT_16.ms)
    assert [(step.name, round(share, 3)) for step, share in AT_16.alone_too_long()] == [("alone", 0.189)]
    assert (AT_1.barriers, AT_1.ms) == (0, 20.0)


def test_tables_of_predictions():
    text = scaling.table([AT_1, AT_16])
    assert text.splitlines()[0].split("  ")[0] == "threads"
    assert "one thread alone for 18.9 % on 16 threads: alone (b, c)" in text
    assert "product" not in text
    assert scaling.summary([AT_1, AT_16]).startswith("predicted by how the steps divide: 9.5 times")
    assert scaling.summary([]) == ""
    assert "no prediction" in scaling.table([])


def test_a_profile_of_an_engine_that_does_not_say_has_no_predictions():
    profile = Profile(steps=(EngineCall(name="x", ms=1.0),), call_ms=1.0, calls=3, threads=1)
    assert profile.predictions == ()
    assert "no prediction" in profile.scaling()
