"""Batches of what waits (examples/serve/batching.py), without a server, a model or a clock."""

import asyncio
import gc
import random
import sys
import threading

import pytest
from suites.served import EXAMPLES

sys.path.insert(0, str(EXAMPLES))
from batching import Batches, ClosedError, OverloadedError, TooLateError, each_alone

#: How often the event loop must turn before all that can happen has happened.
TURNS = 12


class Model:
    """Answers the negative of each number; a call ends when the test says so.

    Numbers from 900 fail together with all others of their call.
    """

    def __init__(self, waits=True):
        self.calls, self.waits = [], waits
        self.ends = None

    async def run(self, items):
        self.calls.append(list(items))
        if self.waits:
            self.ends = asyncio.get_running_loop().create_future()
            await self.ends
        if max(items) >= 900:
            msg = f"poisoned: {max(items)}"
            raise ValueError(msg)
        return [-item for item in items]

    async def end(self):
        self.ends.set_result(None)
        await turns()


async def turns():
    for _ in range(TURNS):
        await asyncio.sleep(0)


def batches(model, cost=abs, **options):
    return Batches(model.run, cost, **options)


def asked(found, *requests):
    return [asyncio.create_task(found.ask(request)) for request in requests]


def run(test):
    """A test that is a coroutine, in a loop whose forgotten exceptions fail it."""

    def body():
        unseen = []

        async def main():
            asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
            await asyncio.wait_for(test(), 60)
            gc.collect(1)
            await turns()

        asyncio.run(main())
        assert unseen == []

    body.__name__ = test.__name__
    return body


@run
async def test_a_request_alone_is_computed_at_once():
    model = Model(waits=False)
    assert await batches(model).ask([3]) == [-3]
    assert model.calls == [[3]]


@run
async def test_what_waits_is_computed_together_in_its_order_up_to_the_tokens():
    model = Model()
    found = batches(model, most_tokens=10)
    tasks = asked(found, [7], [4], [3, 2], [1], [5, 5, 1])
    await turns()
    for _ in range(4):
        await model.end()
    # 7 and 4 are more than 10; 5 after 4, 3, 2 and 1 would be, too
    assert model.calls == [[7], [4, 3, 2, 1], [5, 5], [1]]
    assert [task.result() for task in tasks] == [[-7], [-4], [-3, -2], [-1], [-5, -5, -1]]


@run
async def test_what_comes_during_a_call_waits_for_the_next_one():
    model = Model()
    found = batches(model)
    first = asked(found, [1])
    await turns()
    later = asked(found, [2], [3])
    await turns()
    assert model.calls == [[1]]
    await model.end()
    assert model.calls == [[1], [2, 3]]
    await model.end()
    assert await asyncio.gather(*first, *later) == [[-1], [-2], [-3]]


@run
async def test_a_batch_has_no_more_items_than_allowed_and_an_item_of_more_tokens_is_alone():
    model = Model(waits=False)
    found = batches(model, most_tokens=10, most_items=3)
    await asyncio.gather(*asked(found, [1], [1], [1], [1], [50], [1]))
    assert model.calls == [[1, 1, 1], [1], [50], [1]]


@run
async def test_what_a_client_that_went_asked_for_is_not_computed():
    model = Model()
    found = batches(model)
    tasks = asked(found, [1], [2, 3], [4])
    await turns()
    more = asked(found, [5], [6, 7], [8])
    await turns()
    more[1].cancel()
    tasks[1].cancel()  # its batch is under way: the answers of the others are kept
    await turns()
    await model.end()
    assert model.calls == [[1, 2, 3, 4], [5, 8]]
    await model.end()
    assert [task.result() for task in (tasks[0], tasks[2], more[0], more[2])] == [[-1], [-4], [-5], [-8]]
    assert more[1].cancelled()
    assert tasks[1].cancelled()


@run
async def test_all_clients_that_wait_may_go():
    model = Model()
    found = batches(model)
    kept = asked(found, [1])
    await turns()
    gone = asked(found, [2], [3])
    await turns()
    for task in gone:
        task.cancel()
    await turns()
    await model.end()
    assert kept[0].result() == [-1]
    again = asked(found, [4])
    await turns()
    await model.end()
    assert again[0].result() == [-4]
    assert model.calls == [[1], [4]]


@run
async def test_a_request_that_fails_fails_alone():
    model = Model(waits=False)
    found = batches(model, cost=lambda _: 1)
    requests = [[i] for i in range(1, 16)] + [[950]]
    answers = await asyncio.gather(*asked(found, *requests), return_exceptions=True)
    assert answers[:-1] == [[-i] for i in range(1, 16)]
    assert isinstance(answers[-1], ValueError)
    assert "poisoned: 950" in str(answers[-1])
    assert len(model.calls) == 9  # 1 of all, and 2 for each halving of 16


@run
async def test_an_item_that_fails_fails_its_request_whose_others_are_left_out():
    model = Model()
    found = batches(model, most_items=1)
    tasks = asked(found, [1, 999, 2, 3], [4])
    await turns()
    for _ in range(4):
        await model.end()
    with pytest.raises(ValueError, match="poisoned"):
        tasks[0].result()
    assert tasks[1].result() == [-4]
    assert model.calls == [[1], [999], [2], [4]]  # 2 began before the client was told


@run
async def test_exceptions_among_answers_are_raised_and_wrong_numbers_of_answers_are_errors():
    async def some(items):
        return [KeyError(item) if item == 2 else item for item in items]

    found = Batches(some, abs)
    answers = await asyncio.gather(*asked(found, [1], [2]), return_exceptions=True)
    assert answers[0] == [1]
    assert isinstance(answers[1], KeyError)

    async def too_few(items):
        return items[:-1]

    with pytest.raises(ValueError, match="expected 1 answers, but got 0"):
        await Batches(too_few, abs).ask([1])


@run
async def test_a_full_queue_takes_nothing_and_says_when_to_come_again():
    model = Model()
    found = batches(model, most_waiting=3, most_tokens=1000)
    first = asked(found, [1])
    await turns()
    waiting = asked(found, [2, 3], [4])
    await turns()
    with pytest.raises(OverloadedError, match="3 items wait already") as caught:
        await found.ask([5])
    assert caught.value.retry_after >= 1
    await model.end()
    again = asked(found, [6])  # what waited is being computed: there is room
    await turns()
    found._seconds_per_token = 2.0
    with pytest.raises(OverloadedError) as caught:
        await found.ask([1, 1, 1])
    assert caught.value.retry_after == 12  # 6 tokens wait
    await model.end()
    await model.end()
    assert await asyncio.gather(*first, *waiting, *again) == [[-1], [-2, -3], [-4], [-6]]


@run
async def test_a_request_larger_than_the_queue_is_taken_when_nothing_waits():
    model = Model()
    found = batches(model, most_waiting=2, most_items=2)
    large = asked(found, [1, 2, 3])
    await turns()
    with pytest.raises(OverloadedError):
        await found.ask([1, 2])
    await model.end()
    await model.end()
    assert large[0].result() == [-1, -2, -3]


@run
async def test_a_request_whose_time_is_over_is_told_and_not_computed():
    model = Model()
    found = batches(model, timeout=60)
    first = asked(found, [1])
    await turns()
    found.timeout = 0
    late = asked(found, [2])
    while not late[0].done():
        await asyncio.sleep(0)
    with pytest.raises(TooLateError, match="within 0 s"):
        late[0].result()
    found.timeout = 60
    other = asked(found, [3])
    await turns()
    await model.end()
    await model.end()
    assert model.calls == [[1], [3]]
    assert first[0].result() == [-1]
    assert other[0].result() == [-3]


@run
async def test_time_that_is_over_during_a_call_ends_that_request_alone():
    model, limits, loop = Model(), [], asyncio.get_running_loop()
    later = loop.call_later
    loop.call_later = lambda seconds, *rest: limits.append(rest) or later(seconds, *rest)
    found = batches(model)
    kept, late = asked(found, [1], [2])
    await turns()
    assert model.calls == [[1, 2]]
    expire, entries = limits[1]
    expire(entries)
    await turns()
    assert isinstance(late.exception(), TooLateError)
    assert not kept.done()
    await model.end()
    assert kept.result() == [-1]


@run
async def test_the_limit_of_a_request_ends_with_it():
    handles, loop = [], asyncio.get_running_loop()
    later = loop.call_later
    loop.call_later = lambda *words: handles.append(later(*words)) or handles[-1]
    await batches(Model(waits=False)).ask([1])
    assert [handle.cancelled() for handle in handles] == [True]


@run
async def test_a_batch_takes_nothing_that_is_too_late_in_the_same_turn():
    model = Model()
    found = batches(model)
    tasks = asked(found, [1])
    await turns()
    tasks += asked(found, [2], [3])
    await turns()
    late, other = found._waiting
    found._expire([late])
    assert found._next() == [other]
    assert not found._waiting
    other.answer.set_result(-3)
    await model.end()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert answers[::2] == [[-1], [-3]]
    assert isinstance(answers[1], TooLateError)


@run
async def test_close_answers_what_waits_and_takes_nothing_new():
    model = Model()
    found = batches(model, most_items=1)
    tasks = asked(found, [1], [2])
    await turns()
    closing = asyncio.create_task(found.close())
    await turns()
    with pytest.raises(ClosedError):
        await found.ask([3])
    assert not closing.done()
    await model.end()
    assert not closing.done()
    await model.end()
    await closing
    assert [task.result() for task in tasks] == [[-1], [-2]]


@run
async def test_close_without_draining_ends_what_waits():
    model = Model()
    found = batches(model)
    first = asked(found, [1])
    await turns()
    waiting = asked(found, [2])
    await turns()
    closing = asyncio.create_task(found.close(drain=False))
    await turns()
    assert isinstance(waiting[0].exception(), ClosedError)
    assert not closing.done()
    await model.end()
    await closing
    assert first[0].result() == [-1]
    assert model.calls == [[1]]


@run
async def test_another_model_computes_the_next_batch_and_none_is_lost():
    old, new = Model(), Model(waits=False)
    found = batches(old)
    first = asked(found, [1])
    await turns()
    later = asked(found, [2])
    await turns()
    found.replace(new.run)
    assert not first[0].done()
    await old.end()
    assert await asyncio.gather(*first, *later) == [[-1], [-2]]
    assert (old.calls, new.calls) == ([[1]], [[2]])


@run
async def test_a_function_runs_in_one_thread_and_the_loop_stays_free():
    threads, inside, go = set(), threading.Event(), threading.Event()

    def model(items):
        threads.add(threading.get_ident())
        inside.set()
        assert go.wait(30)
        return items

    found = Batches(model, abs, most_items=1)
    tasks = asked(found, [1], [2])
    while not inside.is_set():
        await asyncio.sleep(0)  # the loop turns while the model computes
    go.set()
    assert await asyncio.gather(*tasks) == [[1], [2]]
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    await found.close()


@run
async def test_each_call_is_told_with_its_items_tokens_and_seconds():
    told = []
    found = batches(Model(waits=False), most_tokens=10, seen=lambda *numbers: told.append(numbers))
    await asyncio.gather(*asked(found, [4], [5], [9]))
    await turns()
    assert [numbers[:2] for numbers in told] == [(2, 9), (1, 9)]
    assert all(numbers[2] >= 0 for numbers in told)


@run
async def test_a_model_that_cancels_itself_leaves_nobody_waiting():
    async def cancels(items):
        raise asyncio.CancelledError

    found = Batches(cancels, abs)
    with pytest.raises(asyncio.CancelledError):
        await found.ask([1])


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(40))
def test_random_requests_get_their_own_answers_and_limits_hold(seed):
    chance = random.Random(seed)
    most_tokens, most_items = chance.randint(1, 30), chance.randint(1, 6)
    requests = [[chance.randint(1, 40) for _ in range(chance.randint(1, 4))] for _ in range(60)]
    for request in requests:
        if chance.random() < 0.1:
            request[chance.randrange(len(request))] = chance.randint(900, 999)
    gone = {i for i in range(60) if chance.random() < 0.2}
    calls = []

    async def model(items):
        calls.append(items)
        for _ in range(chance.randint(0, 5)):
            await asyncio.sleep(0)
        if max(items) >= 900:
            raise ValueError
        return [-item for item in items]

    @run
    async def body():
        found = Batches(model, abs, most_tokens=most_tokens, most_items=most_items)
        tasks = []
        for i, request in enumerate(requests):
            tasks += asked(found, request)
            for _ in range(chance.randint(0, 3)):
                await asyncio.sleep(0)
            if i in gone:
                tasks[chance.randrange(i // 2, i + 1)].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert not found._waiting
        for request, answer in zip(requests, answers, strict=True):
            if isinstance(answer, asyncio.CancelledError):
                continue
            if max(request) >= 900:
                assert isinstance(answer, ValueError)
            else:
                assert answer == [-item for item in request]

    body()
    assert all(len(items) <= most_items for items in calls)
    assert all(sum(items) <= most_tokens for items in calls if len(items) > 1)


def test_halves_are_tried_until_what_fails_is_alone():
    calls = []

    async def call(items):
        calls.append(len(items))
        if any(item in (3, 4) for item in items):
            raise ValueError(items)
        return items

    found = asyncio.run(each_alone(call, range(8)))
    assert [item for item in found if not isinstance(item, ValueError)] == [0, 1, 2, 5, 6, 7]
    assert all(isinstance(found[i], ValueError) for i in (3, 4))


@pytest.mark.parametrize("name", ["most_tokens", "most_items", "most_waiting"])
def test_limits_below_1_are_refused(name):
    with pytest.raises(ValueError, match="1 or more"):
        Batches(abs, abs, **{name: 0})
