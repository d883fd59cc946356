"""
Parse the arguments, run one command, turn its end into an exit status.

Rules:
1. This file imports little, because each start of a command waits for it.
2. A mistake is told in one line: `--slots 0: give at least 1`.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from signal import SIG_IGN, SIGINT, signal
from typing import Any, NamedTuple, NoReturn

from pyllama_raw.cli import FAILED, INTERRUPTED, WRONG_USE, open_missing
from pyllama_raw.errors import ConfigError, PyllamaError
from pyllama_raw.options import __version__

STATUS = """\
exit status:
  0    everything that was asked for succeeded
  1    a request failed, or something cannot be read, written or run; for
       `bench compare`: something got worse; for `simulate`: a hook of a policy failed
  2    the flags or files do not make sense; for `tune` and `bench compare`: what was
       measured proves nothing
  130  interrupted by Ctrl-C
"""


class Command(NamedTuple):
    """A command; its last word names the function that runs it, and `add_...` its flags."""

    flags: str  # module
    run: str  # module
    text: str


CLI, LAB = "cli.options", "lab.arguments"
SIM = LAB, "lab.simulate"
SERVE = "cli.serve", "cli.serve"
BENCH = LAB, "lab.bench"
COMMANDS = {
    "chat": Command(CLI, "cli.chat", "talk with a model"),
    "generate": Command(CLI, "cli.generate", "complete prompts, many at a time"),
    "embed": Command(CLI, "cli.generate", "make vectors of texts"),
    "rank": Command(CLI, "cli.generate", "rank documents by how they answer a query"),
    "serve": Command(*SERVE, "answer over HTTP, as OpenAI's API does"),
    "info": Command(CLI, "cli.info", "show library, devices, model, limits"),
    "tune": Command(LAB, "lab.tune", "find the fastest options on a machine"),
    "simulate": Command(*SIM, "compare scheduling policies without a model"),
    "trace": Command(
        LAB, "lab.chrome_trace", "turn logs into a trace for ui.perfetto.dev"
    ),
    "plot": Command(LAB, "lab.plot", "draw logs and results"),
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
    except PyllamaError as error:
        sys.stderr.write(f"error: {error}\n")
        return FAILED
    except OSError as error:
        is_of_file = error.filename is not None and error.strerror is not None
        reason = f"{error.filename}: {error.strerror}" if is_of_file else error
        sys.stderr.write(f"error: {reason}\n")
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
    if (note_of := getattr(parsed, "note_of", None)) and (note := note_of(parsed)):
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


class Parser(ArgumentParser):
    """
    Tells a mistake in one line; the usage is for people that ask.

    No flag can be abbreviated, because a new one would change what an abbreviation means. That
    holds for the parsers of all commands, which are of this class.
    """

    def __init__(
        self, *, fill: Callable[[Parser], None] | None = None, **options: Any
    ) -> None:
        how = RawDescriptionHelpFormatter
        super().__init__(
            epilog=STATUS, formatter_class=how, allow_abbrev=False, **options
        )
        self._fill = fill

    def filled(self) -> Parser:
        """With all flags, which cost imports: they are added when somebody asks."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill(self)
        return self

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        parsed, unknown = super(Parser, self.filled()).parse_known_args(
            *arguments, **options
        )
        if unknown:  # told by the parser of the command, whose help says more
            flag = unknown[0].partition("=")[0]
            close = get_close_matches(flag, self._option_string_actions, 1, 0.7)
            hint = f"; did you mean {close[0]}?" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        text = re.sub(r"^argument ([^ ]+): ", r"\1 ", message)
        if choice := re.fullmatch(
            r"(.*)invalid choice: (.*) \(choose from (.*)\)", text
        ):
            text = f"{choice[1]}{choice[2]}: give one of {choice[3]}".replace("'", "")
        self.exit(2, f"error: {text}\n{self.prog} --help says more\n")

    def flags(self) -> dict[str, str]:
        """The flag of each field that has one."""
        # Of several flags of a field the first one counts: the others stand for one of its values.
        actions = [action for action in self._actions if action.option_strings]
        return {action.dest: action.option_strings[0] for action in reversed(actions)}


def told(error: ConfigError, flags: dict[str, str]) -> str:
    """The words for a person: flags in the place of the fields that they stand for."""

    def with_flags(text: str, names: dict[str, str] = flags) -> str:
        # What stands in quotes is a value.
        pattern = r"'[^']*'|[a-z]\w*"
        return re.sub(pattern, lambda word: names.get(word[0], word[0]), text)

    # Two parts have a mode, and the flag of the second one has the name of the part.
    of_drafts = flags | {"mode": flags.get("speculation", "mode")}
    lines = []
    for place, value, words in error.mistakes:
        parts = re.findall(r"\w+", place)
        names = of_drafts if "speculation" in parts else flags
        name = next((part for part in reversed(parts) if part in names), place)
        # No flag is an unknown option: it stands in a file, and so does the one that is meant.
        is_of_file = words.startswith("a known option")
        allowed = words if is_of_file else with_flags(words, names)
        lines.append(f"{with_flags(name, names)} {value}: give {allowed}")
    return "; ".join(dict.fromkeys(lines)) or str(error)
