"""A draft model: what it holds, when it is worth its time, and that no output depends on it."""

from array import array
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama_raw.core.lookup import FIRST_MEAN, FIRST_OF_MODEL, Drafting
from pyllama_raw.core.request import DRAFTS, Adapted, Private, Request
from pyllama_raw.core.scheduling import speculation
from pyllama_raw.core.scheduling.speculation import DraftLimits
from pyllama_raw.core.step import Propose, Verify
from pyllama_raw.testing.executor import FakeDrafts
from tests.core.support import finished, make_request, make_scheduler
from tests.core.test_speculation import Machine, reuse

LIMITS = DraftLimits(n_ctx_slot=512, n_cells=4096, n_batch=512, n_vocab=1000)
RNG = Random(3)  # noqa: S311
# Few runs of three come twice, so lookup has nothing to say.
WORDS = [RNG.randrange(40, 90) for _ in range(2000)]


def told(history):
    """The first model: each place has its token."""
    return WORDS[len(history)]


def right(history):
    """A draft model that is always right, and sure."""
    return WORDS[len(history)], 0.99


def wrong(history):
    """One that is sure as well, and never right."""
    return 99, 0.99


class DraftingMachine(Machine):
    """A machine with a draft model, whose decodes take *draft_s* each."""

    def __init__(
        self,
        draft=right,
        *,
        n_slots=1,
        draft_s=0.1,
        seconds=lambda n_rows: 1.0,
        limits=LIMITS,
        next_token=told,
        fails=lambda _: False,
        scheduler=None,
        **failures,
    ):
        self.draft_s = draft_s
        self.drafts = FakeDrafts(n_slots, draft, lambda _: draft_s, fails)
        scheduler = scheduler or drafting_scheduler(n_slots, limits)
        super().__init__(scheduler, next_token, seconds, drafts=self.drafts, **failures)

    def pass_time(self, plan, seconds):
        if plan.lot == DRAFTS:
            self.plans.append(plan)
            self.now += max(plan.works[0].n_drafts, 1) * self.draft_s
        else:
            super().pass_time(plan, seconds)

    @property
    def proposals(self):
        """Works of each step of the draft model."""
        return [plan.works for plan in self.plans if plan.lot == DRAFTS]


def drafting_scheduler(n_slots=1, limits=LIMITS, **options):
    sizes = {"n_ctx_slot": 512, "n_batch": 512, "n_outputs": 32} | options
    return make_scheduler(n_slots, speculates=True, draft=limits, **sizes)


def plain_output(*requests, n_slots=1, **sizes):
    """What the first model says by itself."""
    sizes = {"n_ctx_slot": 512, "n_batch": 512} | sizes
    return Machine(make_scheduler(n_slots, **sizes), told).run(*requests)


# -- how often it is right ---------------------------------------------------------------


def test_chances_are_learned_by_the_probability_that_it_gave():
    """
    Each token that comes tells of the one that was expected; behind a wrong one nothing is.
    """
    shared, tokens = Drafting(), array("i", [1, 2])
    drafting = shared.copy()
    drafting.propose(2, [3, 4, 5], [1.0, 0.1, 0.5])
    before = drafting.draft(8, 0.0)

    tokens.append(3)
    drafting.follow(tokens, shared)
    assert before[0].tolist() == [3, 4, 5]
    assert before[1] == pytest.approx([0.92, 0.092, 0.046])
    assert drafting.n_ahead == 2
    assert drafting.draft(1, 0.0)[0].tolist() == [4]
    tokens.append(9)
    drafting.follow(tokens, shared)
    assert drafting.n_ahead == 0
    assert drafting.chances == pytest.approx([0.09, 0.3, 0.5, 0.7, 0.928])
    assert drafting.mean == pytest.approx((FIRST_MEAN + 0.1 * 0.3) * 0.9)
    assert shared.chances == pytest.approx([0.098, 0.3, 0.5, 0.7, 0.9216])
    assert shared.copy().chances == shared.chances


def test_an_unlikely_draft_and_those_behind_it_are_left_out():
    """
    As nobody would reach them.
    """
    drafting = Drafting()
    drafting.propose(0, [1, 2, 3], [0.9, 0.0, 0.9])

    assert drafting.draft(8, 0.1)[0].tolist() == [1]
    assert drafting.draft(8, 0.1)[1] == [FIRST_OF_MODEL[4]]


class FakeHeads(FakeDrafts):
    """They hold all that the model has computed."""

    def _output(self, work):
        assert len(work.tokens) == 1
        self.slots[work.slot] = [0] * work.pos
        return super()._output(work)


def test_heads_lack_the_latest_token_only():
    """
    They follow the model, so a proposal brings one token of each stream, whoever was there before.
    """
    machine = DraftingMachine(limits=replace(LIMITS, of_heads=True))
    machine.drafts = machine.executor.drafts = FakeHeads(1, right, lambda _: 0.1)
    requests = [make_request(n, n_prompt=n, max_tokens=60) for n in (8, 300)]

    assert machine.run(*requests) == plain_output(*requests)
    assert {len(work.tokens) for works in machine.proposals for work in works} == {1}
    assert finished(machine.events)[8].n_accepted > 30


# -- when it is worth its time -----------------------------------------------------------


def test_a_model_that_is_right_saves_steps():
    """
    The output is the same; the draft model's steps alternate with those that verify.
    """
    machine, request = DraftingMachine(), make_request(n_prompt=8, max_tokens=200)

    assert machine.run(request) == plain_output(request)
    assert machine.now < 90
    end = finished(machine.events)[0]
    assert end.n_accepted > 130
    lots = [plan.lot for plan in machine.plans]
    assert all({a, b} != {DRAFTS} for a, b in pairwise(lots))
    assert machine.scheduler.stats().accepted_tokens == end.n_accepted


def test_a_model_that_is_wrong_is_hardly_tried():
    """
    It costs a few tries at first, then a hundredth of the time.
    """
    machine = DraftingMachine(wrong)
    machine.run(make_request(n_prompt=8, max_tokens=400))

    assert machine.scheduler.stats().accepted_tokens == 0
    assert machine.now < 400 * 1.05
    assert 0 < len(machine.proposals) < 40


def test_a_model_that_is_slow_is_hardly_tried():
    """
    However right it is: drafts that take as long as the tokens gain nothing.
    """
    machine = DraftingMachine(draft_s=1.0)
    machine.run(make_request(n_prompt=8, max_tokens=400))

    assert machine.now < 400 * 1.05
    assert 0 < len(machine.proposals) <= 4


def test_rows_that_cost_much_bound_the_depth():
    """
    By both measured times: where up to four rows are free, three drafts are made.
    """
    machine = DraftingMachine(seconds=lambda n: 1.0 if n <= 4 else float(n))
    machine.run(make_request(n_prompt=2, max_tokens=120))

    counts = Counter(work.n_drafts for (work,) in machine.proposals)
    assert counts.most_common(1)[0][0] == 3


def test_all_streams_are_in_one_step_of_it():
    """
    Each goes on from what it lacks; one that refuses drafts has none.
    """
    machine = DraftingMachine(n_slots=3)
    requests = [make_request(i, n_prompt=6, max_tokens=60) for i in range(2)]
    requests.append(make_request(2, n_prompt=6, max_tokens=60, speculates=False))
    outputs = machine.run(*requests)

    assert outputs == plain_output(*requests, n_slots=3)
    assert {w.request_id for works in machine.proposals for w in works} == {0, 1}
    assert max(map(len, machine.proposals)) == 2


# -- what it holds -----------------------------------------------------------------------


def test_a_long_prompt_is_caught_up_in_parts(monkeypatch):
    """
    Streams have a step in between, and drafts come behind the last part.
    """
    monkeypatch.setattr(speculation, "MAX_CATCH_UP", 50)
    machine = DraftingMachine()
    machine.run(make_request(n_prompt=120, max_tokens=120))

    parts = [(w.pos, len(w.tokens), w.n_drafts > 0) for (w,) in machine.proposals[:3]]
    assert parts[:2] == [(0, 50, False), (50, 50, False)]
    assert parts[2][0] == 100
    assert parts[2][2]
    assert finished(machine.events)[0].n_accepted > 0


def test_long_prompts_are_caught_up_one_after_the_other(monkeypatch):
    """
    As many tokens as a step of the draft model may have, from the first slot on.
    """
    monkeypatch.setattr(speculation, "MAX_CATCH_UP", 50)
    machine = DraftingMachine(n_slots=2)
    requests = [make_request(i, n_prompt=80, max_tokens=150) for i in range(2)]

    assert machine.run(*requests) == plain_output(*requests, n_slots=2)
    sizes = [[(w.slot, len(w.tokens)) for w in works] for works in machine.proposals]
    assert sizes[0] == [(0, 50)]
    assert sum(n for _, n in sizes[1]) == 50
    assert {slot for works in sizes for slot, _ in works} == {0, 1}


def test_what_was_said_before_comes_first():
    """
    Where a text repeats itself the draft model, which would be wrong, is hardly asked.
    """
    request = make_request(n_prompt=4, max_tokens=300)
    machine = DraftingMachine(wrong, next_token=lambda h: 50 + len(h) % 4)
    machine.run(request)

    assert machine.scheduler.stats().accepted_tokens > 200
    assert len(machine.proposals) < 5


def test_what_a_slot_holds_is_told_by_its_tokens():
    """
    The next turn of a chat goes on behind the last one; another text begins anew.
    """
    machine = DraftingMachine(scheduler=drafting_scheduler(cache=reuse()))
    turn = array("i", WORDS[:30])
    (first,) = machine.run(Request(0, turn, 60))
    n_before = len(machine.proposals)
    machine.run(Request(1, turn + array("i", first) + array("i", [41, 42]), 60))
    (again,) = machine.proposals[n_before]
    n_before = len(machine.proposals)
    machine.run(Request(2, array("i", [91] * 20), 60))
    (anew,) = machine.proposals[n_before]

    assert 30 + 60 - 2 * speculation.MAX_DEPTH <= again.pos <= 90
    assert anew.pos == 0


@pytest.mark.parametrize(
    ("namespaces", "cache", "salt"),
    [
        (("a", "b"), reuse(), "c"),
        ((None, "b"), reuse(), "c"),
        ((Private(), Private()), reuse(), "c"),
        (("a", Adapted("digest", "a")), reuse(), "c"),
        (("a", "a"), reuse(), "a"),
        ((None, None), reuse(), None),
        ((None, None), None, "c"),
    ],
)
def test_what_another_namespace_has_left_is_read_again(namespaces, cache, salt):
    """
    Nor is what was forgotten meanwhile, or what a cache that is off would not share: else the
    drafts of a request told what others have said.
    """
    machine = DraftingMachine(scheduler=drafting_scheduler(cache=cache))
    first, second = (
        make_request(i, n_prompt=60, max_tokens=60, namespace=namespace)
        for i, namespace in enumerate(namespaces)
    )
    machine.run(first)
    machine.scheduler.clear_cache(salt)
    n_before = len(machine.proposals)
    machine.run(second)

    assert n_before > 0
    assert machine.proposals[n_before][0].pos == 0


def test_a_text_that_is_forgotten_while_it_is_read_is_read_on():
    """
    By the request that it is of, which has it anyway.
    """
    machine = DraftingMachine(scheduler=drafting_scheduler(cache=reuse()))
    machine.driver.add((make_request(n_prompt=60, max_tokens=200),), 0.0)
    while len(machine.proposals) < 3:
        machine.driver.step()
    machine.scheduler.clear_cache()
    machine.run()

    assert all(work.pos > 0 for (work,) in machine.proposals[3:])


def test_texts_that_begin_alike_share_none_of_its_cells():
    """
    So it drafts for as many as it can hold, and others go on without.
    """
    limits = replace(LIMITS, n_cells=200)
    machine = DraftingMachine(
        n_slots=3, scheduler=drafting_scheduler(3, limits, cache=reuse())
    )
    requests = [make_request(i, n_prompt=100, max_tokens=60) for i in range(3)]

    assert machine.run(*requests) == plain_output(*requests, n_slots=3)
    drafted = {work.request_id for works in machine.proposals for work in works}
    assert drafted == {0}


def test_a_context_that_is_another_one_begins_anew():
    """
    As after a sleep: its works are lost, then all is computed again, and no request ends.
    """
    machine, request = DraftingMachine(), make_request(n_prompt=8, max_tokens=200)
    machine.driver.add((request,), 0.0)
    for _ in range(40):
        machine.driver.step()
    for slot in machine.drafts.slots:
        slot.clear()
    n_before = len(machine.proposals)

    assert machine.run() == []
    first, second = (work.pos for (work,) in machine.proposals[n_before:][:2])
    assert first > second == 0
    assert finished(machine.events)[0].error is None


def test_a_model_that_fails_fails_no_request():
    """
    It is tried again later and later.
    """
    machine = DraftingMachine(fails=lambda _: True)
    request = make_request(n_prompt=8, max_tokens=450)

    assert machine.run(request) == plain_output(request)
    assert 3 <= len(machine.proposals) <= 6
    assert finished(machine.events)[0].error is None


def test_a_model_that_fails_once_goes_on():
    """
    A pause, then drafts again.
    """
    machine = DraftingMachine(fails=lambda n: n == 3)
    machine.run(make_request(n_prompt=8, max_tokens=200))

    assert finished(machine.events)[0].n_accepted > 100


def test_tokens_that_one_vocabulary_lacks_are_not_drafted():
    """
    A draft ends before such a token, and a text that has one is not read.
    """
    machine = DraftingMachine(
        lambda history: (1001 if len(history) % 5 == 0 else WORDS[len(history)], 0.9)
    )
    machine.run(make_request(n_prompt=8, max_tokens=100))
    drafts = {t for plan in machine.plans for w in plan.works for t in w.tokens}
    other = DraftingMachine()
    other.run(Request(0, array("i", [50, 1001, 51]), 60))

    assert machine.scheduler.stats().accepted_tokens > 0
    assert 1001 not in drafts
    assert other.proposals == []


def test_a_slot_of_the_draft_model_may_be_shorter():
    """
    Behind its last position nothing is drafted.
    """
    limits = DraftLimits(n_ctx_slot=60, n_cells=512, n_batch=512, n_vocab=1000)
    machine = DraftingMachine(limits=limits)
    machine.run(make_request(n_prompt=8, max_tokens=200))

    ends = [w.pos + len(w.tokens) for (w,) in machine.proposals]
    assert 0 < max(ends) < 60


def test_a_request_that_ends_while_it_is_drafted_leaves_nothing():
    """
    What the slot holds is told by its tokens to the next one.
    """
    machine = DraftingMachine()
    machine.driver.add((make_request(0, n_prompt=8, max_tokens=60),), 0.0)
    while True:
        plan, _ = machine.driver.plan()
        if plan.lot == DRAFTS:
            break
        machine.driver.run(plan)
    machine.driver.cancel(0)
    machine.driver.run(plan)
    machine.scheduler.check_integrity()
    request = make_request(1, n_prompt=8, max_tokens=60)

    assert machine.run(request) == plain_output(request)


def test_a_text_that_was_shifted_is_drafted_on():
    """
    From what is left of it.
    """
    sizes = {"n_ctx_slot": 64, "n_batch": 64}
    scheduler = drafting_scheduler(1, LIMITS, **sizes, context_full="shift")

    def next_token(history):
        return 40 + (3 * history[-1] + 5 * history[-2] + len(history) // 3) % 50

    machine = DraftingMachine(
        lambda history: (next_token(history), 0.9),
        scheduler=scheduler,
        next_token=next_token,
    )
    (output,) = machine.run(make_request(n_prompt=8, max_tokens=200))

    assert len(output) == 200
    assert machine.scheduler.stats().shifted > 0
    assert machine.scheduler.stats().accepted_tokens > 0


@settings(max_examples=60)
@given(st.data())
def test_outputs_are_those_without_a_draft_model(data):
    """
    Of several requests that are preempted, cancelled and drafted by a model that errs at times.
    """
    n_slots = data.draw(st.integers(1, 3))
    sure = data.draw(st.sampled_from([0.1, 0.6, 0.99]))
    period = data.draw(st.integers(1, 7))
    slope = data.draw(st.sampled_from([0.0, 0.1, 0.5]))
    fails = data.draw(st.sampled_from([0, 3, 7]))
    n_cells = data.draw(st.sampled_from([160, 512]))
    requests = [
        make_request(
            i,
            n_prompt=data.draw(st.integers(1, 40)),
            max_tokens=data.draw(st.integers(1, 60)),
        )
        for i in range(data.draw(st.integers(1, 5)))
    ]

    def draft(history):
        is_right = len(history) % period or period == 1
        return (told(history) if is_right else 95), sure

    sizes = {"n_ctx_slot": 128, "n_batch": 128, "n_cells": n_cells}
    machine = DraftingMachine(
        draft,
        n_slots=n_slots,
        seconds=lambda n: 1 + slope * n,
        fails=lambda n: fails and n % fails == 0,
        scheduler=drafting_scheduler(n_slots, LIMITS, **sizes),
    )
    plain = Machine(make_scheduler(n_slots, **sizes), told)

    assert machine.run(*requests) == plain.run(*requests)
    works = [work for plan in machine.plans for work in plan.works]
    assert all(len(work.tokens) > 1 for work in works if type(work) is Verify)
    assert all(work.n_drafts <= 16 for work in works if type(work) is Propose)
