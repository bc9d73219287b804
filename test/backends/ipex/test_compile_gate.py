"""Which calls of one engine model run together.

Those of shapes that their thread knows, and never beside one that compiles.
"""

import threading

import pytest

from nc.backends.ipex.compile_gate import Gate

SHORT, LONG = 0.2, 20.0


def start(work):
    """A thread that runs `work`, and an event that tells when it is through."""
    done = threading.Event()

    def run():
        work()
        done.set()

    threading.Thread(target=run, daemon=True).start()
    return done


class Visitor:
    """A thread that knows key 0 of a gate, and stays inside its next call until it is let out."""

    def __init__(self, gate, key=0):
        self.inside, self.leave, self.go = threading.Event(), threading.Event(), threading.Event()

        def work():
            with gate.enter(0):
                pass
            self.ready.set()
            assert self.go.wait(LONG)
            with gate.enter(key):
                self.inside.set()
                assert self.leave.wait(LONG)

        self.ready = threading.Event()
        self.done = start(work)
        assert self.ready.wait(LONG)

    def enters(self, within=LONG):
        self.go.set()
        return self.inside.wait(within)

    def ends(self):
        self.leave.set()
        return self.done.wait(LONG)


def test_known_calls_run_together():
    gate = Gate()
    first, second = Visitor(gate), Visitor(gate)
    assert first.enters()
    assert second.enters()
    assert first.ends()
    assert second.ends()


@pytest.mark.parametrize("new", [True, False])
def test_a_new_call_waits_for_known_ones(new):
    gate = Gate()
    known, other = Visitor(gate), Visitor(gate, key=1 if new else 0)
    assert known.enters()
    assert other.enters(SHORT) is not new
    assert known.ends()
    assert other.enters()
    assert other.ends()


@pytest.mark.parametrize("key", [0, 1])
def test_nobody_enters_beside_a_new_call(key):
    gate = Gate()
    new, other = Visitor(gate, key=1), Visitor(gate, key)
    assert new.enters()
    assert not other.enters(SHORT)
    assert new.ends()
    assert other.enters()
    assert other.ends()


def test_what_one_thread_knows_another_does_not():
    gate = Gate()
    with gate.enter(0):
        pass
    known = Visitor(gate)
    assert known.enters()
    fresh = start(lambda: gate.enter(0).__enter__())
    assert not fresh.wait(SHORT)
    assert known.ends()
    assert fresh.wait(LONG)


def test_a_new_call_gets_in_under_steady_load():
    gate, stop = Gate(), threading.Event()

    def work():
        while not stop.is_set():
            with gate.enter(0):
                stop.wait(0.01)

    loaded = [start(work) for _ in range(3)]
    try:
        visitor = Visitor(gate)  # key 0 was new to its thread
        assert visitor.ready.is_set()
    finally:
        stop.set()
    assert visitor.enters()
    assert visitor.ends()
    assert all(done.wait(LONG) for done in loaded)


@pytest.mark.parametrize("known", [True, False])
def test_a_call_that_raises_leaves_the_gate_open(known):
    gate = Gate()
    if known:
        with gate.enter(0):
            pass
    with pytest.raises(KeyError), gate.enter(0):
        raise KeyError
    visitor = Visitor(gate)
    assert visitor.enters()
    assert visitor.ends()


def test_a_first_call_that_raises_is_still_to_be_made():
    gate = Gate()
    known = Visitor(gate)

    def fail_then_try_again():
        with pytest.raises(KeyError), gate.enter(1):
            raise KeyError
        assert known.enters()
        with gate.enter(1):
            pass

    again = start(fail_then_try_again)
    assert not again.wait(SHORT)
    assert known.ends()
    assert again.wait(LONG)


def test_a_thread_that_knows_many_shapes_forgets_them():
    gate = Gate()
    for key in range(1000):
        with gate.enter(key):
            pass
    assert len(gate._thread.known) <= 64
