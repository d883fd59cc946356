"""Flags of the commands `tune`, `trace` and `plot`."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from pyllama_raw.cli.flags import add, add_fields, count, positive
from pyllama_raw.cli.options import MODEL_HELP
from pyllama_raw.native.model import FILE_TYPES
from pyllama_raw.options.config import SchedulerConfig


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
