"""From the flags of `bench run` to what is measured."""

from __future__ import annotations

from argparse import Namespace
from functools import partial

from pyllama_raw.cli.engine_options import engine_config, given
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.bench import trace_files
from pyllama_raw.lab.bench.rounds import MakeCalls, Point
from pyllama_raw.lab.bench.workloads import WORKLOADS
from pyllama_raw.lab.bench.writer import Writer, generator
from pyllama_raw.lab.cli.bench_options import SHAPE
from pyllama_raw.options.config import EngineConfig


def bench_config(options: Namespace) -> EngineConfig:
    """The engine as flags say; under memory pressure half of the cells it needs."""
    if options.workload == "memory-pressure" and options.n_ctx is None:
        shape = WORKLOADS[options.workload].shape.changed(given(options, SHAPE))
        n_slots = options.n_slots or EngineConfig().scheduler.n_slots
        n_tokens = shape.prompt_tokens + shape.output_tokens
        options.n_ctx = max(n_slots * n_tokens // 2, n_tokens + 1)
    return engine_config(options)


def points_of(options: Namespace) -> list[Point]:
    """
    Raises:
        ConfigError: --clients and --rate together, or --burstiness without a rate.
    """
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
    sizes = given(options, SHAPE)
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
    return lambda seed: workload.calls(shape, writer, generator(seed))
