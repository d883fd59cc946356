"""The tokens of a step: what was asked of gaps, and what a small step costs here."""

import pytest

from pyllama_raw.core.costs import (
    GOAL_S,
    GRAIN,
    IDLE_STRETCH,
    LOSS,
    STRETCH,
    CostHistory,
    StepBudget,
    StepCost,
)

N_SLOTS = 8
SMALL = StepCost(0.015, 0.0009, 0.0003, 0, 0.0009)  # much of a step is its fixed time
SLOW = StepCost(0.3, 0.05, 0.01, 0, 0.05)  # no step is as short as the goal
KNEE = StepCost(0.006, 0.005, 0.0, 32, 0.0025)  # few rows make a poor product
FLAT = StepCost(0.004, 0.0, 0.0, 64, 0.0000625)  # rows are free below 64
MACHINES = [SMALL, SLOW, KNEE, FLAT]


def budget(cost, target_s=None, max_tokens=2048) -> StepBudget:
    costs = CostHistory()
    costs.cost, costs.largest = cost, max_tokens
    return StepBudget(None, target_s, max_tokens, costs)


def pace(cost, n_tokens, n_streams) -> float:
    """
    Prompt tokens a second of steps of *n_tokens* beside *n_streams* of eight.

    What streams take is their share of a step in which all eight decode.
    """
    worth_s = cost.seconds(N_SLOTS, N_SLOTS) * n_streams / N_SLOTS
    return (n_tokens - n_streams) / (cost.seconds(n_tokens, n_streams) - worth_s)


@pytest.mark.parametrize("n_streams", range(8))
@pytest.mark.parametrize("cost", MACHINES)
def test_a_step_loses_little_or_is_as_long_as_it_may_be(cost, n_streams):
    """
    It holds what the goal allows, and more where that would slow prompts; but streams never
    wait four times as long as they are to, or as they would alone.
    """
    steps = budget(cost, max_tokens=8192)

    n_tokens = steps.limit(n_streams, n_streams, N_SLOTS)

    factor = 1 if n_streams else 4
    alone_s = cost.seconds(max(n_streams, 1), max(n_streams, 1))
    stretch = STRETCH if n_streams else IDLE_STRETCH
    most_s = stretch * factor * max(GOAL_S, alone_s)
    n_goal = cost.n_rows(factor * GOAL_S, n_streams)
    # A grain more or less decides nothing.
    n_next = n_tokens + GRAIN
    larger = range(max(int(n_goal), n_streams) + GRAIN, 100_000, GRAIN)
    best = max(pace(cost, n, n_streams) for n in larger)
    assert n_next > n_goal
    assert cost.seconds(n_tokens, n_streams) <= most_s
    assert (
        pace(cost, n_next, n_streams) >= (1 - LOSS) * best
        or cost.seconds(n_next, n_streams) > most_s
    )


@pytest.mark.parametrize("cost", [SMALL, FLAT])
def test_gaps_are_short_where_that_costs_nothing(cost):
    """
    A prompt beside seven streams leaves its step near the goal: most of it is paid for anyway.
    """
    n_tokens = budget(cost).limit(7, 7, N_SLOTS)

    assert cost.seconds(n_tokens, 7) <= 1.5 * GOAL_S


@pytest.mark.parametrize("target_s", [0.05, 0.2])
@pytest.mark.parametrize("cost", [SMALL, KNEE, FLAT])
def test_a_target_of_the_user_holds(cost, target_s):
    """
    Whatever it costs, a step takes no longer, but for 16 tokens, which each step may have.
    """
    n_tokens = budget(cost, target_s).limit(4, 4, N_SLOTS)

    assert n_tokens == GRAIN or cost.seconds(n_tokens, 4) <= target_s
    assert cost.seconds(n_tokens + 1.5 * GRAIN, 4) >= target_s or n_tokens == 2048


def test_rows_that_cost_nothing_fill_the_batch():
    """
    A formula without a price of rows, as of a step that says nothing of them.
    """
    assert (
        budget(StepCost(0.01, 0.0, 0.0, 0, 0.0), max_tokens=500).limit(1, 1, 2) == 496
    )


def test_streams_of_several_lots_share_the_target():
    """
    A stream waits for a step of each lot, so each takes its part.
    """
    steps = budget(SMALL, 0.2)

    whole, half = (steps.limit(1, 1, 2, n_turns=n) for n in (1, 2))

    assert SMALL.seconds(whole, 1) <= 0.2
    assert SMALL.seconds(half, 1) <= 0.1


def test_captures_take_their_part_of_a_step():
    """
    What they spend is no time for prompts; 16 tokens go on in any case.
    """
    steps = budget(SMALL, 0.1)

    assert steps.limit(1, 1, 2, spent_s=0.05) < steps.limit(1, 1, 2)
    assert steps.limit(1, 1, 2, spent_s=1.0) == GRAIN


def test_steps_grow_step_by_step():
    """
    What small steps say of large ones is a guess, and a wrong one would stall all streams.
    """
    steps, sizes = budget(StepCost(0.01, 0.0, 0.0, 0, 0.0)), []
    for largest in (8, 64, 256, 1024):
        steps._costs.largest = largest
        sizes.append(steps.limit(1, 1, 2))

    assert sizes == [64, 256, 1024, 2048]


def test_nothing_is_known_before_the_first_step():
    """
    It has 64 tokens, or what the batch holds.
    """
    steps = [StepBudget(None, None, n, CostHistory()) for n in (2048, 8)]

    assert [one.limit(1, 1, 2) for one in steps] == [64, 8]
