"""The search by itself: costs are made up, nothing is measured."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.errors import ContextFailed
from pyllama_raw.lab.tune import Knob, Space, Work, descend, knobs, settings_of
from pyllama_raw.options.config import ContextConfig
from pyllama_raw.options.profile import Measured, Settings


@given(st.lists(st.lists(st.floats(0.5, 2), min_size=1, max_size=4), max_size=4))
def test_independent_knobs_are_each_turned_to_their_best(factors):
    """
    Within the gain that counts, a knob at a time finds what the whole grid holds.
    """

    def cost(point):
        return math.prod(row[i] for row, i in zip(factors, point, strict=True))

    best = descend([len(row) for row in factors], cost)

    grid_best = min(map(cost, product(*(range(len(row)) for row in factors))))
    assert cost(best) * 0.99 ** len(factors) <= grid_best


def test_a_gain_that_depends_on_a_later_knob_is_found():
    """
    The first knob pays only after the second was turned: that is what passes are for.
    """
    costs = {(0, 0): 10.0, (1, 0): 11.0, (0, 1): 9.0, (1, 1): 5.0}

    assert descend([2, 2], costs.__getitem__) == (1, 1)


def test_a_search_may_end_between_two_knobs():
    """
    What was found before stands; later knobs keep their defaults.
    """
    answers = iter([True, False])

    best = descend([2, 2], lambda point: 10 - sum(point), lambda: next(answers))

    assert best == (1, 0)


def test_noise_does_not_turn_a_knob():
    """
    Less than a hundredth is no reason to leave the default.
    """
    costs = (10, 9.95, 9.91)

    assert descend([3], lambda point: costs[point[0]]) == (0,)


def test_a_default_that_was_disturbed_is_measured_again():
    """
    Its knob is turned only if the other choice still gains then.
    """
    times = {(0,): [20.0, 10.0], (1,): [11.0, 11.0]}

    assert descend([2], lambda point: times[point].pop(0)) == (0,)


def test_what_does_not_go_is_never_chosen():
    """
    An infinite cost is worse than every other one.
    """
    assert descend([2, 2], lambda p: math.inf if p[0] else 2.0 - p[1]) == (0, 1)


@pytest.mark.parametrize(
    ("n_cpus", "n_threads"), [(1, 1), (2, 1), (2, 2), (8, 4), (64, 64)]
)
def test_every_choice_is_an_option(n_cpus, n_threads):
    """
    Each one alone is valid, or names threads that the default has already.
    """
    table = knobs(n_cpus, n_threads)

    for place, knob in enumerate(table):
        for choice in range(1, len(knob.choices)):
            point = tuple(choice * (i == place) for i in range(len(table)))
            assert settings_of(table, point) or knob.name == "threads for prompts"


def fitting(table):
    """Points with choices that fit each other."""
    points = product(*(range(len(knob.choices)) for knob in table))
    return [point for point in points if settings_of(table, point) is not None]


def test_choices_that_exclude_each_other_are_no_point():
    """
    A quantised V cache needs flash attention.
    """
    table = (
        Knob("flash", ({}, {"context": {"flash_attn": "off"}})),
        Knob("type", ({}, {"context": {"type_v": "q8_0"}})),
    )

    assert fitting(table) == [(0, 0), (0, 1), (1, 0)]


def test_threads_beyond_cores_are_tried():
    """
    The default is one thread a core; all logical CPUs are a choice, also for prompts.
    """
    table = {knob.name: knob.choices for knob in knobs(8, 4)}

    assert table["threads"] == (
        {},
        *({"context": {"n_threads": n}} for n in (8, 7, 2)),
    )
    assert table["threads for prompts"] == ({}, {"context": {"n_threads_batch": 8}})


def test_as_many_threads_for_prompts_as_for_streams_are_no_choice():
    """
    That is what there is without the option, whether or not somebody named a number.
    """
    n_threads = ContextConfig().threads
    table = (
        Knob("threads", ({}, {"context": {"n_threads": n_threads + 1}})),
        Knob("prompts", ({}, {"context": {"n_threads_batch": n_threads}})),
    )
    same = (Knob("both", ({"context": {"n_threads": 3, "n_threads_batch": 3}},)),)

    assert fitting(table) == [(0, 0), (1, 0), (1, 1)]
    assert fitting(same) == []


SLOW, FAST = (Measured(prefill_tok_per_s=x, decode_tok_per_s=x) for x in (100, 200))
BUDGETS = Knob(
    "budget", ({}, *({"scheduler": {"token_budget": n}} for n in (30, 60, 90)))
)


def test_of_several_times_the_fastest_counts():
    """
    A neighbour can only slow things down.
    """
    trials, speeds = [], [SLOW, FAST, SLOW]

    def speed(settings):
        trials.append(settings)
        return speeds.pop(0)

    space = Space((), Work(n_slots=1, n_prompt=100, n_output=100), speed)

    assert [space.cost(()) for _ in range(3)] == [2, 1, 1]
    assert trials == [Settings()] * 3


def test_a_budget_that_stalls_streams_too_long_does_not_go():
    """
    A step may take max_step_s at the speed that was measured, and no longer.
    """
    space = Space((BUDGETS,), Work(max_step_s=0.3), lambda _: FAST)

    goes = [space.cost((choice,)) < math.inf for choice in range(4)]

    assert goes == [True, True, True, False]


def test_settings_that_fail_cost_infinitely_but_the_default_says_why():
    """
    measure() raises, cost() does not.
    """

    def fail(_):
        raise ContextFailed("llama_init_from_model", None, "no")

    space = Space((), Work(), fail)

    assert space.cost(space.default) == math.inf
    with pytest.raises(ContextFailed):
        space.measure(space.default)
