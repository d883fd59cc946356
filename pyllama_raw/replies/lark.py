"""A grammar for llguidance that is being written, with the delimiters of a specification."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from pyllama_raw.replies.spec import FIELD, ReplySpec

SPECIAL = re.compile(r"\\.|[/\n\r]", re.DOTALL)  # in a pattern, and escapes
WRITTEN = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}


def regex(pattern: str) -> str:
    """A regular expression as Lark has it."""
    inside = SPECIAL.sub(lambda match: WRITTEN.get(match[0], match[0]), pattern)
    return f"/{inside}/"


class Spelled(str):
    """Text as it is written."""

    __slots__ = ()


class Rule(str):
    """Term of the grammar for a part: the name of a rule, or a token."""

    __slots__ = ()


Parts = Sequence[Spelled | Rule]


class Lark:
    """
    Rules of a grammar.

    The lexer of llguidance takes the longest text that some terminal has, and never goes back. So
    texts that follow each other are one terminal, and a text up to a delimiter ends with it.
    """

    def __init__(self, spec: ReplySpec, ids: Mapping[str, int]) -> None:
        """
        Args:
            ids: tokens of the special names in *spec*.
        """
        self.spec = spec
        self._ids = ids
        self._names: dict[tuple[str, str], str] = {}

    def grammar(self, start: str) -> str:
        rules = (f"{name}: {body}" for (body, _), name in self._names.items())
        return "\n".join([f"start: {start}", *rules])

    def rule(self, body: str) -> Rule:
        return self._named(body, "r{}")

    def one_of(self, choices: Iterable[Parts]) -> Rule:
        return self.rule(" | ".join(dict.fromkeys(map(self.row, choices))))

    def terminal(self, body: str) -> Rule:
        return self._named(body, "T{}")

    def first(self, body: str) -> Rule:
        """The shortest text that *body*, of a terminal, matches."""
        return self._named(self.terminal(body), "r{}[lazy]")

    def row(self, parts: Parts) -> str:
        """*parts* after each other."""
        row: list[Spelled | Rule] = []
        # Texts that follow each other are one terminal; empty parts are none.
        for part in parts:
            if isinstance(part, Spelled) and row and isinstance(row[-1], Spelled):
                row[-1] = Spelled(row[-1] + part)
            elif part:
                row.append(part)
        return (
            " ".join(json.dumps(p) if isinstance(p, Spelled) else p for p in row)
            or '""'
        )

    def delimiter(self, text: str) -> Parts:
        """A delimiter: special tokens are tokens, the rest is text."""
        return [
            Rule(f"<[{self._ids[piece]}]>") if special else Spelled(piece)
            for piece, special in self.spec.pieces(text)
        ]

    def first_of(self, spellings: Sequence[str]) -> Parts:
        """The spelling to write."""
        return self.delimiter(spellings[0]) if spellings else []

    def form(self, text: str, fields: Mapping[str, Spelled | Rule]) -> Parts:
        """A form with its fields, which make no special token."""
        return [
            part
            for n, piece in enumerate(FIELD.split(text))
            for part in ([fields[piece]] if n % 2 else self.delimiter(piece))
        ]

    @property
    def special(self) -> list[Rule]:
        """All special tokens of the specification."""
        return [Rule(f"<[{self._ids[name]}]>") for name in sorted(self.spec.special)]

    def tokens_in(self, text: str) -> list[Rule]:
        """The special tokens of the delimiter *text*."""
        return [part for part in self.delimiter(text) if isinstance(part, Rule)]

    def without(self, texts: Sequence[str], pattern: str = "(?s:.*)") -> str:
        """The body of a terminal: text that *pattern* matches and that has none of *texts*."""
        body = regex(pattern)
        for text in texts:
            body += f" & ~({ANY} {json.dumps(text)} {ANY})"
        return f"({body})"

    def until(
        self,
        ends: Sequence[str],
        pattern: str = "(?s:.*)",
        never: Sequence[str] = (),
    ) -> Rule:
        """
        Text that *pattern* matches up to the first of *ends*, which belongs to it.

        Args:
            never: texts that it does not have.
        """
        plain = self.plain(ends)
        text = self.without([*plain, *never], pattern)
        # An end with a special token: the text before the token belongs to the terminal.
        choices: list[str] = []
        for parts in (self.delimiter(end) for end in ends if end not in plain):
            n = int(isinstance(parts[0], Spelled))  # parts that are of the terminal
            lead = "".join(map(json.dumps, parts[:n]))
            before = self.terminal(f"{text} {lead}")
            choices.append(f"{before} {self.row(parts[n:])}")
        # Ends that are text alone: the shortest text up to any of them.
        if plain:
            written = " | ".join(map(json.dumps, plain))
            choices.append(self.first(f"{text} ({written})"))
        return self.rule(" | ".join(choices))

    def plain(self, texts: Iterable[str]) -> list[str]:
        """The ones among *texts* that have no special token."""
        return [text for text in texts if not self.tokens_in(text)]

    def _named(self, body: str, form: str) -> Rule:
        new = form.format(len(self._names))
        name = self._names.setdefault((body, form), new)
        return Rule(name.removesuffix("[lazy]"))


ANY = "/(?s:.*)/"
