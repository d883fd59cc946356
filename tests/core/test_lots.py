"""Who may share a decode, and that everybody gets a turn."""

import os
from array import array
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.request import Finished, Lot, Span, StopToken
from pyllama_raw.core.scheduling.lots import SHARE, LotTurns, Turns
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.core.step import (
    DecodeStatus,
    Release,
    Sampled,
    StepPlan,
    StepResult,
    Trim,
)
from pyllama_raw.errors import BadMedia
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.core.support import (
    STOP_TOKEN,
    Pieces,
    answer,
    finished,
    make_request,
    make_scheduler,
    run_until_idle,
)

N_HISTORIES = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "100"))
LOTS = Lot("a"), Lot("b")


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, unique=True), max_size=60))
def test_a_lot_waits_for_one_turn_of_each_other(steps):
    """
    However lots come and go: of k lots that are ready, none waits for more than k - 1.
    """
    turns, bounds = Turns(), {}
    for step in steps:
        ready = [Lot(str(number)) for number in step]
        bounds = {lot: bounds.get(lot, len(ready) - 1) for lot in ready}

        picked = turns.pick(ready)

        assert min(bounds.values()) >= 0 or bounds[picked] < 0
        assert all(bound > 0 for lot, bound in bounds.items() if lot != picked)
        bounds = {lot: n - 1 for lot, n in bounds.items() if lot != picked}


def test_a_step_that_failed_is_of_the_same_lot_again():
    """
    It takes no turn of others.
    """
    turns = LotTurns()
    picked = [turns.pick(LOTS, 0.0), turns.repeat()]
    picked += [turns.pick(LOTS, 0.0) for _ in range(3)]

    a, b = LOTS
    assert picked == [a, a, a, b, a]


@pytest.mark.parametrize("seed", range(20))
def test_sets_of_adapters_take_turns_and_switches_are_a_small_share(seed):
    """
    Whoever comes and goes: of k sets none waits longer than k - 1 turns and their last steps,
    and no set ends its turn early for another one's sake.
    """
    rng, turns, now = Random(seed), LotTurns(), 0.0  # noqa: S311
    turns.switch_s = 0.007
    turn_s, step_s = turns.switch_s / SHARE, 0.02
    lots = [Lot(f"{n}", adapters=((n // 2, 1.0),)) for n in range(8)]  # two lots a set
    since, gone_since, on, n_early = {}, 0.0, None, 0
    for _ in range(2000):
        ready = [lot for lot in lots if rng.random() < 0.9]
        picked = turns.pick(ready, now).adapters if ready else None
        if picked is None:
            since.clear()
        else:
            sets = {lot.adapters for lot in ready}
            since = {each: since.get(each, now) for each in sets if each != picked}
            assert all(
                now - then <= 3 * (2 * turn_s + step_s) for then in since.values()
            )
            if picked != on:
                n_early += on in sets and now - gone_since < turn_s - 1e-9
                on, gone_since = picked, now
        now += rng.uniform(0, step_s)

    assert n_early == 0


def test_lots_of_a_set_take_turns_of_a_step_within_the_turn_of_the_set():
    """
    Each of them has its step, also when a turn has one only.
    """
    x, y = (Lot(name) for name in "xy")
    a, b = (Lot(name, adapters=((1, 0.5),)) for name in "ab")
    turns = LotTurns()

    picked = [turns.pick((x, y, a, b), now) for now in (0, 0.1, 0.2, 10, 20, 30)]

    assert picked == [x, a, b, y, a, x]


def test_lots_take_turns():
    """
    Two streams that may not share a decode go on in every other step.
    """
    scheduler = make_scheduler()
    for number, lot in enumerate(LOTS):
        scheduler.add(make_request(number, n_prompt=2, max_tokens=3, lot=lot), 0.0)

    plans, _ = run_until_idle(scheduler)

    assert [plan.lot for plan in plans] == [*LOTS] * 3
    assert not any(plan.steady for plan in plans[:-1])


def test_a_set_goes_on_for_longer_if_switches_are_found_to_cost_more():
    """
    A step takes half a second; by the first result a switch costs a whole one.
    """
    scheduler = make_scheduler()
    lots = [Lot(name, adapters=((number, 1.0),)) for number, name in enumerate("ab")]
    for number, lot in enumerate(lots):
        scheduler.add(make_request(number, n_prompt=2, max_tokens=3, lot=lot), 0.0)

    plans, _ = run_until_idle(
        scheduler, lambda plan: answer(plan)._replace(switch_s=1.0)
    )

    a, b = lots
    assert [plan.lot for plan in plans] == [a, b, b, b, a, a]


def test_a_prompt_takes_no_cells_of_streams_in_another_lot():
    """
    Cells that the next step of streams needs are theirs; a lot without any has no turn.
    """
    scheduler = make_scheduler(n_slots=4, n_ctx_slot=256, n_cells=299, token_budget=1)
    for number in range(3):
        request = make_request(number, n_prompt=2, max_tokens=200, lot=LOTS[0])
        scheduler.add(request, 0.0)
    scheduler.add(make_request(3, n_prompt=100, max_tokens=1, lot=LOTS[1]), 0.0)

    _, events = run_until_idle(scheduler, max_steps=2000)

    assert {end.error for end in finished(events).values()} == {None}


class History:
    """Requests of two lots come and go on the fake executor; some steps fail."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)  # noqa: S311
        self.has_images = rng.random() < 0.5
        unified, fails = rng.random() < 0.5, rng.random() < 0.5
        split_kind = SnapshotKind.STATE if fails else SnapshotKind.EXACT
        limits = fake_limits(
            n_slots=3,
            n_ctx_slot=24,
            n_batch=8,
            n_cells=rng.choice([40, 96]) if unified else 72,
            unified=unified,
            deterministic=rng.random() < 0.3,
            kind=SnapshotKind.RANGE if unified else split_kind,
        )
        failing = [*DecodeStatus] * fails
        failures = {n: rng.choice(failing) for n in range(99 * fails) if self.is_rare()}
        n_more = [0, 0, 2]
        self.executor = FakeExecutor(
            limits, failures=failures, n_more=lambda _: rng.choice(n_more)
        )
        self.scheduler = Scheduler(
            limits, Pieces(), token_budget=8, prefill_quantum=rng.choice([2, 8])
        )
        self.lots: dict[int, Lot] = {}
        self.ended: set[int] = set()
        self.bounds: dict[Lot, int] = {}  # steps that each may still wait
        self.now = 0.0

    def is_rare(self) -> bool:
        return self.rng.random() < 0.05

    def play(self) -> None:
        n_requests = self.rng.randrange(2, 9)
        while len(self.lots) < n_requests or self.scheduler.alive:
            if len(self.lots) < n_requests and self.rng.random() < 0.4:
                self.add()
            if self.lots and self.is_rare():
                self.scheduler.cancel(self.rng.choice([*self.lots]), self.now)
            self.step()
            assert self.now < 1000
        assert self.ended == self.lots.keys()

    def add(self) -> None:
        rng, number = self.rng, len(self.lots)
        n_prompt, max_tokens = rng.randrange(1, 16), rng.randrange(1, 9)
        spans = self.spans(n_prompt) if self.has_images else ()
        request = make_request(
            number, n_prompt, max_tokens, lot=rng.choice(LOTS), spans=spans
        )
        for span in spans:
            rows = array("i", [-len(spans)] * (span.stop - span.start))
            request.tokens[span.start : span.stop] = rows
        self.executor.open(request)
        self.scheduler.add(request, self.now)
        self.lots[number] = request.lot

    def spans(self, n_prompt: int) -> tuple[Span, ...]:
        """Some that are apart or follow each other, before the last token."""
        rng, spans, start = self.rng, [], 0
        while rng.random() < 0.6:
            start += rng.randrange(4)
            stop = start + rng.randrange(1, 7)
            if stop >= n_prompt:
                break
            n_pos = rng.randint(1, stop - start)
            spans.append(Span(start, stop, n_pos, rng.random() < 0.5))
            start = stop
        return tuple(spans)

    def fail_some(self) -> None:
        """A request with images may be ended by an error from outside."""
        for number, sequence in list(self.scheduler._roster.alive.items()):
            if sequence.request.spans and self.is_rare():
                assert self.scheduler.fail(number, BadMedia("as told"), self.now)

    def step(self) -> None:
        self.fail_some()
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        events = self.scheduler.take_events()
        self.check(plan)
        if plan:
            result = self.executor.execute(plan)
            events += self.scheduler.apply(plan, result, self.now)
            if result.status is not DecodeStatus.OK:
                self.bounds.clear()
        self.scheduler.check_integrity()
        for event in events:
            if isinstance(event, Finished):
                self.executor.close(event.request_id)
                assert event.request_id not in self.ended
                self.ended.add(event.request_id)

    def check(self, plan: StepPlan) -> None:
        """
        It is of one lot, and no lot that was ready has waited for too long.

        The executor checks that no step has rows of images beside tokens.
        """
        [*here] = {self.lots[work.request_id] for work in plan.works}
        assert len(here) <= 1
        if not here or self.scheduler._suspects.all:  # who is suspected goes alone
            self.bounds.clear()
            return
        running = self.scheduler.memory.slots.running.values()
        running = [each for each in running if each.leader is None]
        limits = self.scheduler.limits
        # Of a lot: streams and prompts, rows and those that see each other.
        n_parts = 1 + limits.deterministic + 2 * self.has_images
        bound = n_parts * len({s.request.lot for s in running}) - 1
        has_cells = not limits.unified or limits.n_cells >= 96
        ready = {s.request.lot for s in running if has_cells or s.n_behind == 1}
        bounds = {lot: self.bounds.get(lot, bound) for lot in ready}
        bounds.pop(here[0], None)
        assert all(n > 0 for n in bounds.values())
        self.bounds = {lot: n - 1 for lot, n in bounds.items()}


@pytest.mark.chance
@pytest.mark.parametrize("first", range(0, N_HISTORIES, 100))
def test_no_plan_mixes_lots_and_none_waits_longer_than_the_bound(first):
    """
    Whatever comes, leaves or fails, with one or several tokens a row: all end, once.
    """
    for seed in range(first, first + 100):
        History(seed).play()


def test_tokens_of_a_row_are_taken_up_to_the_end():
    """
    What was sampled after it is not told, and not kept.
    """
    scheduler = make_scheduler()
    scheduler.add(make_request(0, n_prompt=2, max_tokens=5), 0.0)
    plan = scheduler.schedule(0.0)
    tokens = (97, 98, STOP_TOKEN, 99)

    delta, end = scheduler.apply(plan, StepResult(outputs=(Sampled(tokens),)), 0.0)

    assert delta.tokens == (97, 98, STOP_TOKEN)
    assert (end.n_output, end.detail) == (3, StopToken(STOP_TOKEN))
    assert scheduler.schedule(0.0).moves == (Trim(0, 4), Release(0))
