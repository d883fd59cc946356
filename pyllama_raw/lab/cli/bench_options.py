"""Flags of `bench`."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path

from pyllama_raw.cli.flags import add, count, positive, share, whole_number
from pyllama_raw.cli.options import MODEL_HELP, add_engine, add_model_argument
from pyllama_raw.lab.bench.shape import Shape
from pyllama_raw.lab.bench.workloads import WORKLOADS

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
