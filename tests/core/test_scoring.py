"""Scoring prompts: which rows a step asks for, and that each is asked for once."""

from array import array

import pytest

from pyllama_raw import CacheConfig
from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.request import CacheTier, Request, Scoring, TokenLogprobs
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.core.step import (
    DecodeStatus,
    PartlyComputed,
    Sampled,
    ScoredPrefill,
    StepPlan,
    StepResult,
)
from pyllama_raw.engine.build import make_cache
from tests.core.reuse_support import A, B, Engine
from tests.core.support import (
    Pieces,
    answer,
    finished,
    make_request,
    run_until_idle,
    score,
)


def make(n_outputs=8, n_slots=2, n_ctx_slot=64, n_cells=None, **options) -> Scheduler:
    n_cells = n_cells or n_slots * n_ctx_slot
    limits = ContextLimits(n_slots, n_ctx_slot, 64, n_cells, n_outputs=n_outputs)
    return Scheduler(limits, Pieces(), token_budget=64, **options)


def scored(request_id=0, n_prompt=20, **fields) -> Request:
    return make_request(request_id, n_prompt, scoring=Scoring(), **fields)


def n_rows(plan: StepPlan) -> int:
    return sum(
        len(work.tokens) - work.n_plain
        if isinstance(work, ScoredPrefill)
        else work.samples
        for work in plan.works
    )


def of_all(request: Request) -> tuple[TokenLogprobs, ...]:
    """What score() says when each token after the first is asked for once."""
    return score(1, request.tokens[1:])


@pytest.mark.parametrize("n_outputs", [2, 3, 8, 64])
@pytest.mark.parametrize("n_prompt", [1, 2, 3, 20, 41])
def test_each_token_is_scored_once_and_rows_fit(n_outputs, n_prompt):
    """
    Every prompt token but the first is a target once, in order; a step never asks for
    more output rows than there are.
    """
    scheduler = make(n_outputs)
    request = scored(n_prompt=n_prompt)
    scheduler.add(request, 0.0)

    plans, events = run_until_idle(scheduler)

    assert finished(events)[0].prompt_logprobs == of_all(request)
    assert max(n_rows(plan) for plan in plans) <= n_outputs
    assert finished(events)[0].n_output == 4


def test_scored_prompts_leave_rows_to_the_others():
    """
    Beside a scored prompt everyone else samples in every step.
    """
    scheduler = make(n_outputs=4, n_slots=4)
    requests = [scored(0, 30), scored(1, 30), make_request(2, 4, 30)]
    for request in [*requests, make_request(3, 9, 30)]:
        scheduler.add(request, 0.0)

    plans, events = run_until_idle(scheduler)

    assert max(n_rows(plan) for plan in plans) <= 4
    assert all(2 in {c.request_id for c in plan.works} for plan in plans[:30])
    for request in requests[:2]:
        ended = finished(events)[request.request_id]
        assert ended.prompt_logprobs == of_all(request)


def test_nothing_is_scored_that_was_not_asked_for():
    """
    Without scoring no chunk has targets and no end has log-probabilities.
    """
    scheduler = make()
    scheduler.add(make_request(n_prompt=20), 0.0)

    plans, events = run_until_idle(scheduler)

    assert all(not isinstance(w, ScoredPrefill) for plan in plans for w in plan.works)
    assert finished(events)[0].prompt_logprobs == ()


def test_a_scored_prompt_takes_nothing_from_the_cache():
    """
    What a slot holds is computed again for a prompt that is scored, and only then.
    """
    scheduler = make(
        cache=make_cache(CacheConfig(mode="live"), SnapshotKind.RANGE),
    )
    scheduler.add(make_request(0, 40), 0.0)
    run_until_idle(scheduler)
    scheduler.add(request := scored(1, 40), 0.0)
    _, events = run_until_idle(scheduler)
    scheduler.add(make_request(2, 40), 0.0)
    _, later = run_until_idle(scheduler)

    assert finished(events)[1].prompt_logprobs == of_all(request)
    assert finished(events)[1].n_cached == 0
    assert finished(later)[2].n_cached == 38


def test_an_aborted_step_is_scored_again():
    """
    Rows that were lost with a step are computed and scored once more.
    """
    scheduler = make()
    scheduler.add(request := scored(n_prompt=30), 0.0)
    steps = iter(range(1000))

    def execute(plan: StepPlan) -> StepResult:
        if next(steps) % 2:
            held = [PartlyComputed(len(work.tokens)) for work in plan.works]
            return StepResult(DecodeStatus.ABORTED, tuple(held))
        return answer(plan)

    _, events = run_until_idle(scheduler, execute)

    assert finished(events)[0].prompt_logprobs == of_all(request)


def test_a_preempted_prompt_goes_on_where_it_was_scored():
    """
    After a preemption what was scored is computed without rows, the rest with.
    """
    scheduler = make(n_outputs=2, n_ctx_slot=256, n_cells=192)
    scheduler.add(make_request(0, 4, max_tokens=150), 0.0)
    scheduler.add(request := scored(1, 120, max_tokens=2), 0.0)

    _, events = run_until_idle(scheduler)

    ended = finished(events)[1]
    assert ended.prompt_logprobs == of_all(request)
    assert ended.n_preempted > 0


def test_log_probabilities_of_output_tokens_are_told_with_them():
    """
    What the executor says of a sampled token is in the delta of that token.
    """
    scheduler = make()
    scheduler.add(make_request(7, max_tokens=3), 0.0)
    said = TokenLogprobs(97, -0.5, ((97, -0.5), (98, -1.5)))

    def execute(plan: StepPlan) -> StepResult:
        return StepResult(outputs=tuple(Sampled((97,), (said,)) for _ in plan.works))

    _, events = run_until_idle(scheduler, execute)

    assert [event.logprobs for event in events[:-1]] == [(said,)] * 3


def cached(n_slots=2, kind=SnapshotKind.RANGE, **options) -> Scheduler:
    """A scheduler whose slots keep what they held."""
    cache = make_cache(CacheConfig(mode="live"), kind)
    return make(n_slots=n_slots, cache=cache, **options)


def test_only_tokens_from_the_first_one_on_are_scored():
    """
    Tokens before the first score need no row, so one chunk has them and those with rows.
    """
    scheduler = make(n_outputs=8)
    request = make_request(0, 40, scoring=Scoring(first=36))
    scheduler.add(request, 0.0)

    plans, events = run_until_idle(scheduler)

    assert finished(events)[0].prompt_logprobs == score(36, request.tokens[36:])
    assert [n_rows(plan) for plan in plans] == [5, 1, 1, 1]
    assert [plan.n_tokens for plan in plans] == [40, 1, 1, 1]


def test_a_prompt_is_taken_over_up_to_its_first_score():
    """
    Continuations of one prompt compute it once: each other one has all but its last token.
    """
    scheduler = cached(n_slots=4)
    prompt = list(range(100, 140))
    requests = [
        Request(i, array("i", [*prompt, i, i, i]), 1, scoring=Scoring(first=40))
        for i in range(6)
    ]
    scheduler.add_all(requests, 0.0)

    plans, events = run_until_idle(scheduler)

    ends = finished(events)
    assert [end.prompt_logprobs for end in ends.values()] == [
        score(40, request.tokens[40:]) for request in requests
    ]
    assert [ends[i].n_cached for i in range(6)] == [0, *[39] * 5]
    assert sum(plan.n_tokens for plan in plans) == 43 + 5 * 4


@pytest.mark.parametrize("together", [True, False])
def test_scores_go_along_with_tokens(together):
    """
    A prompt that is scored takes over what another one has scored, running or ended.
    """
    scheduler = cached(n_outputs=64)
    requests = [
        Request(i, array("i", [*range(100, 140), i, i]), 1, scoring=Scoring())
        for i in (1, 2)
    ]
    events = []
    for request in requests:
        scheduler.add(request, 0.0)
        if not together:
            events += run_until_idle(scheduler)[1]
    events += run_until_idle(scheduler)[1]

    ends = finished(events)
    assert [ends[i].prompt_logprobs for i in (1, 2)] == list(map(of_all, requests))
    assert [ends[i].n_cached for i in (1, 2)] == [0, 39]


@pytest.mark.parametrize(
    "scoring",
    [None, Scoring(first=1, n_top=1), Scoring(first=20)],
    ids=["none", "another list", "too late"],
)
def test_other_scores_are_not_taken_over(scoring):
    """
    Scores that list more or less, or begin too late, are of no use: all is computed again.
    """
    scheduler = cached()
    scheduler.add(make_request(0, 40, scoring=scoring), 0.0)
    run_until_idle(scheduler)
    scheduler.add(request := scored(1, 40), 0.0)

    _, events = run_until_idle(scheduler)

    assert finished(events)[1].prompt_logprobs == of_all(request)
    assert finished(events)[1].n_cached == 0


def test_a_prompt_that_parts_before_its_first_score_takes_over_all_that_is_common():
    """
    Nothing of that needs a row, so no scores are asked for.
    """
    scheduler = cached()
    scheduler.add(make_request(0, 40), 0.0)
    run_until_idle(scheduler)
    tokens = array("i", [*range(100, 125), *range(30)])
    scheduler.add(Request(1, tokens, 1, scoring=Scoring(first=50)), 0.0)

    _, events = run_until_idle(scheduler)

    assert finished(events)[1].prompt_logprobs == score(50, tokens[50:])
    assert finished(events)[1].n_cached == 25


def test_a_later_start_goes_on_with_earlier_scores():
    """
    Who needs scores from the middle on takes those that another one has from the beginning on.
    """
    scheduler = cached()
    scheduler.add(scored(0, 40), 0.0)
    run_until_idle(scheduler)
    request = make_request(1, 40, scoring=Scoring(first=10))
    scheduler.add(request, 0.0)

    _, events = run_until_idle(scheduler)

    assert finished(events)[1].prompt_logprobs == score(10, request.tokens[10:])
    assert finished(events)[1].n_cached == 37


def test_a_snapshot_serves_what_needs_no_row():
    """
    A state has no scores, so it is restored up to the first one.
    """
    engine = Engine(n_slots=1)
    engine.run(A)
    engine.run(B)

    (end,) = engine.run(A, scoring=Scoring(first=30))

    assert (end.n_cached, end.cache_tier) == (29, CacheTier.HOST)
    assert end.prompt_logprobs == score(30, A[30:])


@pytest.mark.parametrize("kind", SnapshotKind)
def test_memory_of_any_kind_serves_many_scores(kind):
    """
    Whatever a snapshot is: each continuation has its scores, and slots hold what they should.
    """
    engine = Engine(n_slots=3, kind=kind, unified=kind is not SnapshotKind.STATE)
    scoring, points = Scoring(first=40), (39,)
    prompts = [[*A, i, i, i] for i in range(8)]

    ends = engine.run(*prompts, max_tokens=1, scoring=scoring, cache_points=points)

    assert [end.prompt_logprobs for end in ends] == [
        score(40, prompt[40:]) for prompt in prompts
    ]
    assert [end.n_cached for end in ends] == [0, *[39] * 7]
