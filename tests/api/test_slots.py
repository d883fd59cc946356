"""Live slots, and the time until one is free."""

import anyio
import pytest

from pyllama_raw import AsyncEngine, SamplingParams
from pyllama_raw.core.request import Finished, FinishReason, Moments
from pyllama_raw.engine.requests import OpenRequest, OpenRequests, Pace
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits
from tests.core.support import make_request
from tests.engine.support import HANG_S, HeldSteps
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.anyio


async def test_slots_tell_what_they_run():
    """
    Each slot that runs a request names it and says how far it is; idle ones are left out.
    """
    steps, found = HeldSteps(), []
    executor = FakeExecutor(fake_limits(n_slots=2), on_step=steps)

    async def look() -> None:
        found.append(await engine.slots())

    with anyio.fail_after(HANG_S):
        async with fake_engine(executor) as engine:
            params = SamplingParams(max_tokens=9)
            async with engine.generate("abc", params, client="me") as generation:
                await anyio.to_thread.run_sync(steps.wait_for_one)
                async with anyio.create_task_group() as group:
                    group.start_soon(look)
                    await anyio.wait_all_tasks_blocked()
                    steps.allow()
                generation.cancel()
                steps.allow(99)
            await engine.complete("", params)
            found.append(await engine.slots())

    (slot,), nothing = found
    assert (slot.slot, slot.request_id, slot.client) == (0, 1, "me")
    assert (slot.n_prompt, slot.n_cached, slot.n_computed, slot.n_output) == (
        4,
        0,
        4,
        1,
    )
    assert nothing == ()


@pytest.mark.native
async def test_what_makes_vectors_has_no_slots():
    """
    A text leaves nothing that could be told of between two steps.
    """
    async with AsyncEngine.open(tiny_model("bert")) as engine:
        await engine.embed(["a"])

        assert await engine.slots() == ()


def opened(n_running: int, n_waiting: int) -> OpenRequests:
    return OpenRequests(
        (i, OpenRequest(make_request(i), 0.0, waits_since=since))
        for i, since in enumerate([None] * n_running + [0.0] * n_waiting)
    )


def ended(admitted: float | None, finished: float) -> Finished:
    moments = Moments(0.0, admitted, None, finished, ())
    return Finished(0, FinishReason.STOP, None, 1, 1, 0, None, 0, moments)


def test_the_queue_goes_on_as_slots_were_held():
    """
    A request waits for those before it and itself, each as long as the mean of the last,
    divided by those that run.
    """
    ends = ended(1.0, 5.0), ended(2.0, 10.0), ended(None, 99.0)

    def queue_s(n_running: int, n_waiting: int, ends=ends) -> float | None:
        pace = Pace(opened(n_running, n_waiting), 4)
        for end in ends:
            pace.ended(make_request(0), end)
        return pace.queue_s

    assert [queue_s(3, 0, ()), queue_s(4, 0, ())] == [0.0, None]
    assert queue_s(3, 0) == 0.0
    assert queue_s(4, 0) == 1.5  # 6 s each, 4 at a time
    assert queue_s(4, 3) == 6.0
    assert queue_s(2, 3) == 12.0  # cells are scarce


async def test_statistics_tell_when_a_slot_is_free():
    """
    An idle engine has one at once.
    """
    async with fake_engine() as engine:
        await engine.complete("a", SamplingParams(max_tokens=2))

        assert engine.stats().queue_s == engine.queue_s == 0.0
