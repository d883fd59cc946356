"""Flags of the commands of the laboratory."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from dataclasses import fields
from pathlib import Path

from pyllama_raw.cli.flags import (
    add,
    add_fields,
    count,
    not_negative,
    positive,
    share,
    whole_number,
)
from pyllama_raw.cli.options import MODEL_HELP, add_engine, add_model_argument
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.arrivals import Lengths
from pyllama_raw.lab.workloads import WORKLOADS, Shape
from pyllama_raw.native.model import FILE_TYPES
from pyllama_raw.options.config import SchedulerConfig
from pyllama_raw.routing import ROUTERS


def add_trace(parser: ArgumentParser) -> None:
    """Flags of `trace`."""
    parser.add_argument(
        "steps", type=Path, metavar="STEPS", help="what --step-log has written"
    )
    text = "what --request-log has written at the same time (no arrivals and ends)"
    add(parser, "--requests", Path, "FILE", text)
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="JSON")


def add_tune(parser: ArgumentParser) -> None:
    """Flags of `tune`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    add(parser, "--out", str, "FILE", "the profile (MODEL's name with .profile.json)")
    parser.add_argument(
        "--requantize",
        type=Path,
        metavar="FILE",
        help="keep the requantised model as FILE, which must not exist, and use it in "
        "the profile if it is faster (measured, reported and thrown away)",
    )
    parser.add_argument(
        "--file-type",
        dest="file_types",
        action="append",
        choices=FILE_TYPES,
        help="what to requantise to; repeatable (q4_0)",
    )
    add_fields(parser, SchedulerConfig, ("n_slots",), n_slots=8)
    add(parser, "--prompt-tokens", count, "N", "of each request", default=128)
    add(parser, "--output-tokens", count, "N", "of each request", default=16)
    text = "how long a step of a fixed token budget may stall running streams"
    add(parser, "--max-step-s", positive, "S", text, default=0.3)
    text = (
        "begin to try no further option after so many minutes; defaults, result and each "
        "requantised model are measured in any case (try all)"
    )
    add(parser, "--minutes", positive, "M", text)


def add_plot(parser: ArgumentParser) -> None:
    """Files in, a folder out."""
    text = "request logs and results of bench"
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help=text)
    text = "folder for the pictures, each as SVG and PNG"
    add(parser, "--out", Path, "FOLDER", text, default=Path("plots"))


SHAPE = tuple(field.name for field in fields(Shape))


def add_run(parser: ArgumentParser) -> None:
    """Flags of `bench run`."""
    about = "; ".join(f"{w.name}: {w.about}" for w in WORKLOADS.values())
    parser.add_argument(
        "workload",
        choices=[*WORKLOADS, "trace"],
        metavar="WORKLOAD",
        help=f"{about}; trace: the arrivals of --trace",
    )
    add_model_argument(parser)
    text = "engine (the default), openai=URL, or llama-server=URL; repeatable"
    add(parser, "--target", str, "TARGET", text, action="append", dest="targets")
    add(parser, "--model", str, "MODEL", f"{MODEL_HELP}; its tokens")
    _add_sending(parser)
    _add_shape(parser)
    group = parser.add_argument_group("what is made of it")
    text = "what a good request keeps: ttft:MS, tpot:MS, e2el:MS"
    add(group, "--goodput", str, "LIMIT", text, nargs="+")
    add(group, "--out", Path, "FILE", "write results as JSON lines")
    _add_showing(parser)
    add_engine(parser)


def _add_sending(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("how calls are sent")
    text = "closed loop: each waits for its answer; several: one run for each"
    add(group, "--clients", count, "N", text, nargs="+")
    text = "open loop: calls a second; several: one run for each"
    add(group, "--rate", positive, "R", text, nargs="+")
    text = "shape of the gamma distribution of gaps: 1 is Poisson, less is burstier"
    add(group, "--burstiness", positive, "B", text)
    add(group, "--rounds", count, "N", "interleaved repeats", default=5)
    text = "calls after each opening of a target that do not count"
    add(group, "--warm-up", whole_number, "N", text, default=8)
    add(group, "--seed", whole_number, "N", "of text and arrivals", default=0)
    group.add_argument(
        "--text", action="store_true", help="send prompts as text, not as token ids"
    )


def _add_shape(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("sizes, where a workload has them")
    for name in SHAPE:
        kind = share if name == "leave_share" else whole_number
        usual = [
            f"{n} {v}" for n, w in WORKLOADS.items() if (v := getattr(w.shape, name))
        ]
        flag, text = f"--{name.replace('_', '-')}", ", ".join(usual)
        if name == "prompt_tokens":
            text = f"{text}; several: one run for each"
            add(group, flag, kind, "N", text, nargs="+")
        else:
            add(group, flag, kind, "N", text)
    add(group, "--trace", Path, "FILE", "of workload trace")
    add(group, "--speed", positive, "X", "of the trace's clock", default=1)
    add(group, "--length-scale", positive, "X", "of the trace's lengths", default=1)


def _add_showing(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--wide", action="store_true", help="show all figures, however many columns"
    )


def add_report(parser: ArgumentParser) -> None:
    """Flags of `bench report`."""
    parser.add_argument(
        "results", nargs="+", type=Path, metavar="FILE", help="as --out wrote it"
    )
    _add_showing(parser)


def add_compare(parser: ArgumentParser) -> None:
    """Flags of `bench compare`."""
    parser.add_argument("before", type=Path, metavar="A", help="as --out wrote it")
    parser.add_argument("after", type=Path, metavar="B", help="what is compared to A")
    text = "smaller changes of a median do not count"
    add(parser, "--threshold", positive, "PERCENT", text, default=3)


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
    add_fields(group, SchedulerConfig, (*OF_SCHEDULER, "budget_mode", "prefill_order"))
    add(group, "--cells", count, "N", "KV cells of all slots together")
    add(
        group,
        "--cached-tokens",
        whole_number,
        "N",
        "of snapshots in host memory",
        default=0,
    )
    text = "whether steps verify drafts of what outputs have said before"
    modes = ("off", "lookup")
    group.add_argument("--speculation", choices=modes, default="off", help=text)
    text = "how often outputs that the trace does not have say a token again, 0 to 1"
    add(group, "--repetition", share, "X", text, default=0.0)
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
