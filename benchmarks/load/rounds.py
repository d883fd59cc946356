"""A workload of pyllama_raw.lab in interleaved rounds, where nothing may go wrong."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from math import inf

import anyio

from pyllama_raw.lab.calls import Result
from pyllama_raw.lab.targets import Opener, Plan, Point
from pyllama_raw.lab.workloads import WORKLOADS, generator, writer_for

from .measure import say


async def results(
    workload_name: str,
    openers: Mapping[str, Opener],
    point: Point,
    options: Namespace,
    *,
    limit_s: float = inf,
    **shape: int,
) -> dict[str, list[Result]]:
    """
    Those of each target, by round; a call that fails ends the script.

    Args:
        limit_s: of all rounds; the one that it breaks off does not count.
        shape: what differs from the workload's own, beside the number of requests.
    """
    workload = WORKLOADS[workload_name]
    sized = workload.shape.changed({"requests": options.requests, **shape})
    runs: dict[str, list[Result]] = {}
    with writer_for(options.model) as writer:
        plan = Plan(
            openers,
            [point],
            lambda seed: workload.calls(sized, writer, generator(seed)),
            rounds=options.rounds,
        )
        with anyio.move_on_after(limit_s):
            async for result in plan.results():
                if result["failed"]:
                    raise RuntimeError(f"failed calls: {result['errors']}")
                runs.setdefault(result["target"], []).append(result)
                say(f"round {result['round'] + 1}, {result['target']}: measured")
    n_rounds = min(len(runs.get(name, ())) for name in openers)
    if not n_rounds:
        raise RuntimeError(f"no round has ended within {limit_s:g} s")
    return {name: theirs[:n_rounds] for name, theirs in runs.items()}
