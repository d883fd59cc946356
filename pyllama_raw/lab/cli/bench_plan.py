"""From the flags of `bench run` to what is measured."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from functools import partial
from typing import Any

from pyllama_raw.cli.engine_options import engine_config, given
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.bench import trace_files
from pyllama_raw.lab.bench.call import Call
from pyllama_raw.lab.bench.rounds import MakeCalls, Point
from pyllama_raw.lab.bench.workloads import WORKLOADS
from pyllama_raw.lab.bench.writer import Writer, generator
from pyllama_raw.lab.cli.bench_options import SHAPE
from pyllama_raw.options.config import EngineConfig


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
        arrivals = trace_files.read(options.trace, sizes.get("requests"))
        scales = {"speed": options.speed, "length_scale": options.length_scale}
        return partial(trace_files.calls_of, arrivals, writer, **scales)
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
