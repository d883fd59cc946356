"""Flags of `bench`."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path

from pyllama_raw.bench.shape import Shape
from pyllama_raw.bench.workloads import WORKLOADS
from pyllama_raw.cli.engine_options import add_engine
from pyllama_raw.cli.flags import positive, share, whole
from pyllama_raw.cli.options import MODEL_HELP

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
    parser.add_argument(
        "--target",
        action="append",
        dest="targets",
        metavar="TARGET",
        help="engine (the default), openai=URL, or llama-server=URL; repeatable",
    )
    parser.add_argument("--model", metavar="MODEL", help=f"{MODEL_HELP}; its tokens")
    add_measuring(parser)
    add_engine(parser)


def add_measuring(parser: ArgumentParser) -> None:
    """Flags that say how a workload is sent and what is written."""
    _add_sending(parser)
    _add_shape(parser)
    _add_output(parser)


def _add_sending(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("how calls are sent")
    group.add_argument(
        "--clients",
        type=whole(1),
        nargs="+",
        metavar="N",
        help="closed loop: each waits for its answer; several: one run for each",
    )
    group.add_argument(
        "--rate",
        type=positive,
        nargs="+",
        metavar="R",
        help="open loop: calls a second; several: one run for each",
    )
    group.add_argument(
        "--burstiness",
        type=positive,
        metavar="B",
        help="shape of the gamma distribution of gaps: 1 is Poisson, less is burstier",
    )
    group.add_argument(
        "--rounds",
        type=whole(1),
        default=5,
        metavar="N",
        help="interleaved repeats (5)",
    )
    group.add_argument(
        "--warm-up",
        type=whole(0),
        default=8,
        metavar="N",
        help="calls after each opening of a target that do not count (8)",
    )
    group.add_argument(
        "--seed",
        type=whole(0),
        default=0,
        metavar="N",
        help="of text and arrivals (0)",
    )
    group.add_argument(
        "--text", action="store_true", help="send prompts as text, not as token ids"
    )


def _add_shape(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("sizes, where a workload has them")
    for name in SHAPE:
        kind = share if name == "leave_share" else whole(0)
        usual = [
            f"{n} {v}" for n, w in WORKLOADS.items() if (v := getattr(w.shape, name))
        ]
        flag = f"--{name.replace('_', '-')}"
        about = ", ".join(usual) or "a size that no workload has by itself"
        group.add_argument(flag, type=kind, metavar="N", help=about)
    group.add_argument("--trace", type=Path, metavar="FILE", help="of workload trace")
    group.add_argument(
        "--speed",
        type=positive,
        default=1.0,
        metavar="X",
        help="of the trace's clock (1)",
    )
    group.add_argument(
        "--length-scale",
        type=positive,
        default=1.0,
        metavar="X",
        help="of the trace's lengths (1)",
    )


def _add_output(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("what is made of it")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=(),
        metavar="LIMIT",
        help="what a good request keeps: ttft:MS, tpot:MS, e2el:MS",
    )
    group.add_argument(
        "--out", type=Path, metavar="FILE", help="write results as JSON lines"
    )
    add_showing(parser)


def add_showing(parser: ArgumentParser) -> None:
    """Flags for reports made of results."""
    parser.add_argument(
        "--wide", action="store_true", help="show all figures, however many columns"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page")
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="write plots as SVG and PNG"
    )


def add_report(parser: ArgumentParser) -> None:
    """Flags of `bench report`."""
    parser.add_argument(
        "results", nargs="+", type=Path, metavar="FILE", help="as --out wrote it"
    )
    add_showing(parser)


def add_compare(parser: ArgumentParser) -> None:
    """Flags of `bench compare`."""
    parser.add_argument("before", type=Path, metavar="A", help="as --out wrote it")
    parser.add_argument("after", type=Path, metavar="B", help="what is compared to A")
    parser.add_argument(
        "--threshold",
        type=positive,
        default=3.0,
        metavar="PERCENT",
        help="smaller changes of a median do not count (3)",
    )
