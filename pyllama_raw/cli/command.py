"""
Parse the arguments, run one command, turn its end into an exit status.

Some of the standard streams may be closed. Python has None for a closed stream, and the next file
that anybody opens takes its number. So what C writes to stderr would go into that file.
"""

from __future__ import annotations

import io
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from signal import SIG_IGN, SIGINT, signal
from typing import Any, NamedTuple

from pyllama_raw.cli.parser import Parser, told
from pyllama_raw.errors import ConfigError, PyllamaError
from pyllama_raw.options.version import __version__

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 128 + SIGINT
STANDARD = (0, 1, 2)


class Command(NamedTuple):
    """A command; its last word names the function that runs it, and `add_...` its flags."""

    flags: str  # module
    run: str  # module
    text: str


CLI, LAB = "cli.options", "lab.cli.options"
SIM = "lab.cli.simulate_options", "lab.cli.simulate"
SERVE = "cli.serve_options", "cli.serve"
BENCH = "lab.cli.bench_options", "lab.cli.bench"
COMMANDS = {
    "chat": Command(CLI, "cli.chat", "talk with a model"),
    "generate": Command(CLI, "cli.generate", "complete prompts, many at a time"),
    "embed": Command(CLI, "cli.vectors", "make vectors of texts"),
    "rank": Command(CLI, "cli.vectors", "rank documents by how they answer a query"),
    "serve": Command(*SERVE, "answer over HTTP, as OpenAI's API does"),
    "info": Command(CLI, "cli.info", "show library, devices, model, limits"),
    "tune": Command(LAB, "lab.cli.tune", "find the fastest options on a machine"),
    "simulate": Command(*SIM, "compare scheduling policies without a model"),
    "trace": Command(
        LAB, "lab.cli.trace", "turn logs into a trace for ui.perfetto.dev"
    ),
    "plot": Command(LAB, "lab.cli.plot", "draw logs and results"),
    "bench run": Command(*BENCH, "put a workload on targets"),
    "bench compare": Command(*BENCH, "tell changes from noise"),
    "bench report": Command(*BENCH, "show results again"),
}
GROUPS = {"bench": "measure, compare and report speed"}
# The extra whose packages a command needs.
EXTRAS = {"plot": "bench", "bench": "bench", "serve": "serve"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 only if everything that was asked for succeeded."""
    try:
        open_missing()
    except OSError as error:
        sys.stderr.write(f"error: {error}\n")
        return FAILED
    # Classes of `--policy module:Class`; last, so that a file here shadows nothing.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    parsed = root_parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        # In JSON, the backslash form of a lone surrogate is its escape.
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    try:
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


def root_parser() -> Parser:
    """The parser of all arguments; a command adds its flags when it is asked for."""
    parser = Parser(prog="pyllama-raw", description="Run GGUF models.")
    parser.add_argument(
        "--version", action="version", version=f"pyllama_raw {__version__}"
    )
    commands = {"": parser.add_subparsers(required=True, metavar="COMMAND")}
    for group, text in GROUPS.items():
        of_group: Parser = commands[""].add_parser(group, help=text)
        commands[group] = of_group.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        group, _, word = name.rpartition(" ")
        commands[group].add_parser(
            word,
            help=command.text,
            description=command.text,
            fill=partial(_fill, name),
        )
    return parser


def _fill(name: str, parser: Parser) -> None:
    """Add the flags of a command."""
    _function_of(COMMANDS[name].flags, name, "add_")(parser)
    parser.set_defaults(run=partial(_run, name), parser=parser)


def _run(name: str, parsed: Namespace) -> int:
    """Import a command only when it is run: parsing is then over at once."""
    from pyllama_raw.cli.profiles import note_of

    if note := note_of(parsed):
        sys.stderr.write(f"{note}\n")
    run = _function_of(COMMANDS[name].run, name)
    status: int = run(parsed)
    return status


def _function_of(module: str, name: str, prefix: str = "") -> Callable[..., Any]:
    """A function of the command *name*, whose packages an extra may bring."""
    words = name.split()
    try:
        loaded = import_module(f"pyllama_raw.{module}")
    except ImportError as error:
        extra = EXTRAS.get(words[0])
        if extra is None:
            raise
        advice = f"run `pip install 'pyllama_raw[{extra}]'`"
        raise ConfigError(f"{error}: {advice}") from error
    function: Callable[..., Any] = getattr(loaded, prefix + words[-1])
    return function


class ClosedInput(io.TextIOBase):
    """Stands for stdin where it is closed: whoever reads is told."""

    @property
    def buffer(self) -> ClosedInput:
        return self

    def read(self, _: int | None = -1) -> str:
        raise OSError("stdin is closed: nothing can be read from it")

    def readline(self, _: int = -1) -> str:  # type: ignore[override]
        return self.read()


def open_missing() -> None:
    """
    Stand in for the streams that are closed.

    Raises:
        OSError: it is stdout, so nothing that a command finds could be told.
    """
    for number in STANDARD:
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one
    if sys.stdin is None:
        sys.stdin = ClosedInput()
    if sys.stderr is None:
        sys.stderr = os.fdopen(STANDARD[2], "w", closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(STANDARD[1], "w", closefd=False)
        raise OSError("stdout is closed: nothing can be written to it")
