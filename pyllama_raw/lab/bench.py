"""`bench`: put load on targets as flags say, show what came of it, compare two results."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from pyllama_raw.cli import running
from pyllama_raw.cli.options import engine_config, given, named_model
from pyllama_raw.cli.running import output
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab import arrivals, workloads
from pyllama_raw.lab.arguments import SHAPE
from pyllama_raw.lab.calls import OPTIONS, Call, Result, limits_of, told_apart
from pyllama_raw.lab.report import (
    CAPTION,
    changes,
    differing,
    doubts,
    failures,
    headline,
    most_busy,
    point_of,
    read_results,
    rows,
    table,
)
from pyllama_raw.lab.targets import MakeCalls, Opener, Plan, Point, machine, opener
from pyllama_raw.lab.workloads import WORKLOADS, Writer, generator, writer_for
from pyllama_raw.options.config import EngineConfig
from pyllama_raw.options.models import resolve_model


def run(options: Namespace) -> int:
    """`bench run`; status 1 if a call failed."""
    model, config = resolve_model(named_model(options)), bench_config(options)
    specs = options.targets or ["engine"]
    openers = {spec: opener(spec, model, config) for spec in specs}
    return measure(options, model, openers)


def measure(options: Namespace, model: Path, openers: Mapping[str, Opener]) -> int:
    """Run the workload on *openers*, write and show the results."""
    points = points_of(options)
    limits = limits_of(options.goodput or ())
    results: list[Result] = []
    with writer_for(model, as_text=options.text) as writer:
        make_calls = calls_of(options, writer)
        plan = Plan(
            openers,
            points,
            make_calls,
            rounds=options.rounds,
            warm_up=options.warm_up,
            seed=options.seed,
            limits=limits,
        )
        calls = make_calls("a mistake shows before a model is loaded or a file written")
        _tell_unsent(calls, openers)
        about = _about(options, model)
        with output(options.out) as out:
            running.run(partial(_collect, plan, about, results, out))
    _show(results, wide=options.wide)
    return 1 if any(result["failed"] for result in results) else 0


def _tell_unsent(calls: Iterable[Call], targets: Iterable[str]) -> None:
    """Say which options of *calls* only our engine takes."""
    options = {name for call in calls for name in call.options}
    names = ", ".join(name for name in OPTIONS if name in options)
    servers = ", ".join(target for target in targets if target != "engine")
    if names and servers:
        sys.stderr.write(f"{servers}: requests have {names}, which no server is sent\n")


async def _collect(
    plan: Plan, about: Result, results: list[Result], out: IO[str] | None
) -> None:
    total = plan.rounds * len(plan.openers) * len(plan.points)
    async for result in plan.results():
        results.append(about | result)
        if out is not None:
            out.write(json.dumps(results[-1]) + "\n")
            out.flush()  # a run that is interrupted keeps what it has
        sys.stderr.write(
            f"{len(results)}/{total} {result['target']}, {point_of(result)}: "
            f"{result['output_throughput']:.1f} output tokens/s, "
            f"{result['failed']} failed\n"
        )


def _about(options: Namespace, model: Path) -> Result:
    """Conditions that are written into a result."""
    hidden = ("parser", "out", "model", "model_argument", "wide")
    # A function has another address in each process, so equal runs would be told apart by it.
    values = {
        name: value
        for name, value in vars(options).items()
        if name not in hidden and not callable(value)
    }
    facts = machine()
    return {
        "date": facts["date"],
        "backend": "pyllama_raw bench",
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "model_id": model.name,
        "workload": options.workload,
        "machine": facts,
        "options": json.loads(json.dumps(values, default=str)),
    }


def report(options: Namespace) -> int:
    """`bench report`: what `bench run` shows, from its files."""
    results = [result for path in options.results for result in read_results(path)]
    _show(results, wide=options.wide)
    return 0


def _show(runs: list[Result], *, wide: bool) -> None:
    results = told_apart(runs)
    lines = headline(results)
    lines += ["", *table(rows(results, wide=wide)), CAPTION]
    lines += failures(results)
    busiest = most_busy(results)
    if busiest is not None:
        lines.append(
            f"NO PROOF: other processes used up to {busiest:.2f} CPUs; "
            "run it on a quiet machine"
        )
    sys.stdout.write("\n".join(lines) + "\n")


def compare(options: Namespace) -> int:
    """`bench compare`; status 1 if something got worse, 2 if nothing is proven."""
    before, after = read_results(options.before), read_results(options.after)
    lines_of_changes = changes(before, after, options.threshold / 100)
    no_proof = doubts(before, after)
    lines = [f"differs: {line}" for line in differing(before[0], after[0])]
    lines += table(lines_of_changes)
    if not lines_of_changes:
        lines.append("no target was sent calls in the same way in both files")
    lines += [f"NO PROOF: {doubt}" for doubt in no_proof]
    sys.stdout.write("\n".join(lines) + "\n")
    if no_proof or not lines_of_changes:
        return 2
    return 1 if any(change["verdict"] == "worse" for change in lines_of_changes) else 0


def bench_config(options: Namespace) -> EngineConfig:
    """The engine as flags say; under memory pressure half of the cells it needs."""
    if options.workload == "memory-pressure" and options.n_ctx is None:
        shape = WORKLOADS[options.workload].shape.changed(sizes_of(options))
        n_slots = options.n_slots or EngineConfig().scheduler.n_slots
        n_tokens = shape.prompt_tokens + shape.output_tokens
        options.n_ctx = max(n_slots * n_tokens // 2, n_tokens + 1)
    return engine_config(options)


def points_of(options: Namespace) -> list[Point]:
    """
    Raises:
        ConfigError: --clients and --rate together, or --burstiness without a rate.
    """
    lengths = options.prompt_tokens or ()
    points = _sendings(options)
    if len(lengths) < 2:
        return points
    return [replace(point, prompt_tokens=n) for n in lengths for point in points]


def _sendings(options: Namespace) -> list[Point]:
    """The ways that calls are sent."""
    usual = WORKLOADS.get(options.workload)  # None: a trace, which has its own times
    clients, rates, burstiness = options.clients, options.rate, options.burstiness
    if clients and rates:
        raise ConfigError("give --clients (closed loop) or --rate (open), not both")
    if usual is not None and not (clients or rates):
        clients = [usual.clients] if usual.clients else None
        rates = None if clients else [usual.rate]
    if burstiness is not None and not rates:
        raise ConfigError("--burstiness is of an open loop: give --rate, too")
    if clients:
        return [Point(clients=n) for n in clients]
    if rates:
        if burstiness is None:
            burstiness = usual.burstiness if usual else 1.0
        return [Point(rate=rate, burstiness=burstiness) for rate in rates]
    return [Point()]


def calls_of(options: Namespace, writer: Writer) -> MakeCalls:
    """The maker of the calls of a seed."""
    sizes = sizes_of(options)
    if options.workload == "trace":
        if options.trace is None or set(sizes) - {"requests"}:
            raise ConfigError("a trace needs --trace FILE; of sizes it has --requests")
        recorded = arrivals.read(options.trace, sizes.get("requests"))
        scales = {"speed": options.speed, "length_scale": options.length_scale}
        return partial(workloads.calls_of, recorded, writer, **scales)
    if options.trace is not None:
        raise ConfigError("--trace is for the workload trace")
    workload = WORKLOADS[options.workload]
    shape = workload.shape.changed(sizes)

    def calls(seed: object, prompt_tokens: int = shape.prompt_tokens) -> list[Call]:
        sized = replace(shape, prompt_tokens=prompt_tokens)
        return workload.calls(sized, writer, generator(seed))

    return calls


def sizes_of(options: Namespace) -> dict[str, Any]:
    """Sizes of a workload that were given; of several lengths of prompts the longest."""
    sizes = given(options, SHAPE)
    if lengths := sizes.get("prompt_tokens"):
        sizes["prompt_tokens"] = max(lengths)
    return sizes
