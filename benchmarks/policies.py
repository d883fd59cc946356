"""
What policies are for, in one figure: four overloads, each with its policy and with fcfs.

Simulated with the scheduler that serves; --cost takes a cost model that `simulate --fit` made.
There policies know how long outputs will be; last it says what they do with guesses instead.
--live MODEL says how sjf and vtc do on a real model.

Run: python benchmarks/policies.py docs/images/policies
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median

import anyio
from anyio import create_task_group
from load.client import fixed_length
from load.measure import NO_DRAFTS
from load.workloads import generator, token_prompts
from matplotlib import rc_context
from matplotlib.axes import Axes

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    LogConfig,
    SchedulerConfig,
)
from pyllama_raw.core.policies import OUTPUT_COST
from pyllama_raw.engine.logs import RequestLog, RequestRecord, StepLog
from pyllama_raw.engine.watcher import StepRecord
from pyllama_raw.lab.plot import STYLE, Pictures, canvas, cdf, look
from pyllama_raw.lab.sim import CostModel, Guessed, Lengths, Machine, Workload, simulate

MACHINE = Machine(n_slots=8, n_ctx_slot=512)
LOAD = Workload(600, rate=6.0, seed=1)
RATES = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
N_LIVE, N_CTX = 88, 1024
LIGHT = "client 1"
GROUPS = (4, 16, 64, 256)
SIGMAS = (0.5, 1.0, 1.5, None)  # of guesses; None: nobody guesses


def sjf(ax: Axes, machine: Machine) -> str:
    """E2E in the order of arrival, and the shortest first."""
    medians = {}
    for index, policy in enumerate(("fcfs", "sjf")):
        figures = simulate(LOAD, replace(machine, policy=policy))
        medians[policy] = figures.row()["e2e p50"]
        cdf(ax, figures.e2e_s, index, policy)
    ax.set(title="sjf: most end soon", xlabel="E2E (s)", ylabel="% of requests")
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    return f"median E2E {medians['fcfs']:.3g} s, with sjf {medians['sjf']:.3g} s"


def gaps(
    steps: Iterable[StepRecord], requests: Iterable[RequestRecord]
) -> tuple[list[float], list[float]]:
    """How much more others were served than LIGHT, while that had requests waiting."""
    by_id = {request.request_id: request for request in requests}
    came = sorted(r.submitted_s for r in by_id.values() if r.client == LIGHT)
    times, served, ids = [], [], set[int]()
    n_started = 0  # of the light client
    for step in steps:
        waits = bisect_right(came, step.at_s) > n_started
        if times and not waits:
            break
        gained = 0.0
        works = [(i, 0) for i, _ in step.decodes] + [(i, n) for i, _, n in step.chunks]
        for request_id, n_tokens in works:
            request = by_id[request_id]
            sign = -1 if request.client == LIGHT else 1
            if request_id not in ids:
                ids.add(request_id)
                n_started += request.client == LIGHT
                gained += sign * request.n_prompt
            gained += sign * OUTPUT_COST * (n_tokens == 0)
        if waits:
            times.append(step.at_s)
            served.append(gained)
    return times, list(accumulate(served))


def vtc(ax: Axes, machine: Machine) -> str:
    """The gap of service between two clients, one of which sends ten times as much."""
    bound = 2 * max(
        machine.n_ctx_slot, OUTPUT_COST * machine.n_slots * machine.n_ctx_slot
    )
    load = replace(LOAD, rate=40.0, n_requests=1100, n_clients=2, heavy=10.0)
    largest = {}
    for index, policy in enumerate(("fcfs", "vtc")):
        steps, requests = StepLog(), RequestLog(load.n_requests)
        simulate(load, replace(machine, policy=policy), log=steps, watchers=[requests])
        times, gap = gaps(steps, requests)
        largest[policy] = max(map(abs, gap))
        ax.plot(times, gap, label=policy, **look(index))
    ax.axhline(bound, color="0.5", lw=1, ls=":")
    place = {"ha": "right", "va": "bottom", "transform": ax.get_yaxis_transform()}
    ax.text(1, bound, "the paper's bound", color="0.4", **place)
    ax.set(
        title="vtc: clients are served alike", xlabel="seconds", ylabel="gap of service"
    )
    return f"largest gap {largest['fcfs']:.0f}, with vtc {largest['vtc']:.0f}; the bound is {bound:.0f}"


def edf(ax: Axes, machine: Machine) -> str:
    """Requests a second that ended by their deadline, against those that came."""
    late = {}
    for index, policy in enumerate(("fcfs", "edf")):
        good = []
        for rate in RATES:
            load = replace(LOAD, rate=rate, deadline_s=Lengths(20, "exponential"))
            late[policy] = simulate(load, replace(machine, policy=policy)).row()[
                "late %"
            ]
            good.append(rate * (1 - late[policy] / 100))
        ax.plot(RATES, good, marker="os"[index], label=policy, **look(index))
    ax.set(
        title="edf: more in time", xlabel="requests a second", ylabel="of them in time"
    )
    ax.set_ylim(bottom=0)
    return (
        f"late at {RATES[-1]:g}/s: {late['fcfs']:.1f} %, with edf {late['edf']:.1f} %"
    )


def lpm(ax: Axes, machine: Machine) -> str:
    """The share of prompt tokens that were not computed, by the number of prefixes."""
    cached: dict[str, list[float]] = {}
    for index, policy in enumerate(("fcfs", "lpm")):
        for n_groups in GROUPS:
            load = replace(
                LOAD, n_groups=n_groups, prefix_tokens=200, prompt=Lengths(20)
            )
            hit_rate = simulate(load, replace(machine, policy=policy)).row()["cached %"]
            cached.setdefault(policy, []).append(hit_rate)
        ax.plot(GROUPS, cached[policy], marker="os"[index], label=policy, **look(index))
    ax.set(
        title="lpm: more is cached",
        xlabel="prefixes",
        ylabel="% of prompt tokens cached",
    )
    ax.set_xscale("log", base=2)
    ax.set_xticks(GROUPS, map(str, GROUPS))
    ax.set_ylim(0, 100)
    shares = " ".join(
        f"{n}: {first:.0f} and {two:.0f} %,"
        for n, first, two in zip(GROUPS, cached["fcfs"], cached["lpm"], strict=True)
    )
    return f"cached by prefixes, fcfs and lpm, {shares[:-1]}"


def say_guesses(machine: Machine) -> None:
    """What policies do that know a guess of each output, and not the output."""
    late = replace(LOAD, rate=RATES[-1], deadline_s=Lengths(20, "exponential"))
    cases = (
        ("sjf", LOAD, "e2e p50"),
        ("hrrn", LOAD, "e2e p50"),
        ("edf", late, "late %"),
    )
    for policy, load, figure in cases:
        loads = [load, *(Guessed(load, sigma) for sigma in SIGMAS)]
        results = [simulate(guess, replace(machine, policy=policy)) for guess in loads]
        words = ", ".join(f"{guess.row()[figure]:.3g}" for guess in results)
        sys.stdout.write(
            f"{policy}: {figure}, known, then guessed by {SIGMAS}: {words}\n"
        )


async def live(model: Path, policy: str) -> tuple[float, float, float]:
    """Of a real model: median E2E, the largest gap of service, and its bound."""
    rng = generator("policies")
    lengths = [rng.randrange(16, 100) for _ in range(N_LIVE)]
    outputs = [min(int(rng.expovariate(1 / 24)) + 4, 96) for _ in lengths]
    prompts = token_prompts(model, 1, lengths)
    config = EngineConfig(
        speculation=NO_DRAFTS,
        context=ContextConfig(n_ctx=N_CTX),
        scheduler=SchedulerConfig(n_slots=4, policy=policy),
        log=LogConfig(max_steps=10**5, max_requests=N_LIVE),
    )
    async with AsyncEngine.open(model, config) as engine, create_task_group() as group:
        for index, (prompt, n) in enumerate(zip(prompts, outputs, strict=True)):
            client = LIGHT if index % 11 == 10 else "client 0"
            group.start_soon(
                partial(engine.complete, prompt, fixed_length(n), client=client)
            )
    requests = engine.request_log()
    _, gap = gaps(engine.step_log(), requests)
    e2e = median(record.finished_s - record.submitted_s for record in requests)
    return e2e, max(map(abs, gap), default=0.0), 2 * OUTPUT_COST * N_CTX


def say_live(model: Path) -> None:
    """The same on a real model, all requests at once."""
    for policy in ("fcfs", "sjf", "vtc", "fcfs"):
        e2e, gap, bound = anyio.run(live, model, policy)
        words = f"median E2E {e2e:.3g} s, largest gap {gap:.0f}, bound {bound:.0f}"
        sys.stdout.write(f"live, {policy}: {words}\n")


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the figure, without its ending")
    parser.add_argument("--cost", type=Path, help="a cost model")
    parser.add_argument("--live", type=Path, metavar="MODEL", help="run this, too")
    options = parser.parse_args()
    cost = CostModel() if options.cost is None else CostModel.load(options.cost)
    with rc_context(STYLE):
        figure, axes = canvas(2, 2, height=6.6)
        for ax, draw in zip(axes, (sjf, vtc, edf, lpm), strict=True):
            words = draw(ax, replace(MACHINE, cost=cost))
            ax.legend()
            sys.stdout.write(f"{draw.__name__}: {words}\n")
        Pictures({options.out.name: figure}).save(options.out.parent)
    say_guesses(replace(MACHINE, cost=cost))
    if options.live is not None:
        say_live(options.live)


if __name__ == "__main__":
    main()
