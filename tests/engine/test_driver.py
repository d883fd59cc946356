"""The loop without a thread: the same as the engine thread's."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama_raw.core.request import Event, Finished, Lot, NewTokens, Request
from pyllama_raw.core.step import StepPlan
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.thread import EngineThread
from pyllama_raw.errors import PromptTooLong
from pyllama_raw.testing import FakeExecutor, fake_limits, fake_parts
from tests.core.support import make_request
from tests.engine.support import HANG_S, PlainLoop, PlainStream

N_EXAMPLES = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "20"))
N_STEPS = 12  # of the request that keeps an engine busy


@dataclass(frozen=True)
class Visit:
    """A request that comes while a step runs, and leaves after some more, or stays."""

    comes: int
    n_prompt: int
    max_tokens: int
    lot: Lot
    n_steps: int | None
    patience: int | None

    def request(self, number: int) -> Request:
        deadline = None if self.patience is None else float(self.comes + self.patience)
        return make_request(
            number, self.n_prompt, self.max_tokens, lot=self.lot, deadline=deadline
        )


VISITS = st.builds(
    Visit,
    comes=st.integers(0, N_STEPS - 1),
    n_prompt=st.integers(1, 20),
    max_tokens=st.integers(1, 8),
    lot=st.sampled_from([Lot("a"), Lot("b")]),
    n_steps=st.none() | st.integers(1, 3),
    patience=st.none() | st.integers(1, 6),
)

Commands = dict[int, list[tuple[str, Request]]]  # by the step that runs when they come


def commands_of(visits: list[Visit]) -> Commands:
    commands: Commands = defaultdict(list)
    for number, visit in enumerate(visits, 1):
        request = visit.request(number)
        commands[visit.comes].append(("add", request))
        if visit.n_steps is not None:
            commands[visit.comes + visit.n_steps].append(("cancel", request))
    return commands


def pacemaker() -> Request:
    return make_request(0, n_prompt=2, max_tokens=N_STEPS, lot=Lot("a"))


def make_executor(on_step: Callable[[int, StepPlan], None]) -> FakeExecutor:
    return FakeExecutor(fake_limits(n_slots=3, n_batch=16), on_step=on_step)


def computing(executor: FakeExecutor) -> list[StepPlan]:
    """Plans with works: an engine that closes has no use for a last one without."""
    return [plan for plan in executor.plans if plan.works]


Told = tuple[list[StepPlan], dict[int, list[Event]]]


def drive(commands: Commands) -> Told:
    """Through a driver; commands wait for the end of the step."""
    due: list[Callable[[], object]] = []
    told = defaultdict(list)

    def come(step: int, _: StepPlan) -> None:
        for what, request in commands[step]:
            if what == "add":
                now = driver.clock()
                due.append(lambda request=request, now=now: driver.add([request], now))
            else:
                executor.stop(request.request_id)
                due.append(lambda i=request.request_id: driver.cancel(i))

    def tell(events: list[Event]) -> None:
        for event in events:
            told[event.request_id].append(event)

    executor = make_executor(come)
    parts = fake_parts(executor, token_budget=8)
    driver = Driver(parts.scheduler, executor, lambda: float(executor.n_steps), tell)
    driver.add([pacemaker()], 0.0)
    while driver.step():
        while due:
            due.pop(0)()
    return computing(executor), told


def run_thread(commands: Commands, clock: Callable[[], float] | None = None) -> Told:
    """Through an engine thread; *clock*: None counts steps."""
    streams = {0: PlainStream(PlainLoop())}

    def come(step: int, _: StepPlan) -> None:
        for what, request in commands[step]:
            if what == "add":
                stream = streams[request.request_id] = PlainStream(PlainLoop())
                thread.submit_all((request,), stream)
            else:
                thread.cancel(request.request_id)

    executor = make_executor(come)
    parts = fake_parts(executor, token_budget=8)
    thread = EngineThread(parts, clock=clock or (lambda: float(executor.n_steps)))
    thread.submit_all((pacemaker(),), streams[0])
    first = streams[0].read_to_end()  # all others have come by then
    thread.close(drains=True)
    assert thread.join(HANG_S)
    assert thread.error is None
    told = {i: [*stream.events] for i, stream in streams.items()}
    return computing(executor), told | {0: first}


def without_times(told: Told) -> Told:
    plans, events = told
    ends = defaultdict(list)
    for request_id, of_one in events.items():
        for event in of_one:
            ends[request_id].append(
                replace(event, timings=None) if isinstance(event, Finished) else event
            )
    return plans, ends


@settings(deadline=None, max_examples=N_EXAMPLES)
@given(st.lists(VISITS, max_size=6))
def test_a_thread_does_what_a_driver_does(visits):
    """
    The same commands at the same steps give the same plans and events, and on a clock that
    counts steps at the same times, deadlines included.
    """
    driven = drive(commands_of(visits))

    assert run_thread(commands_of(visits)) == driven


@settings(deadline=None, max_examples=N_EXAMPLES)
@given(st.lists(VISITS, max_size=6))
def test_plans_do_not_depend_on_the_clock(visits):
    """
    Without deadlines, and with a token budget that is not learned from times.
    """
    visits = [replace(visit, patience=None) for visit in visits]
    driven = without_times(drive(commands_of(visits)))

    assert without_times(run_thread(commands_of(visits), monotonic)) == driven


def test_what_does_not_wait_for_a_step_is_told_before_it():
    """
    A cancelled request ends before the next step of others runs.
    """
    told = []
    executor = make_executor(lambda *_: told.append("step"))
    scheduler = fake_parts(executor).scheduler
    driver = Driver(
        scheduler,
        executor,
        lambda: 0.0,
        lambda events: told.append([type(event) for event in events]),
    )
    driver.add([make_request(0), make_request(1)], 0.0)
    driver.step()

    driver.cancel(0)
    driver.step()

    tokens, end = NewTokens, Finished
    assert told == ["step", [tokens, tokens], [end], "step", [tokens]]


def test_a_request_that_is_not_taken_leaves_nothing_behind():
    """
    What add() had made of it is freed by withdraw().
    """
    executor = make_executor(lambda *_: None)
    driver = Driver(
        fake_parts(executor).scheduler, executor, lambda: 0.0, lambda *_: None
    )
    too_long = make_request(1, n_prompt=1000)
    with pytest.raises(PromptTooLong):
        driver.add([make_request(0), too_long], 0.0)

    assert [driver.withdraw(0), driver.withdraw(1)] == [False, False]
    assert (executor.opened, driver.step()) == (set(), False)
