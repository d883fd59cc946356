"""The tokens of a step: what was asked of gaps, and what a step costs here."""

import pytest

from pyllama_raw.core.costs import GRAIN, CostHistory, StepBudget, StepCost

SMALL = StepCost(0.015, 0.0009, 0.0003, 0, 0.0009)  # much of a step is its fixed time
SLOW = StepCost(0.3, 0.05, 0.01, 0, 0.05)  # no step is as short as the target
KNEE = StepCost(0.006, 0.005, 0.0, 32, 0.0025)  # few rows make a poor product
FLAT = StepCost(0.004, 0.0, 0.0, 64, 0.0000625)  # rows are free below 64


def budget(cost, target_s=None, max_tokens=2048) -> StepBudget:
    costs = CostHistory()
    costs.cost, costs.largest = cost, max_tokens
    return StepBudget(None, target_s, max_tokens, costs)


@pytest.mark.parametrize("target_s", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("cost", [SMALL, SLOW, KNEE, FLAT])
def test_a_target_of_the_user_holds(cost, target_s):
    """
    A step that streams wait for is as large as that allows, but for 16 tokens, which each may have.
    """
    n_tokens = budget(cost, target_s).limit(4, 4, [5000])

    assert n_tokens == GRAIN or cost.seconds(n_tokens, 4) <= target_s
    assert cost.seconds(n_tokens + 1.5 * GRAIN, 4) >= target_s or n_tokens == 2048


@pytest.mark.parametrize(
    ("fixed_s", "seconds"),
    [(0.002, 0.1), (0.015, 0.1), (0.05, 0.1), (0.06, 0.12), (0.1, 0.2), (0.4, 0.8)],
)
def test_by_default_half_of_a_step_at_most_is_its_fixed_time(fixed_s, seconds):
    """
    It takes 0.1 s, or twice its fixed time if that is more.
    """
    cost = StepCost(fixed_s, 0.0001, 0.0, 0, 0.0001)

    n_tokens = budget(cost, max_tokens=8192).limit(4, 4, [5000])

    assert cost.seconds(n_tokens) == pytest.approx(seconds, rel=0.03)


def test_a_step_that_nobody_waits_for_takes_four_times_as_long():
    """
    Only who comes meanwhile waits for it.
    """
    n_tokens = budget(SMALL).limit(0, 0, [5000])

    assert 0.38 <= SMALL.seconds(n_tokens, 0) <= 0.4


@pytest.mark.parametrize(("target_s", "n_tokens"), [(None, 1792), (0.1, GRAIN)])
def test_weights_that_take_long_to_read_are_read_for_many_rows(target_s, n_tokens):
    """
    Also by an idle engine, unless the user's own target is less than that.
    """
    large = StepCost(0.6, 0.001, 0.0, 0, 0.001)

    assert budget(large, target_s).limit(0, 0, [5000]) == n_tokens


def test_prompts_of_a_burst_are_computed_in_one_step():
    """
    To the last token, so that their streams begin together.
    """
    lengths = [150, 90, 251, 33, 180, 201, 64, 171]

    assert budget(SMALL).limit(0, 0, lengths) == sum(lengths)


@pytest.mark.parametrize(
    ("n_streams", "lengths", "max_tokens"),
    [
        (1, [300] * 4, 2048),  # a stream waits
        (0, [1200], 2048),  # one prompt is no burst
        (0, [30] * 4 + [900], 2048),  # the short ones would wait for the long one
        (0, [300] * 7, 4096),  # it would take 1.9 s
        (0, [300] * 4, 1024),  # the batch does not hold them
    ],
)
def test_other_prompts_are_no_burst(n_streams, lengths, max_tokens):
    """
    Their steps are as long as steps are without one.
    """
    steps = budget(SMALL, max_tokens=max_tokens)

    n_tokens = steps.limit(n_streams, n_streams, lengths)

    assert n_tokens == steps.limit(n_streams, n_streams, [5000])


def test_rows_that_cost_nothing_fill_the_batch():
    """
    A formula without a price of rows, as of a step that says nothing of them.
    """
    free = StepCost(0.01, 0.0, 0.0, 0, 0.0)

    assert budget(free, max_tokens=500).limit(1, 1, [5000]) == 496


def test_streams_of_several_lots_share_the_target():
    """
    A stream waits for a step of each lot, so each takes its part.
    """
    steps = budget(SMALL, 0.2)

    whole, half = (steps.limit(1, 1, [5000], n_turns=n) for n in (1, 2))

    assert SMALL.seconds(whole, 1) <= 0.2
    assert SMALL.seconds(half, 1) <= 0.1


def test_captures_take_their_part_of_a_step():
    """
    What they spend is no time for prompts; 16 tokens go on in any case.
    """
    steps, lengths = budget(SMALL, 0.1), [400] * 4

    assert steps.limit(1, 1, lengths, spent_s=0.05) < steps.limit(1, 1, lengths)
    assert steps.limit(1, 1, lengths, spent_s=1.0) == GRAIN
    assert steps.limit(0, 0, lengths) == 1600
    assert steps.limit(0, 0, lengths, spent_s=0.2) < 400


def test_steps_grow_step_by_step():
    """
    What small steps say of large ones is a guess, and a wrong one would stall all streams.
    """
    steps, sizes = budget(StepCost(0.01, 0.0, 0.0, 0, 0.0)), []
    for largest in (8, 64, 256, 1024):
        steps._costs.largest = largest
        sizes.append(steps.limit(1, 1, [5000]))

    assert sizes == [64, 256, 1024, 2048]


def test_nothing_is_known_before_the_first_step():
    """
    It has 64 tokens, or what the batch holds.
    """
    steps = [StepBudget(None, None, n, CostHistory()) for n in (2048, 8)]

    assert [one.limit(1, 1, [5000]) for one in steps] == [64, 8]


def test_a_fixed_budget_is_that():
    """
    Whatever steps cost, as far as the batch holds it.
    """
    steps = [StepBudget(n, None, 512, CostHistory()) for n in (256, 1024)]

    assert [one.limit(0, 0, [5000]) for one in steps] == [256, 512]
