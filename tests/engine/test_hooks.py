"""Hooks of a policy in the engine thread: whatever they do, requests end and others are served."""

import pytest

from pyllama_raw.core.policies import RequestView, SchedulingPolicy
from pyllama_raw.core.request import FinishReason
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.core.support import make_request
from tests.engine.support import HANG_S, PlainStream, make_thread
from tests.engine.test_faults import FAULTS
from tests.support.products import in_turn

HOOKS = (
    *("order_key", "prefill_quota", "victim_key"),
    *("on_arrival", "on_admitted", "on_scheduled", "on_preempted", "on_finished"),
)
FIELDS = ("_sequence", "_running", "request_id", "n_prompt", "mine", "__class__")


def make_policy(hooks, act) -> SchedulingPolicy:
    """A policy whose *hooks* do *act* with what they get."""

    def hook(self, *arguments):
        return act(*arguments)

    return type(
        "Acting", (SchedulingPolicy,), {"name": "acting"} | dict.fromkeys(hooks, hook)
    )()


def served(loop, started, policy) -> tuple[list, int]:
    """The ends of five requests, two of which do not fit side by side, and the faults counted."""
    limits = fake_limits(n_slots=2, n_cells=220, n_ctx_slot=140)
    executor = FakeExecutor(limits)
    thread = make_thread(executor, policy=policy)
    started(thread)
    streams = [PlainStream(loop) for _ in range(5)]
    for request_id, stream in enumerate(streams):
        request = make_request(request_id, n_prompt=40, max_tokens=90)
        thread.submit_all((request,), stream)
    ends = [stream.read_to_end()[-1] for stream in streams]
    thread.call(thread.driver.scheduler.check_integrity).result(HANG_S)
    assert thread.call(lambda: set(executor.opened)).result(HANG_S) == set()
    return ends, thread.stats.policy_faults


@pytest.mark.parametrize(
    ("hooks", "error"),
    in_turn(
        [*[(hook,) for hook in HOOKS], HOOKS],
        tuple(FAULTS),
        always=lambda hooks, _: hooks == HOOKS,
    ),
)
def test_whatever_a_hook_raises_is_a_fault_of_the_policy(hooks, error, loop, started):
    """
    Interrupts, too, because no user is in the engine thread: all requests are served.
    """

    def fail(*_):
        raise error("sabotage")

    ends, n_faults = served(loop, started, make_policy(hooks, fail))

    assert [end.reason for end in ends] == [FinishReason.LENGTH] * 5
    assert n_faults > 0


@pytest.mark.parametrize("act", [setattr, delattr], ids=["set", "deleted"])
def test_no_attribute_of_a_view_can_be_changed(act, loop, started):
    """
    The hook has an error that names it, and the requests are served.
    """
    refused = []

    def change(found, *_):
        view = found if isinstance(found, RequestView) else None
        for name in FIELDS if view is not None else ():
            try:
                act(view, name, *[None] * (act is setattr))
            except AttributeError as error:
                refused.append((name, name in str(error)))

    policy = make_policy(("on_arrival", "on_admitted", "on_finished"), change)
    ends, n_faults = served(loop, started, policy)

    assert [end.reason for end in ends] == [FinishReason.LENGTH] * 5
    assert set(refused) == {(name, True) for name in FIELDS}
    assert n_faults == 0


def test_a_view_that_is_broken_by_force_harms_its_hook_only(loop, started):
    """
    The engine reads nothing from what a hook has had.
    """

    def force(view, *_):
        object.__setattr__(view, "_sequence", None)

    ends, _ = served(loop, started, make_policy(("on_arrival",), force))

    assert [end.reason for end in ends] == [FinishReason.LENGTH] * 5


def test_a_request_that_cannot_be_withdrawn_is_refused_all_the_same(loop, started):
    """
    Its reader has the first error; the engine serves on.
    """
    thread = make_thread()
    started(thread)
    driver = thread.driver
    stream, later = PlainStream(loop), PlainStream(loop)
    take_on, withdraw = driver.take_on, driver.withdraw

    def fail(*_):
        raise KeyError("sabotage")

    driver.take_on = driver.withdraw = fail
    thread.submit_all((make_request(1), make_request(2)), stream)
    [refused] = stream.read_to_end()
    driver.take_on, driver.withdraw = take_on, withdraw
    thread.submit_all((make_request(3),), later)

    assert "could not be taken" in str(refused.error)
    assert later.read_to_end()[-1].reason is FinishReason.LENGTH
