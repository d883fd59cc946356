"""
The parser of the commands, and how a mistake is told: `--slots 0: give at least 1`.

It imports little, because each start of a command waits for it.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from typing import Any, NoReturn

from pyllama_raw.errors import ConfigError

STATUS = """\
exit status:
  0    everything that was asked for succeeded
  1    a request failed, or something cannot be read, written or run; for
       `bench compare`: something got worse; for `simulate`: a hook of a policy failed
  2    the flags or files do not make sense; for `tune` and `bench compare`: what was
       measured proves nothing
  130  interrupted by Ctrl-C
"""


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
            from difflib import get_close_matches  # only for a mistake

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
        actions = (action for action in self._actions if action.option_strings)
        return {action.dest: action.option_strings[0] for action in actions}


def told(error: ConfigError, flags: dict[str, str]) -> str:
    """The words for a person: flags in the place of the fields that they stand for."""

    def with_flags(text: str) -> str:
        return re.sub(r"[a-z]\w*", lambda word: flags.get(word[0], word[0]), text)

    lines = []
    for place, value, words in error.mistakes:
        parts = re.findall(r"\w+", place)
        name = next((part for part in reversed(parts) if part in flags), place)
        lines.append(f"{with_flags(name)} {value}: give {with_flags(words)}")
    return "; ".join(dict.fromkeys(lines)) or str(error)
