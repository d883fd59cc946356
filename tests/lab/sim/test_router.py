"""Several machines behind a router."""

from dataclasses import replace
from functools import cache

import pytest

from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.sim import Lengths, Machine, Workload, simulate
from pyllama_raw.routing import ROUTERS

MACHINE = Machine(n_slots=4, n_ctx_slot=512)
BUSY = Workload(200, rate=12, burstiness=0.25, seed=3)


@cache
def alone():
    """The summary of a single machine."""
    return simulate(BUSY, MACHINE)


@pytest.mark.parametrize("router", ROUTERS)
def test_all_requests_end_on_some_machine(router):
    """
    Each ends once, with its tokens, sooner than on a single machine.
    """
    ends = []
    three = simulate(
        BUSY, MACHINE, n_replicas=3, router=router, on_end=lambda r, _: ends.append(r)
    )

    assert sorted(request.request_id for request in ends) == list(range(200))
    assert three.n_output == alone().n_output
    assert three.row()["e2e p99"] < alone().row()["e2e p99"] / 2


def test_least_load_beats_round_robin_for_unequal_requests():
    """
    Who gets a long request gets no others meanwhile.
    """
    unequal = replace(BUSY, prompt=Lengths(100, "lognormal", 2.0, limit=400))
    turns, least = (
        simulate(unequal, MACHINE, n_replicas=4, router=router).row()
        for router in ("round_robin", "least_load")
    )

    assert least["ttft p99"] < turns["ttft p99"]


def test_prefix_affinity_computes_prefixes_on_fewer_machines():
    """
    More of the prompts is cached, and no machine gets all requests.
    """
    grouped = replace(BUSY, rate=6, n_groups=16, prefix_tokens=256, prompt=Lengths(10))
    turns, affine = (
        simulate(grouped, MACHINE, n_replicas=4, router=router).row()
        for router in ("round_robin", "prefix_affinity")
    )

    assert affine["cached %"] > turns["cached %"] + 10
    assert affine["e2e p50"] < turns["e2e p50"]


def test_under_pressure_affinity_gives_way():
    """
    All requests have one prefix; the machine that has it does not get all of them.
    """
    equal = replace(BUSY, rate=50, prefix_tokens=64)
    turns, affine = (
        simulate(equal, MACHINE, n_replicas=4, router=router).row()
        for router in ("round_robin", "prefix_affinity")
    )

    assert affine["e2e p99"] < 1.3 * turns["e2e p99"]


@pytest.mark.parametrize(
    "fields", [{"n_replicas": 0}, {"n_replicas": 2, "router": "random"}]
)
def test_a_router_has_somebody_to_choose(fields):
    """
    Without machines, or by a rule that nobody knows, nothing is simulated.
    """
    with pytest.raises(ConfigError):
        simulate(BUSY, MACHINE, **fields)
