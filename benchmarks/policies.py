"""
What policies are for, in one figure: four overloads, each with its policy and with fcfs.

Simulated with the scheduler that serves; --cost takes a cost model that `simulate --fit` made.

Run: python benchmarks/policies.py docs/images/policies
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes

from pyllama_raw.core.policies.vtc import OUTPUT_COST
from pyllama_raw.core.request import Request
from pyllama_raw.engine.step_log import StepLog
from pyllama_raw.engine.watcher import Watcher
from pyllama_raw.plot import Pictures
from pyllama_raw.plot.style import STYLE, canvas, cdf, look
from pyllama_raw.sim import CostModel, Lengths, Machine, Workload, simulate

MACHINE = Machine(n_slots=8, n_ctx_slot=512)
LOAD = Workload(600, rate=6.0, seed=1)
RATES = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
LIGHT = "client 1"
GROUPS = (4, 16, 64, 256)


class Clients(Watcher):
    """Who sent a request, and how long its prompt is, by request_id; when the light one did."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[str | None, int]] = {}
        self.light: list[float] = []

    def came(self, requests: Iterable[Request], submitted: float) -> None:
        """Remember all that."""
        for request in requests:
            self.of[request.request_id] = request.client, request.n_prompt
            if request.client == LIGHT:
                self.light.append(submitted)


def sjf(ax: Axes, machine: Machine) -> str:
    """E2E in the order of arrival, and the shortest first."""
    medians = {}
    for index, policy in enumerate(("fcfs", "sjf")):
        found = simulate(LOAD, replace(machine, policy=policy))
        medians[policy] = found.row()["e2e p50"]
        cdf(ax, found.e2e_s, index, policy)
    ax.set(title="sjf: most end soon", xlabel="E2E (s)", ylabel="% of requests")
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    return f"median E2E {medians['fcfs']:.3g} s, with sjf {medians['sjf']:.3g} s"


def gaps(machine: Machine) -> tuple[list[float], list[float]]:
    """How much more the heavy client was served while both had requests waiting."""
    load = replace(LOAD, rate=40.0, n_requests=1100, n_clients=2, heavy=10.0)
    clients, log = Clients(), StepLog()
    simulate(load, machine, log=log, watchers=[clients])
    times, served, seen = [], [], set[int]()
    n_started = 0  # of the light client
    for step in log:
        waits = bisect_right(clients.light, step.at_s) > n_started
        if times and not waits:
            break
        gained = 0.0
        works = [(i, 0) for i, _ in step.decodes] + [(i, n) for i, _, n in step.chunks]
        for request_id, n_tokens in works:
            client, n_prompt = clients.of[request_id]
            sign = -1 if client == LIGHT else 1
            if request_id not in seen:
                seen.add(request_id)
                n_started += client == LIGHT
                gained += sign * n_prompt
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
    most = {}
    for index, policy in enumerate(("fcfs", "vtc")):
        times, gap = gaps(replace(machine, policy=policy))
        most[policy] = max(map(abs, gap))
        ax.plot(times, gap, label=policy, **look(index))
    ax.axhline(bound, color="0.5", lw=1, ls=":")
    place = {"ha": "right", "va": "bottom", "transform": ax.get_yaxis_transform()}
    ax.text(1, bound, "the paper's bound", color="0.4", **place)
    ax.set(
        title="vtc: clients are served alike", xlabel="seconds", ylabel="gap of service"
    )
    return f"largest gap {most['fcfs']:.0f}, with vtc {most['vtc']:.0f}; the bound is {bound:.0f}"


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
            found = simulate(load, replace(machine, policy=policy)).row()["cached %"]
            cached.setdefault(policy, []).append(found)
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
        f"{n}: {one:.0f} and {two:.0f} %,"
        for n, one, two in zip(GROUPS, cached["fcfs"], cached["lpm"], strict=True)
    )
    return f"cached by prefixes, fcfs and lpm, {shares[:-1]}"


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the figure, without its ending")
    parser.add_argument("--cost", type=Path, help="a cost model")
    options = parser.parse_args()
    cost = CostModel() if options.cost is None else CostModel.load(options.cost)
    with rc_context(STYLE):
        figure, axes = canvas(2, 2, height=6.6)
        for ax, draw in zip(axes, (sjf, vtc, edf, lpm), strict=True):
            said = draw(ax, replace(MACHINE, cost=cost))
            ax.legend()
            sys.stdout.write(f"{draw.__name__}: {said}\n")
        Pictures({options.out.name: figure}).save(options.out.parent)


if __name__ == "__main__":
    main()
