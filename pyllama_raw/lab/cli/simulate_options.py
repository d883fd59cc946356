"""Flags of `simulate`."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path

from pyllama_raw.cli.flags import (
    add,
    add_fields,
    count,
    not_negative,
    positive,
    whole_number,
)
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.sim.workload import Lengths
from pyllama_raw.options.config import SchedulerConfig
from pyllama_raw.routing import ROUTERS

OF_SCHEDULER = ("n_slots", "token_budget", "target_step_s", "max_overtakes")


def add_simulate(parser: ArgumentParser) -> None:
    """All of them; without one the default of the simulation holds."""
    text = "policies, with commas between; all see the same requests"
    add(parser, "--compare", _names, "NAMES", text, default="fcfs")
    text = (
        "go on as fcfs where a hook of a policy fails; its faults are counted, status 1"
    )
    parser.add_argument("--keep-going", action="store_true", help=text)
    group = parser.add_argument_group("requests")
    add(group, "--requests", count, "N", "in all (1000, or those of the trace)")
    text = "recorded requests instead of drawn ones: a trace that bench reads, a request log"
    add(group, "--trace", Path, "FILE", text)
    add(group, "--speed", positive, "X", "of the trace's clock", default=1)
    add(group, "--rate", positive, "R", "requests a second", default=1.0)
    text = "shape of the gamma distribution of gaps: 1 is Poisson, less is burstier"
    add(group, "--burstiness", positive, "B", text, default=1.0)
    text = "tokens: N, uniform:N, exponential:N or lognormal:N:SIGMA, N on average"
    add(group, "--prompt", _lengths, "L", text, default="lognormal:200:0.8")
    add(group, "--output", _lengths, "L", text, default="exponential:50")
    add(group, "--groups", count, "N", "shared prefixes", default=1)
    add(group, "--prefix-tokens", whole_number, "N", "of each prefix", default=0)
    add(group, "--clients", count, "N", "senders of requests", default=1)
    text = "how many times as many requests come from the first client"
    add(group, "--heavy", positive, "X", text, default=1.0)
    add(group, "--deadline", _lengths, "L", "seconds, likewise drawn for each request")
    text = "policies see a guess of each output: SIGMA of the logarithm of its error, 0 is right"
    add(group, "--guess", not_negative, "SIGMA", text)
    text = (
        "what each request allows (with --guess half a slot; else as many as it gets)"
    )
    add(group, "--max-tokens", count, "N", text)
    add(group, "--seed", whole_number, "N", "of all that is drawn", default=0)
    group = parser.add_argument_group("machine")
    add_fields(group, SchedulerConfig, (*OF_SCHEDULER, "budget_mode"))
    add(group, "--cells", count, "N", "KV cells of all slots together")
    add(
        group,
        "--cached-tokens",
        whole_number,
        "N",
        "of snapshots in host memory",
        default=0,
    )
    add(group, "--cost", Path, "FILE", "cost model, as --fit writes it")
    add(group, "--replicas", count, "N", "machines, behind a router", default=1)
    text = "rule by which a machine gets a request"
    group.add_argument(
        "--router", choices=tuple(ROUTERS), default="round_robin", help=text
    )
    group = parser.add_argument_group("files")
    add(group, "--steps", Path, "FILE", "write the steps of the last policy, as JSONL")
    text = "write the requests of each policy to POLICY.jsonl there"
    add(group, "--request-logs", Path, "FOLDER", text)
    text = "draw the latencies of all policies: .svg or .png (compared.svg if several)"
    add(group, "--figure", Path, "FILE", text)
    text = "fit a cost model to a step log, write it to FILE, and end"
    parser.add_argument(
        "--fit", type=Path, nargs=2, metavar=("STEPS", "FILE"), help=text
    )


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from None
