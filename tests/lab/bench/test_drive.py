"""Closed and open loops, turns, failures and clients that leave."""

import pytest

from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.calls import Call, CallFailed, closed_loop, open_loop
from tests.lab.bench.support import FakeTarget

pytestmark = pytest.mark.anyio


async def test_a_closed_loop_has_so_many_calls_under_way():
    """
    Never more than clients; all calls are made, and records are in their order.
    """
    target = FakeTarget()
    calls = [Call(f"call {i}", i + 1) for i in range(7)]

    run = await closed_loop(target, calls, 3)

    assert target.most_running == 3
    assert [record.n_output for record in run.records] == [1, 2, 3, 4, 5, 6, 7]
    assert [record.call for record in run.records] == calls


async def test_an_open_loop_does_not_wait_for_answers():
    """
    All calls of one moment are under way at once; the order is that of their times.
    """
    target = FakeTarget()
    calls = [Call("late", 2, at_s=0.01), Call("first", 2), Call("second", 2)]

    run = await open_loop(target, calls)

    assert target.prompts == ["first", "second", "late"]
    assert run.records[0].call.prompt == "late"
    assert target.most_running >= 2
    assert run.records[0].sent - run.started >= 0.01


@pytest.mark.parametrize("loop", [lambda t, c: closed_loop(t, c, 4), open_loop])
async def test_a_turn_repeats_all_before(loop):
    """
    A later turn waits for the earlier one, and follows its prompt and its answer.
    """
    target = FakeTarget()
    calls = [Call("one", 2), Call("other", 1), Call(" two", 1, after=0)]
    calls.append(Call(" three", 1, after=2))

    run = await loop(target, calls)

    assert run.records[3].prompt == "one<0><1> two<0> three"


async def test_a_turn_of_ids_repeats_ids():
    """
    Where the target names its tokens, turns can be ids.
    """
    target = FakeTarget()

    run = await closed_loop(target, [Call([7, 8], 2), Call([9], 1, after=0)], 2)

    assert run.records[1].prompt == [7, 8, 0, 1, 9]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([Call([7], 2), Call("x", 1, after=0)], "all text or all token ids"),
        ([Call([7], 2), Call([8], 1, after=0)], "does not name its tokens"),
    ],
)
async def test_turns_that_cannot_be_joined_are_refused(calls, message):
    """
    They would lack what was said before.
    """
    target = FakeTarget(names_tokens="name" not in message)

    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=message)):
        await closed_loop(target, calls, 1)


async def test_a_failure_is_recorded_and_others_go_on():
    """
    The record has the error; checked() raises it.
    """
    run = await closed_loop(FakeTarget(fails_at=[1]), [Call("x", 2)] * 3, 1)

    assert [record.error for record in run.records] == [
        None,
        "CallFailed: no more",
        None,
    ]
    assert [record.completed for record in run.records] == [True, False, True]
    with pytest.raises(CallFailed, match="no more"):
        run.checked()


async def test_a_client_leaves_after_so_many_tokens():
    """
    It has what came until then, and that is no failure.
    """
    run = await closed_loop(FakeTarget(), [Call("x", 9, leave_after=2)], 1)

    (record,) = run.records
    assert (record.left, record.error, record.n_output) == (True, None, 2)
    assert not record.completed
