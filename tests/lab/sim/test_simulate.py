"""The same scheduler as live, on a clock that is a number."""

from array import array
from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random

import numpy as np
import pytest

from pyllama_raw.core.costs import StepCost
from pyllama_raw.core.request import Request
from pyllama_raw.engine.logs import Size, StepLog
from pyllama_raw.engine.watcher import StepRecord
from pyllama_raw.errors import ConfigError, Unsupported
from pyllama_raw.lab.arrivals import Answer
from pyllama_raw.lab.sim import (
    CostModel,
    Lengths,
    Machine,
    SimExecutor,
    VirtualClock,
    Workload,
    fit,
    simulate,
    table,
    until_next,
)

BUSY = Workload(n_requests=300, rate=20, burstiness=0.25, seed=3)
MACHINE = Machine(n_slots=4, n_ctx_slot=512)


def test_a_simulation_depends_on_its_arguments_only():
    """
    The same requests on the same machine give the same figures; another seed does not.
    """
    rows = [simulate(BUSY, MACHINE).row() for _ in range(2)]
    other = simulate(replace(BUSY, seed=4), MACHINE).row()

    assert rows[0] == rows[1] != other


def test_every_request_gets_its_tokens_once():
    """
    All end, with as many tokens as they were drawn to have.
    """
    ends = {}

    def note(request, end):
        assert request.request_id not in ends
        ends[request.request_id] = request.max_tokens, end.n_output

    figures = simulate(BUSY, MACHINE, on_end=note)

    assert sorted(ends) == list(range(300))
    assert all(expected == got for expected, got in ends.values())
    assert figures.n_output == sum(got for _, got in ends.values())


def test_time_is_what_the_steps_cost():
    """
    A step lasts as long as the cost model says, and between requests time is skipped.
    """
    log = StepLog()
    figures = simulate(BUSY, MACHINE, log=log)
    records = list(log)

    assert len(records) == figures.n_steps
    sizes = [record[2:7] for record in records]
    assert [record.seconds for record in records] == pytest.approx(
        [MACHINE.cost.seconds(size) for size in sizes]
    )
    assert all(
        step.at_s + step.seconds <= later.at_s + 1e-9
        for step, later in pairwise(records)
    )
    assert figures.end_s == pytest.approx(records[-1].at_s + records[-1].seconds)


def test_idle_time_is_skipped():
    """
    A machine that is faster than its requests come waits for them, without steps.
    """
    slow = Workload(n_requests=5, rate=0.001, prompt=Lengths(8), output=Lengths(2))

    figures = simulate(slow, MACHINE)

    assert figures.n_steps == 10
    assert figures.end_s > 1000
    assert max(figures.e2e_s) < 1


def test_prefixes_are_shared():
    """
    Prompts of a group are computed once, as far as slots and snapshots hold them.
    """
    grouped = replace(BUSY, n_groups=12, prefix_tokens=200, prompt=Lengths(10))
    machine = replace(MACHINE, n_slots=4)

    without, some = (
        simulate(grouped, replace(machine, cached_tokens=n)).row()["cached %"]
        for n in (0, 4000)
    )

    assert 20 < without < some < 100


def test_deadlines_end_requests():
    """
    Who is not done by its deadline ends then, and counts as late.
    """
    figures = simulate(replace(BUSY, rate=2, deadline_s=Lengths(2, "uniform")), MACHINE)

    assert 5 < figures.row()["late %"] < 95
    assert figures.n_requests == 300
    assert max(figures.e2e_s) < 4.5


PRESSED = Workload(60, rate=20, prompt=Lengths(60), output=Lengths(100), seed=3)
SMALL = Machine(n_slots=8, n_ctx_slot=256, n_cells=400, cached_tokens=4000)


@pytest.mark.parametrize(("loaded_token", "n_restored"), [(1e-5, 20), (1e-2, 1)])
def test_a_swap_is_chosen_by_what_a_restore_takes(loaded_token, n_restored):
    """
    As live: who lost its slot is swapped, until a restore was slower than to compute it again.
    """
    log = StepLog()
    cost = CostModel(loaded_token=loaded_token)
    simulate(PRESSED, replace(SMALL, cost=cost), log=log)

    assert sum(record.n_preempted for record in log) == 20
    assert sum(record.restore_s > 0 for record in log) == n_restored


# -- what policies are for -------------------------------------------------------------

OVERLOAD = Workload(n_requests=400, rate=8, seed=1)


def rows_of(workload, *policies, **options):
    machine = replace(MACHINE, **options)
    return [
        simulate(workload, replace(machine, policy=policy)).row() for policy in policies
    ]


def test_sjf_makes_the_median_wait_short():
    """
    Under overload most requests end sooner than in the order of arrival.
    """
    fcfs, sjf = rows_of(OVERLOAD, "fcfs", "sjf")

    assert sjf["e2e p50"] < fcfs["e2e p50"] / 2


def test_vtc_protects_the_light_client():
    """
    One client sends ten times as much; the other is not made to wait behind it.
    """
    ends = {"fcfs": {}, "vtc": {}}
    for policy, by_client in ends.items():
        figures = simulate(
            replace(OVERLOAD, n_clients=2, heavy=10), replace(MACHINE, policy=policy)
        )
        for client, times in figures.by_client.items():
            by_client[client] = sorted(times)[len(times) // 2]

    assert ends["fcfs"]["client 1"] > ends["fcfs"]["client 0"] / 2
    assert ends["vtc"]["client 1"] < ends["vtc"]["client 0"] / 5


def test_edf_keeps_more_deadlines():
    """
    Near the most that the machine can do, fewer are missed than in the order of arrival.
    """
    load = replace(OVERLOAD, rate=3, deadline_s=Lengths(20, "exponential"))
    fcfs, edf = rows_of(load, "fcfs", "edf")

    assert edf["late %"] < 0.7 * fcfs["late %"]


def test_edf_keeps_more_deadlines_under_overload():
    """
    Where most cannot be kept those that can be are.
    """
    load = replace(OVERLOAD, rate=6, deadline_s=Lengths(20, "exponential"))
    fcfs, edf = rows_of(load, "fcfs", "edf")

    assert edf["late %"] < 0.9 * fcfs["late %"]


def test_lpm_uses_what_is_cached():
    """
    With many groups and few slots more of the prompts is taken from the cache.
    """
    grouped = replace(OVERLOAD, n_groups=40, prefix_tokens=200, prompt=Lengths(10))
    fcfs, lpm = rows_of(grouped, "fcfs", "lpm")

    assert lpm["cached %"] > fcfs["cached %"] + 5


# -- cost models -----------------------------------------------------------------------


def test_a_fit_finds_the_cost_model():
    """
    From the log of a simulation comes the cost model of its machine.
    """
    cost = CostModel(5e-3, 8e-4, 3e-3, 2e-7, 1e-5, 4e-6)
    log = StepLog()
    grouped = replace(BUSY, n_groups=12, prefix_tokens=200)
    simulate(grouped, replace(MACHINE, cost=cost, cached_tokens=3000), log=log)

    result = fit(list(log))

    assert result.r2 == pytest.approx(1)
    assert (result.error, result.total_error) == pytest.approx((0, 0), abs=1e-6)
    assert result.cost.seconds((40, 3, 5000, 0, 0)) == pytest.approx(
        cost.seconds((40, 3, 5000, 0, 0)), rel=1e-4
    )


def test_steps_that_warm_up_are_not_fitted_to():
    """
    However long they took.
    """
    log = StepLog()
    simulate(BUSY, MACHINE, log=log)
    records = list(log)
    slow = [r._replace(seconds=9.0, warms_up=True) for r in records[:50]]

    assert fit([*slow, *records]) == fit(records)


def test_noise_costs_a_fit_some_of_its_share():
    """
    R2 and the error of steps held out tell how noisy the machine was.
    """
    rng, log = Random(0), StepLog()  # noqa: S311
    simulate(BUSY, MACHINE, log=log)
    noisy = [r._replace(seconds=r.seconds * rng.uniform(0.5, 1.5)) for r in log]

    result = fit(noisy)

    assert 0.1 < result.r2 < 0.95
    assert 0.1 < result.error < 0.5
    assert result.total_error < 0.1


def test_a_step_lasts_until_the_next_one():
    """
    What an engine does between two steps counts, but for the time it has nothing to do.
    """
    steps = [StepRecord(at_s, 1.0, 1, 0, 0, 0, 0, n, 0, 1) for at_s, n in TIMES]

    assert [step.seconds for step in until_next(steps)] == [1.5, 1.0, 1.25, 1.0]


TIMES = [(0.0, 1), (1.5, 0), (9.0, 2), (10.25, 1)]  # at_s, n_running


def test_nothing_costs_less_than_nothing():
    """
    A coefficient that would be negative is left out.
    """
    rng = Random(0)  # noqa: S311
    records = []
    for _ in range(100):
        n = rng.randrange(1, 50)
        seconds = 1.0 - 0.01 * n
        records.append(StepRecord(0.0, seconds, n, 0, 0, 0, 0, 1, 0, 1))

    assert fit(records).cost.prefill_token == 0


def test_a_restore_costs_what_was_measured():
    """
    However noisy the steps are that it is a part of.
    """
    rng, log = Random(0), StepLog()  # noqa: S311
    cost = CostModel(loaded_token=2e-5)
    simulate(PRESSED, replace(SMALL, cost=cost), log=log)
    noisy = [r._replace(seconds=r.seconds * rng.uniform(0.5, 1.5)) for r in log]

    assert fit(noisy).cost.loaded_token == pytest.approx(2e-5)


def test_too_few_steps_are_no_log():
    """
    A fit to a handful of steps would say nothing.
    """
    with pytest.raises(ConfigError, match="3 steps are too few: log at least 30"):
        fit([StepRecord(0.0, 1.0, 1, 0, 0, 0, 0, 1, 0, 1)] * 3)


# -- workloads -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("200", Lengths(200)),
        ("uniform:20", Lengths(20, "uniform")),
        ("exponential:7.5", Lengths(7.5, "exponential")),
        ("lognormal:200:0.5", Lengths(200, "lognormal", 0.5)),
    ],
)
def test_lengths_are_read(text, expected):
    """
    A distribution is its name, its mean, and for lognormal a sigma.
    """
    assert Lengths.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["x", "normal:3", "0", "lognormal:5:-1", "uniform:nan"]
)
def test_wrong_lengths_are_refused(text):
    """
    What is no distribution, or has no mean, is told.
    """
    with pytest.raises(ConfigError):
        Lengths.parse(text)


@pytest.mark.parametrize(
    "text", ["50", "uniform:50", "exponential:50", "lognormal:50:1"]
)
def test_lengths_have_their_mean(text):
    """
    Ten thousand draws are close to the mean, and none is below 1.
    """
    rng, lengths = Random(0), Lengths.parse(text)  # noqa: S311
    numbers = [lengths.draw(rng) for _ in range(10_000)]

    assert min(numbers) >= 1
    assert sum(numbers) / len(numbers) == pytest.approx(50, rel=0.05)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workload(0), "Workload.n_requests=0: give at least 1"),
        (lambda: Workload("5"), "Workload.n_requests='5': give a whole number"),
        (lambda: Workload(rate=0), "Workload.rate=0: give at least 0.000001"),
        (lambda: Workload(rate=inf), "Workload.rate=inf: give a finite number"),
        (lambda: Workload(n_clients=0), "Workload.n_clients=0: give at least 1"),
        (lambda: Workload(heavy=-1), "Workload.heavy=-1: give at least 0.000001"),
        (lambda: Workload(prefix_tokens=None), "Workload.prefix_tokens=None: give a"),
        (
            lambda: Workload(deadline_s=3),
            "Workload.deadline_s=3: give an instance of Lengths",
        ),
        (lambda: Lengths("5"), "Lengths.mean='5': give a number"),
        (lambda: Lengths(5, limit=4), "Lengths.mean=5: give at most 4"),
        (lambda: Machine(n_slots="2"), "Machine.n_slots='2': give a whole number"),
        (lambda: Machine(n_ctx_slot=1), "Machine.n_ctx_slot=1: give at least 4"),
        (lambda: Machine(policy=None), "Machine.policy=None: give text"),
        (lambda: Machine(budget_mode="x"), "Machine.budget_mode='x': give 'balanced'"),
        (lambda: CostModel(step=-1), "CostModel.step=-1: give at least 0"),
        (lambda: simulate(BUSY, MACHINE, n_replicas="2"), "n_replicas='2': give a"),
        (lambda: simulate(BUSY, MACHINE, router="x"), "router='x': give 'round_robin'"),
    ],
)
def test_what_is_not_allowed_is_told_with_its_value(make, message):
    """
    One error that names the field, what was given and what is allowed.
    """
    with pytest.raises(ConfigError) as caught:
        make()

    assert str(caught.value).startswith(message)


def test_numbers_of_numpy_are_numbers():
    """
    They come out of loops over arrays.
    """
    workload = Workload(np.int64(20), rate=np.int32(5), burstiness=np.float32(0.5))

    assert simulate(workload, MACHINE).n_requests == 20


def test_the_smallest_machine_serves():
    """
    Least of all that is allowed.
    """
    smallest = Machine(n_slots=1, n_ctx_slot=4, n_batch=1, n_cells=4, token_budget=1)

    assert simulate(replace(BUSY, n_requests=9), smallest).n_requests == 9


def test_requests_come_as_often_as_asked_for():
    """
    Arrivals rise at the rate on average, whatever the burstiness; clients as weighted.
    """
    workload = Workload(2000, rate=5, burstiness=0.25, n_clients=3, heavy=8)
    times, requests = zip(*workload.requests(512), strict=True)

    assert list(times) == sorted(times)
    assert times[-1] == pytest.approx(400, rel=0.1)
    assert sum(r.client == "client 0" for r in requests) == pytest.approx(
        1600, rel=0.05
    )
    assert all(r.n_prompt + r.max_tokens <= 512 for r in requests)


def test_the_table_has_a_line_for_each_policy():
    """
    One heading, one line for each result, and what the columns mean.
    """
    results = [
        simulate(BUSY, replace(MACHINE, policy=name)) for name in ("fcfs", "sjf")
    ]

    lines = table(results)

    assert [line.split()[0] for line in lines] == ["policy", "fcfs", "sjf", "seconds;"]
    assert len({len(line) for line in lines[:3]}) == 1


def test_prompts_that_an_encoder_reads_are_refused_by_name():
    """
    The executor says so before anything is computed; others go on.
    """
    executor = SimExecutor(CostModel(), VirtualClock())
    plain = Request(0, array("i", [5]), 4, sampling=Answer(2, 7))
    read = replace(plain, request_id=1, source=array("i", [5, 6]))

    executor.open(plain)
    with pytest.raises(Unsupported, match="an encoder takes"):
        executor.open(read)

    assert executor.n_steps == 0


def test_what_an_engine_has_learned_is_a_machine():
    """
    The formula of its steps, beyond the knee, where prompts are computed.
    """
    line = StepCost(0.01, 0.002, 0.001, 0, 0.002)
    tiles = StepCost(0.01, 0.002, 0.001, 32, 0.001)
    flat = StepCost(0.01, 0.0, 0.0, 64, 0.001)

    of_line, of_tiles, of_flat = map(CostModel.of, (line, tiles, flat))

    assert of_line.seconds(Size(100, 8, 0, 0, 0)) == pytest.approx(line.seconds(108, 8))
    assert of_tiles.seconds(Size(100, 8, 0, 0, 0)) == pytest.approx(
        tiles.seconds(108, 8)
    )
    assert (of_flat.step, of_flat.prefill_token) == (0.0, 0.001)
