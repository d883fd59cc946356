"""What a step takes, as learned from steps: bins, the fit to them, and its use."""

from dataclasses import astuple
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.core.costs import RING, CostHistory, StepCost

SIZES = (1, 2, 4, 6, 8, 16, 24, 32, 48, 64, 100, 128, 200, 256, 512)


def history(seconds, n_steps=400, noise=lambda rng: 1.0) -> CostHistory:
    """Steps of all sizes, each with eight outputs at most, which take *seconds*(rows, outputs)."""
    rng, costs = Random(1), CostHistory()  # noqa: S311
    for _ in range(n_steps):
        n_rows = rng.choice(SIZES)
        n_outputs = n_rows if n_rows <= 8 else rng.randrange(9)
        costs.observe(n_rows, n_outputs, seconds(n_rows, n_outputs) * noise(rng))
    return costs


def errors(costs: CostHistory, seconds) -> list[float]:
    """How far the formula is off, of steps of all sizes."""
    return [
        abs(costs.cost.seconds(n, min(n, 4)) / seconds(n, min(n, 4)) - 1) for n in SIZES
    ]


CPU = StepCost(0.018, 0.001, 0.0005, 0, 0.001)
KERNELS = StepCost(0.005, 0.004, 0.0, 32, 0.002)  # tiles pay from 32 rows on
GPU = StepCost(0.004, 0.0, 0.0, 64, 0.0001)  # flat until its units are busy


@pytest.mark.parametrize("machine", [CPU, KERNELS, GPU])
def test_a_machine_is_learned_from_its_steps(machine):
    """
    The fixed time, that of a row and of an output, and the knee.
    """
    costs = history(machine.seconds)

    assert astuple(costs.cost) == pytest.approx(astuple(machine), rel=0.01, abs=1e-6)


def busy(rng: Random) -> float:
    """Each tenth step was disturbed."""
    return rng.lognormvariate(0, 0.1) * (20 if rng.random() < 0.1 else 1)


@pytest.mark.parametrize("machine", [CPU, KERNELS, GPU])
def test_disturbed_steps_change_little(machine):
    """
    One step in ten took 20 times as long, and all vary by a tenth.
    """
    costs = history(machine.seconds, noise=busy)

    assert max(errors(costs, machine.seconds)) < 0.2


def test_equal_histories_give_equal_formulas():
    """
    Whoever replays a history plans what was planned.
    """
    first, second = (history(CPU.seconds, noise=busy) for _ in range(2))

    assert first.cost == second.cost


def test_one_size_says_nothing_of_the_fixed_time():
    """
    A step of twice the rows is believed to take twice as long.
    """
    costs = CostHistory()

    costs.observe(64, 1, 0.25)

    assert costs.cost.seconds(128, 1) == pytest.approx(0.5, rel=1e-4)
    assert costs.cost.n_rows(0.5, 1) == pytest.approx(128, rel=1e-4)


def test_few_steps_do_not_price_logits():
    """
    A step that was disturbed and had three rows with logits: they are not what was dear.
    """
    costs = CostHistory()

    costs.observe(64, 0, 0.100)
    costs.observe(256, 3, 0.500)
    costs.observe(64, 3, 0.110)

    assert costs.cost.output_s <= costs.cost.row_s
    assert costs.cost.seconds(8, 8) <= 0.03


def test_what_is_no_step_teaches_nothing():
    """
    Steps without rows or without time are ignored.
    """
    costs = CostHistory()

    costs.observe(0, 0, 1.0)
    costs.observe(8, 8, 0.0)

    assert costs.cost is None


def test_the_newest_steps_count():
    """
    A machine that gets twice as slow is known to be so after some steps of each size.
    """
    slower, costs = StepCost(0.036, 0.002, 0.001, 0, 0.002), history(CPU.seconds)
    for _ in range(RING):
        for n_rows in SIZES:
            n_outputs = n_rows if n_rows <= 8 else 4
            costs.observe(n_rows, n_outputs, slower.seconds(n_rows, n_outputs))

    assert max(errors(costs, slower.seconds)) < 0.05


@pytest.mark.parametrize(
    "machine", [CPU, KERNELS, StepCost(0.01, 0.002, 0.001, 8, 0.003)]
)
@pytest.mark.parametrize("n_rows", [1, 8, 31, 32, 33, 500])
def test_rows_are_the_inverse_of_seconds(machine, n_rows):
    """
    What n_rows take has room for as many rows.
    """
    seconds = machine.seconds(n_rows, 3)

    assert machine.n_rows(seconds, 3) == pytest.approx(n_rows)


def test_rows_have_their_ends():
    """
    None fits where the fixed time is more, and all where a row costs nothing.
    """
    assert CPU.n_rows(0.01) == 0.0
    assert StepCost(0.01, 0.0, 0.0, 0, 0.0).n_rows(0.02) == inf


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**31),
            st.integers(0, 300),
            st.floats(0, 1e300, allow_nan=False),
        ),
        max_size=60,
    )
)
def test_no_history_gives_what_is_no_formula(steps):
    """
    Whatever clocks say, costs are no less than nothing and more rows take no less.
    """
    costs = CostHistory()
    for n_rows, n_outputs, seconds in steps:
        costs.observe(n_rows, n_outputs, seconds)

    if costs.cost is not None:
        assert min(astuple(costs.cost)) >= 0
        assert costs.cost.seconds(1) <= costs.cost.seconds(2) <= costs.cost.seconds(512)
        assert 0 <= costs.cost.n_rows(1.0) <= inf


def test_memory_has_a_bound():
    """
    However many steps there were, a bin has the latest ones.
    """
    costs = history(CPU.seconds, n_steps=3000)

    assert max(len(steps) for steps in costs._bins.values()) == RING
    assert len(costs._bins) <= 2 * 2 * 32
