"""Parse the arguments, run one command, turn its end into an exit status."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from signal import SIG_IGN, SIGINT, signal
from typing import Any

from pyllama_raw import __version__
from pyllama_raw.cli import bench_options, options
from pyllama_raw.cli.flags import Parser, told
from pyllama_raw.cli.profiles import note_of
from pyllama_raw.cli.simulate_options import add_plot, add_simulate
from pyllama_raw.errors import ConfigError, PyllamaError

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 128 + SIGINT
NEED_BENCH = ("bench", "plot")  # packages of that extra
MODULES = {"embed": "vectors", "rank": "vectors"}  # where the name is another one
STATUS = """\
exit status:
  0    everything that was asked for succeeded
  1    a request failed, or something cannot be read, written or run; for
       `bench compare`: something got worse
  2    the flags or files do not make sense; for `tune` and `bench compare`: what was
       measured proves nothing
  130  interrupted by Ctrl-C
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 only if everything that was asked for succeeded."""
    parsed = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        # In JSON, the backslash form of a lone surrogate is its escape.
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    try:
        if note := note_of(parsed):
            sys.stderr.write(f"{note}\n")
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except KeyboardInterrupt:
        signal(SIGINT, SIG_IGN)  # a second Ctrl-C would break into the way out
        return INTERRUPTED
    except BrokenPipeError:
        # Nobody reads: let the flush at exit go nowhere, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except ConfigError as error:
        sys.stderr.write(f"error: {told(error, parsed.parser.flags())}\n")
        return WRONG_USE
    except (PyllamaError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return FAILED
    return status


def _parser() -> Parser:
    parser = Parser(
        prog="pyllama-raw",
        description="Run GGUF models.",
        epilog=STATUS,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"pyllama_raw {__version__}"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, add_flags, text in (
        ("chat", options.add_chat, "talk with a model"),
        ("generate", options.add_generate, "complete prompts, many at a time"),
        ("embed", options.add_embed, "make vectors of texts"),
        ("rank", options.add_rank, "rank documents by how they answer a query"),
        ("info", options.add_info, "show library, devices, model, limits"),
        ("tune", options.add_tune, "find the fastest options on a machine"),
        ("simulate", add_simulate, "compare scheduling policies without a model"),
        ("trace", options.add_trace, "turn logs into a trace for ui.perfetto.dev"),
        ("plot", add_plot, "draw logs and results"),
    ):
        _add(
            commands,
            name,
            add_flags,
            partial(_run, MODULES.get(name, name), name),
            text,
        )
    bench = commands.add_parser("bench", help="measure, compare and report speed")
    of_bench = bench.add_subparsers(required=True, metavar="COMMAND")
    for name, add_flags, text in (
        ("run", bench_options.add_run, "put a workload on targets"),
        ("compare", bench_options.add_compare, "tell changes from noise"),
        ("report", bench_options.add_report, "show results again"),
    ):
        _add(of_bench, name, add_flags, partial(_run, "bench", name), text)
    return parser


def _add(
    commands: Any,
    name: str,
    add_flags: Callable[[ArgumentParser], None],
    run: Callable[[Namespace], int],
    text: str,
) -> None:
    parser: Parser = commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=STATUS,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add_flags(parser)
    parser.set_defaults(run=run, parser=parser)


def _run(module: str, function: str, parsed: Namespace) -> int:
    """Import a command only when it is run: parsing is then over at once."""
    try:
        command = import_module(f"pyllama_raw.cli.{module}")
    except ImportError as error:
        if module not in NEED_BENCH:
            raise
        missing = "pip install httptools matplotlib psutil"
        raise ConfigError(f"{error}: run `{missing}`, the extra `bench`") from error
    status: int = getattr(command, function)(parsed)
    return status
