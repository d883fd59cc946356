"""Parse the arguments, run one command, turn its end into an exit status."""

from __future__ import annotations

import os
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from signal import SIG_IGN, SIGINT, signal
from typing import Any, NamedTuple

from pyllama_raw import __version__
from pyllama_raw.cli.flags import Parser, told
from pyllama_raw.cli.profiles import note_of
from pyllama_raw.cli.streams import open_missing
from pyllama_raw.errors import ConfigError, PyllamaError

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 128 + SIGINT


class Command(NamedTuple):
    """A command: the functions that add its flags and run it, each `module:function`."""

    name: str
    flags: str
    run: str
    text: str
    needs_bench: bool = False  # packages of the extra `bench`


LAB = "lab.cli"
COMMANDS = (
    Command("chat", "cli.options:add_chat", "cli.chat:chat", "talk with a model"),
    Command(
        "generate",
        "cli.options:add_generate",
        "cli.generate:generate",
        "complete prompts, many at a time",
    ),
    Command(
        "embed",
        "cli.options:add_embed",
        "cli.vectors:embed",
        "make vectors of texts",
    ),
    Command(
        "rank",
        "cli.options:add_rank",
        "cli.vectors:rank",
        "rank documents by how they answer a query",
    ),
    Command(
        "info",
        "cli.options:add_info",
        "cli.info:info",
        "show library, devices, model, limits",
    ),
    Command(
        "tune",
        f"{LAB}.options:add_tune",
        f"{LAB}.tune:tune",
        "find the fastest options on a machine",
    ),
    Command(
        "simulate",
        f"{LAB}.simulate_options:add_simulate",
        f"{LAB}.simulate:simulate",
        "compare scheduling policies without a model",
    ),
    Command(
        "trace",
        f"{LAB}.options:add_trace",
        f"{LAB}.trace:trace",
        "turn logs into a trace for ui.perfetto.dev",
    ),
    Command(
        "plot",
        f"{LAB}.options:add_plot",
        f"{LAB}.plot:plot",
        "draw logs and results",
        needs_bench=True,
    ),
    Command(
        "bench run",
        f"{LAB}.bench_options:add_run",
        f"{LAB}.bench:run",
        "put a workload on targets",
        needs_bench=True,
    ),
    Command(
        "bench compare",
        f"{LAB}.bench_options:add_compare",
        f"{LAB}.bench:compare",
        "tell changes from noise",
        needs_bench=True,
    ),
    Command(
        "bench report",
        f"{LAB}.bench_options:add_report",
        f"{LAB}.bench:report",
        "show results again",
        needs_bench=True,
    ),
)
GROUPS = {"bench": "measure, compare and report speed"}
STATUS = """\
exit status:
  0    everything that was asked for succeeded
  1    a request failed, or something cannot be read, written or run; for
       `bench compare`: something got worse; for `simulate`: a hook of a policy failed
  2    the flags or files do not make sense; for `tune` and `bench compare`: what was
       measured proves nothing
  130  interrupted by Ctrl-C
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 only if everything that was asked for succeeded."""
    try:
        open_missing()
    except OSError as error:
        sys.stderr.write(f"error: {error}\n")
        return FAILED
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
    groups: dict[str, Any] = {}
    for command in COMMANDS:
        group, _, name = command.name.rpartition(" ")
        if group and group not in groups:
            of_group = commands.add_parser(group, help=GROUPS[group])
            groups[group] = of_group.add_subparsers(required=True, metavar="COMMAND")
        _add(groups.get(group, commands), name, command)
    return parser


def _add(commands: Any, name: str, command: Command) -> None:
    parser: Parser = commands.add_parser(
        name,
        help=command.text,
        description=command.text,
        epilog=STATUS,
        formatter_class=RawDescriptionHelpFormatter,
    )
    _found(command.flags)(parser)
    parser.set_defaults(run=partial(_run, command), parser=parser)


def _run(command: Command, parsed: Namespace) -> int:
    """Import a command only when it is run: parsing is then over at once."""
    try:
        run = _found(command.run)
    except ImportError as error:
        if not command.needs_bench:
            raise
        missing = "pip install httpx matplotlib psutil"
        raise ConfigError(f"{error}: run `{missing}`, the extra `bench`") from error
    status: int = run(parsed)
    return status


def _found(place: str) -> Callable[..., Any]:
    """The function at *place*, `module:function`."""
    module, _, function = place.partition(":")
    found: Callable[..., Any] = getattr(
        import_module(f"pyllama_raw.{module}"), function
    )
    return found
