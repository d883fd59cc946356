"""A workload of pyllama_raw.lab in interleaved rounds, where nothing may go wrong."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

from pyllama_raw.lab.calls import Result
from pyllama_raw.lab.targets import Opener, Plan, Point
from pyllama_raw.lab.workloads import WORKLOADS, generator, writer_for


async def results(
    workload_name: str,
    openers: Mapping[str, Opener],
    point: Point,
    options: Namespace,
    **shape: int,
) -> dict[str, list[Result]]:
    """
    Those of each target, by round; a call that fails ends the script.

    Args:
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
        async for result in plan.results():
            if result["failed"]:
                raise RuntimeError(f"failed calls: {result['errors']}")
            runs.setdefault(result["target"], []).append(result)
    return runs
