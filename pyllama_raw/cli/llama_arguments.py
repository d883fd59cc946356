"""
Arguments of llama-server as programs give them, read by the table of llama_flags.py.

Rules:
1. Files of the machine and of the user come first, then variables, then the command line. Of two
   values the later one counts, unless the flag adds to a list.
2. A mistake has llama-server's words, `error: invalid argument: --flag`, because programs look for
   them; what is refused names what to use instead.
3. What is accepted and changes nothing is a note, so that nobody wonders why it has no effect.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyllama_raw.cli.llama_flags import FLAGS, OLDER
from pyllama_raw.cli.llama_values import (
    FALSE,
    TRUE,
    Flag,
    IdleFlag,
    NotDone,
    OnlyWith,
    RefusedFlag,
    Sets,
    StandsFor,
    Value,
)
from pyllama_raw.errors import ConfigError

GLOBAL, DEFAULT = "*", "default"  # sections of a file for all models
NAME = r"[A-Za-z_][A-Za-z0-9_.-]*"
SECTION = re.compile(r"\[([^]]*)\][ \t]*([;#].*)?")
PAIR = re.compile(rf"({NAME})[ \t]*=[ \t]*(.*)")
COMMENT = re.compile(r"[;#]")  # begins one

BY_NAME: dict[str, tuple[Flag, bool]] = {}  # whether the name is the positive one
for _flag in (*OLDER, *FLAGS):
    BY_NAME |= dict.fromkeys(_flag.names, (_flag, True))
    BY_NAME |= dict.fromkeys(_flag.negated, (_flag, False))


@dataclass
class Arguments:
    """Values by the places of our options, such as "context.n_ctx", and notes for the log."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def part(self, name: str) -> dict[str, Any]:
        """The values of places in *name*, such as "context"."""
        prefix = f"{name}."
        return {
            place.removeprefix(prefix): value
            for place, value in self.values.items()
            if place.startswith(prefix)
        }

    def read_line(self, arguments: Sequence[str]) -> None:
        """Take the arguments of a command line. Raises ConfigError."""
        words = iter(arguments)
        for argument in words:
            # Long names may have low lines, as those of Python programs.
            name = argument.replace("_", "-") if argument[:2] == "--" else argument
            if name not in BY_NAME:
                raise ConfigError(f"error: invalid argument: {name}")
            option, is_positive = BY_NAME[name]
            values = [next(words, None) for _ in range(option.n_values)]
            if None in values:
                raise _mistake(name, "expected value for argument")
            value: Value = is_positive
            for text in values[:1]:
                value = text or ""
            self.take(option, name, value)
            if option.variable == "LLAMA_API_KEY":
                advice = (
                    "others of this machine see it: use LLAMA_API_KEY or --api-key-file"
                )
                self.notes.append(f"{name}: {advice}")

    def read_variables(self, environment: Mapping[str, str]) -> None:
        """Take the variables of *environment* that flags have. Raises ConfigError."""
        for option in FLAGS:
            variable = option.variable
            if not variable.isupper():
                continue
            no = variable.replace("LLAMA_ARG_", "LLAMA_ARG_NO_")
            if option.negated and no in environment:
                self.take(option, no, value=False)
            elif variable in environment:
                self._take_text(option, variable, environment[variable])

    def read_section(
        self, pairs: Mapping[str, str], file: Path, *, skips_unknown: bool
    ) -> None:
        """
        Take the keys of a section of a *file*: names of flags without dashes, or variables.

        Raises:
            ConfigError: a value is wrong, or a key is no flag, unless it *skips_unknown*.
        """
        for key, value in pairs.items():
            if key == "version":
                continue
            option, is_positive = BY_KEY.get(key, (None, True))
            if option is not None:
                text = value if is_positive else str(value not in TRUE).lower()
                self._take_text(option, key, text)
            elif skips_unknown:
                self.notes.append(f"{file}: {key} is no flag of this program")
            else:
                raise ConfigError(f"option '{key}' not recognized in preset '{file}'")

    def _take_text(self, option: Flag, name: str, text: str) -> None:
        """Take a flag as *text*; one without a value is a word for yes or no."""
        if option.n_values:
            self.take(option, name, text)
        elif text in TRUE or (option.negated and text in FALSE):
            self.take(option, name, text in TRUE)

    def take(self, option: Flag, name: str, value: Value) -> None:
        """
        Take the flag *option*, given as *name*.

        Raises:
            ConfigError: it is refused, or *value* is.
        """
        match option.meaning:
            case Sets(place, read, adds):
                try:
                    setting = read(value)
                except NotDone as error:
                    raise _refusal(name, str(error)) from None
                except (ValueError, OSError) as error:
                    raise _mistake(name, str(error)) from None
                before = self.values.get(place)
                if setting is None:
                    self.values.pop(place, None)
                elif adds:
                    self.values[place] = [*(before or ()), *setting]
                elif isinstance(setting, dict) and isinstance(before, dict):
                    self.values[place] = before | setting
                else:
                    self.values[place] = setting
            case IdleFlag(reason):
                self.notes.append(f"{name}: {reason}")
            case OnlyWith(values, advice):
                if value not in values:
                    raise _refusal(name, advice)
            case StandsFor(arguments):
                self.read_line(arguments)
            case RefusedFlag(advice):
                raise _refusal(name, advice)


def _mistake(name: str, reason: str) -> ConfigError:
    return ConfigError(f'error while handling argument "{name}": {reason}')


def _refusal(name: str, advice: str) -> ConfigError:
    return _mistake(name, f"it is not done here: {advice}")


# -- files -------------------------------------------------------------------------------


def _by_key() -> dict[str, tuple[Flag, bool]]:
    """Flags by the keys of files: names without dashes, and variables."""
    keys = {name.lstrip("-"): meaning for name, meaning in BY_NAME.items()}
    for option in FLAGS:
        if option.variable.isupper():
            keys[option.variable] = option, True
            no = option.variable.replace("LLAMA_ARG_", "LLAMA_ARG_NO_")
            keys |= {no: (option, False)} if option.negated else {}
    return keys


BY_KEY = _by_key()


def sections(file: Path) -> dict[str, dict[str, str]]:
    """
    The pairs of an INI file, by section; those before the first one are of DEFAULT.

    Raises:
        ConfigError: it cannot be read, or a line is none.
    """
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"presets {str(file)!r}: {error}") from error
    by_section: dict[str, dict[str, str]] = {DEFAULT: {}}
    section = by_section[DEFAULT]
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if not bare or COMMENT.match(bare):
            continue
        if match := SECTION.fullmatch(bare):
            section = by_section.setdefault(match[1].strip(), {})
        elif match := PAIR.fullmatch(bare):
            section[match[1]] = COMMENT.split(match[2], 1)[0].rstrip(" \t")
        else:
            raise ConfigError(
                f"line {number} of presets {str(file)!r} is no pair: {bare}"
            )
    return by_section


def usual_files(environment: Mapping[str, str]) -> list[Path]:
    """The files of the machine and of the user, as far as they are there."""
    folder = environment.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    files = (Path("/etc/llama.cpp/config.ini"), Path(folder, "llama.cpp", "config.ini"))
    return [file for file in files if file.is_file()]


def read(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    files: Iterable[Path] | None = None,
) -> Arguments:
    """
    All that is given to llama-server.

    Raises:
        ConfigError: in llama-server's words.
    """
    environment = os.environ if environment is None else environment
    collected = Arguments()
    for file in usual_files(environment) if files is None else files:
        parts = sections(file)
        for name in (GLOBAL, DEFAULT):
            collected.read_section(parts.get(name, {}), file, skips_unknown=True)
    collected.read_variables(environment)
    collected.read_line(arguments)
    return collected
