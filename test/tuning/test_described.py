"""Values are told apart by all that code can read of them, alike in other processes; what can't be is said."""

import collections
import dataclasses
import functools
import logging
import os
import re
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
import torch

from nc.tuning.described import MOST_DEPTH, UntoldError, described

DATA = np.arange(6.0)
TABLE = {"rows": [1, 2, {"deep": (3, [4, {5}])}]}
LOG, LOCK = logging.getLogger(__name__), threading.Lock()
CALLS = []
OWN = types.ModuleType("a_users_module")
exec(compile("SCALE = 1.0\ndef scaled(x):\n    return SCALE * x\n", "users.py", "exec"), vars(OWN))
sys.modules["a_users_module"] = OWN


def deep_helper():
    return DATA.sum()


def helper(model):
    return deep_helper() + len(TABLE)


def reads_globals(model):
    return helper(model)


def reads_a_module(model):
    return OWN.scaled(1.0)


def imports_when_called(model):
    from a_users_module import scaled

    return scaled(1.0)


def nested(model):
    def inner():
        return [DATA[i] for i in range(2)]

    return sum(inner())


def only_writes(model):
    CALLS.append(model)
    LOG.info("called")
    with LOCK:
        return 1.0


@torch.no_grad()
def decorated(model):
    return DATA.sum()


@dataclasses.dataclass
class Settings:
    rows: list = dataclasses.field(default_factory=list)

    def scored(self, model):
        return len(self.rows)


class Slots:
    __slots__ = ("data",)

    def __init__(self, data):
        self.data = data

    def __call__(self, model):
        return self.data


class Shared:
    scale = 1.0

    def __call__(self, model):
        return self.scale

    @staticmethod
    def offset():
        return 0.0


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class MyList(list):
    pass


def closure(held):
    def metric(model):
        return held

    return metric


def keyword(*, k=(1, 2)):
    return k


def chain(length, end=0):
    found = end
    for _ in range(length):
        found = [found, None]
    return found


def with_default(value):
    def metric(model, k=value, *, data=None):
        return k

    return metric


def with_keyword_default(value):
    def metric(model, *, k=value):
        return k

    return metric


def loader(rows, **options):
    return torch.utils.data.DataLoader(Rows(rows), **options)


def instance_with(**values):
    found = types.SimpleNamespace()
    vars(found).update(values)
    return found


#: What makes a value of an argument; the two arguments must be told apart.
KINDS = {
    "closure": (closure, 1, 2),
    "array in a closure": (closure, np.zeros(3), np.ones(3)),
    "one element of an array": (closure, np.arange(1e5), np.arange(1e5) + np.eye(1, 100000)[0]),
    "dtype of an array": (closure, np.zeros(3, "f4"), np.zeros(3, "i4")),
    "shape of an array": (closure, np.zeros((2, 3)), np.zeros((3, 2))),
    "objects in an array": (closure, np.array([{1: 2}], object), np.array([{1: 3}], object)),
    "masked array": (closure, np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[1, 0])),
    "NumPy number": (closure, np.float32(1), np.float32(2)),
    "tensor": (closure, torch.zeros(3), torch.ones(3)),
    "bf16 tensor": (closure, torch.zeros(3).bfloat16(), torch.ones(3).bfloat16()),
    "parameter": (closure, torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.ones(1))),
    "module's weights": (closure, torch.nn.Embedding.from_pretrained(torch.zeros(1, 2)),
                         torch.nn.Embedding.from_pretrained(torch.ones(1, 2))),
    "set": (closure, {"a", "b"}, {"a", "c"}),
    "set of tuples": (closure, {("a", 1)}, {("a", 2)}),
    "frozenset": (closure, frozenset([1]), frozenset([2])),
    "dict": (closure, {"a": 1}, {"a": 2}),
    "key of a dict": (closure, {1: 1}, {"1": 1}),
    "default dict": (closure, collections.defaultdict(list, {1: [2]}), collections.defaultdict(list, {1: [3]})),
    "counter": (closure, collections.Counter("ab"), collections.Counter("abb")),
    "deque": (closure, collections.deque([1]), collections.deque([2])),
    "list's class": (closure, [1], MyList([1])),
    "number and flag": (closure, 1, True),
    "number and text": (closure, 1, "1"),
    "zeros": (closure, 0.0, -0.0),
    "bytes": (closure, b"a", b"b"),
    "pattern": (closure, re.compile("a"), re.compile("b")),
    "slots": (Slots, 1, 2),
    "dataclass": (lambda rows: Settings(rows).scored, [1], [2]),
    "attribute": (lambda k: instance_with(k=k), 1, 2),
    "deep attribute": (lambda k: closure(instance_with(a={"b": [Slots(instance_with(c=(k,)))]})), 1, 2),
    "partial": (lambda k: functools.partial(keyword, k=k), 1, 2),
    "partial's function": (functools.partial, reads_globals, nested),
    "default": (with_default, 1, 2),
    "array as a default": (with_default, np.zeros(2), np.ones(2)),
    "keyword default": (with_keyword_default, 1, 2),
    "attribute of a function": (lambda k: vars(made := closure(1)).update(k=k) or made, 1, 2),
    "held function": (closure, reads_globals, nested),
    "bound method": (lambda k: Slots(k).__call__, 1, 2),
    "method of a list": (lambda k: [k].index, 1, 2),
    "loader": (loader, [1, 2], [1, 3]),
    "loader of arrays": (loader, np.zeros((4, 2)), np.ones((4, 2))),
    "loader of tensors": (lambda x: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x)),
                          torch.zeros(4, 2), torch.ones(4, 2)),
    "size of a loader's batches": (lambda n: loader([1, 2], batch_size=n), 1, 2),
    "random state": (lambda seed: closure(np.random.default_rng(seed)), 1, 2),
    "50 objects deep": (lambda k: chain(50, k), 1, 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_is_another_value_and_the_same_again_is_not(kind):
    make, one, other = KINDS[kind]
    assert described(make(one)) != described(make(other))
    assert described(make(one)) == described(make(one))


CHANGES = {
    "array read two calls deep": (reads_globals, lambda: DATA.__setitem__(0, 9.0)),
    "list in a dict": (reads_globals, lambda: TABLE["rows"].append(3)),
    "set in a tuple": (reads_globals, lambda: TABLE["rows"][2]["deep"][1][1].add(6)),
    "a called function": (reads_globals, lambda: globals().update(deep_helper=lambda: 1.0)),
    "its default": (reads_globals, lambda: setattr(deep_helper, "__defaults__", (1,))),
    "in a nested function": (nested, lambda: DATA.__setitem__(0, 9.0)),
    "behind a decorator": (decorated, lambda: DATA.__setitem__(0, 9.0)),
    "a module's number": (reads_a_module, lambda: setattr(OWN, "SCALE", 2.0)),
    "a module's number, imported when called": (imports_when_called, lambda: setattr(OWN, "SCALE", 2.0)),
    "an attribute of a class": (Shared(), lambda: setattr(Shared, "scale", 2.0)),
    "a method of a class": (Shared(), lambda: setattr(Shared, "offset", staticmethod(lambda: 1.0))),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_code_reads_outside_of_itself_counts(kind, monkeypatch):
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "DATA", DATA.copy())
    monkeypatch.setattr(module, "TABLE", {"rows": [1, 2, {"deep": (3, [4, {5}])}]})
    monkeypatch.setattr(module, "deep_helper", types.FunctionType(deep_helper.__code__, globals()))
    monkeypatch.setattr(OWN, "SCALE", 1.0)
    monkeypatch.setattr(Shared, "scale", 1.0)
    monkeypatch.setattr(Shared, "offset", staticmethod(Shared.offset))
    metric, change = CHANGES[kind]
    before = described(metric)
    assert described(metric) == before
    change()
    assert described(metric) != before


def test_what_is_only_written_does_not_count():
    before = described(only_writes)
    only_writes(None)
    LOG.setLevel(logging.INFO)
    assert described(only_writes) == before


def opens(model):
    return len(open("/dev/null").read())  # noqa: PTH123


def loads(model):
    return np.load("scores.npy")


def reads_the_environment(model):
    return float(os.environ["WEIGHT"])


def imports_what_is_not_there(model):
    import nobody_has_this

    return nobody_has_this.score(model)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: closure(open("/dev/null")), "_io.TextIOWrapper (held)"),  # noqa: PTH123, SIM115
        (lambda: closure(i for i in range(3)), "generator (held)"),
        (lambda: closure(loader(i for i in range(3))), "sampler → data_source → rows)"),
        (lambda: closure(torch.eye(3).to_sparse()), "layout torch.sparse_coo"),
        (lambda: closure(threading.local()), "_thread._local"),
        (lambda: chain(MOST_DEPTH + 1), f"more than {MOST_DEPTH} objects"),
        (lambda: chain(100_000), f"more than {MOST_DEPTH} objects"),
        (lambda: opens, "code that calls 'open', which may read what is not in memory (opens)"),
        (lambda: loads, "code that calls 'load'"),
        (lambda: reads_the_environment, "code that calls 'environ'"),
        (lambda: closure(os.getenv), "'getenv', which may read what is not in memory (metric's held"),
        (lambda: imports_what_is_not_there, "code that imports 'nobody_has_this'"),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_cannot_be_told_apart_is_named(make, says):
    with pytest.raises(UntoldError) as caught:
        described(make())
    assert says.replace("(held", "(metric's held") in str(caught.value)


def evaluates(model):
    return float(model.eval()(torch.zeros(1, 2)).sum()) + helper(model)


def test_a_model_in_eval_mode_is_no_text_that_becomes_code():
    assert described(evaluates) == described(evaluates)
    with pytest.raises(UntoldError, match="code that calls 'eval'"):
        described(lambda model: eval("1"))


def test_objects_that_hold_each_other():
    def ring(end):
        first, second = [end], [end]
        first.append(second)
        second.append(first)
        return first

    assert described(ring(1)) == described(ring(1))
    assert described(ring(1)) != described(ring(2))


def test_other_processes_say_the_same():
    code = (
        "import collections, functools, re, sys, numpy as np, torch\n"
        "from nc.tuning.described import described\n"
        "class E:\n    def __init__(self, k): self.k, self.names = k, {'a', 'b', ('c', 1)}\n"
        "    def __call__(self, model): return DATA.sum() + len({'x', 'y'} & self.names)\n"
        "DATA = np.arange(5)\n"
        "held = [E(1), functools.partial(E(2), k={'z', 'y'}), re.compile('a'), torch.ones(2), np.float64(1)]\n"
        "print(described(held), described(torch.utils.data.DataLoader([1, 2], shuffle=True)))\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
