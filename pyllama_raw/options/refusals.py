"""
Refusals of constraints by llguidance, in words for whoever wrote the constraint.

Rules:
1. The reason is one sentence of at most MAX_REFUSAL characters: what is wrong, and what to do. It
   has nothing of the library: no states, no names of its limits, none of its option.
2. The place is one in the text of the constraint, with what stands there. A constraint that we
   put together has no text that its writer knows, so the place is apart, and can be left out.
3. What the table does not know is told in the words of the library, in one line.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pyllama_raw.errors import BadSchema, cut

MAX_REFUSAL = 400  # characters
MAX_READ = 2000  # characters of a refusal
N_AROUND = 30  # characters of a text on both sides of a place in it
SMALLER = "shorten it, or lower its numbers and repetitions"

# Behind the first words come states and the grammar, between tags, and an excerpt.
INTERNAL = re.compile(
    r"\n<(?:state|grammar|non-verbose|warnings|backtrace)\b.*", re.DOTALL
)
READER = re.compile(r"^(?:(?:parser|lexer) error: )+", re.IGNORECASE)
PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*?)(?:\n {0,3}\d+ \| .*)?", re.DOTALL)
LINE = re.compile(r"^ {0,3}(\d+) \| (.*)$", re.MULTILINE)
# What the reader of patterns prints: the pattern, signs below the place, and what is wrong.
PATTERN = re.compile(
    r"(?:invalid regex .* \(in regex\): )?regex parse error:\n(.*\n)error: (.*)",
    re.DOTALL,
)
MARKED = re.compile(r"    (.*)\n    ( *)\^+ *\n")

TABLE: tuple[tuple[str, str], ...] = (
    (
        r"oneOf constraints are not supported.*",
        "the schemas of a oneOf may overlap: write anyOf, or make them disjoint",
    ),
    (r"NoExtension(?:Bias)?", "it excludes every output: loosen it"),
    (r"Unsatisfiable schema: (.*)", r"no value fits it: \1"),
    (r"Pointer '(.*)' does not exist", r"$ref: the schema has nothing at '#\1'"),
    (
        r"Resource '(.*)' is not present in a registry.*",
        r"$ref: nothing is loaded from '\1': put it into $defs",
    ),
    (r"invalid multiple of", "multipleOf: give a number above 0"),
    (r"Invalid type: (.*)", r"type: there is none named '\1'"),
    (
        r"lookarounds not supported yet; \w+ in regex /(.*)/",
        r"the pattern '\1' has \\b, or another sign for a place between characters, inside: "
        "write it without",
    ),
    (
        r"Expected positive integer for '(.*)', got (.*)",
        r"\1: give a whole number of 0 or more, not \2",
    ),
    (r"Expected f64 for '(.*)', got (.*)", r"\1: give a number, not \2"),
    (
        r"Expected (?:an? )?(.*) for '(.*)', got (.*)",
        r"\2: give a value of the type \1, not \3",
    ),
    (
        r"no start rule found",
        "it has no rule `start`, which says what a whole output is",
    ),
    (r"lexer error", "no word of a grammar begins, or ends, in this way"),
    (
        r"grammar size \(number of symbols\) too big \(limit for this grammar: (\d+)\)",
        rf"it has more than \1 symbols: {SMALLER}",
    ),
    (
        r"Too many items \(limit (\d+); .*",
        r"more than \1 ways to read an output are open for one token: write whole words in "
        "place of single characters, and fewer rules that may be empty",
    ),
    (
        r"Current row has (\d+) items; max is (\d+).*",
        r"\1 ways to read an output are open at one place, at most \2 are allowed: let rules "
        "repeat at their beginning in place of their end",
    ),
    (
        r"initial lexer configuration \(grammar\) too big \(limit for this grammar: (\d+)\)",
        rf"it takes more than \1 steps of a compiler: {SMALLER}",
    ),
    (
        r"DNF too large.*|schema too large|maximum relevance check fuel.*|fuel exhausted.*"
        r"|too many expressions.*",
        f"it is too large to be compiled: {SMALLER}",
    ),
    (
        r"too many states.*|LexerTooComplex|ParserTooComplex",
        f"it cannot be followed within the limits of one token: {SMALLER}",
    ),
    (
        r"lark grammar too deeply nested.*|.*recursion limit.*",
        "it nests too deeply: flatten it",
    ),
    (
        r"panic: .*|InternalError",
        "it cannot be read (llguidance failed for it): simplify it",
    ),
)
ADVICE = {  # what to do about signs that patterns lack
    "look-around": "write it without",
    "backreferences": "write out what is repeated",
}


class PlacedReason(NamedTuple):
    """The reason of a refusal, and its place."""

    reason: str
    place: str  # in the text of a Lark grammar; empty if there is none


def refused(kind: str, text: str) -> BadSchema:
    """The error for a constraint of *kind*, of which llguidance says *text*."""
    reason, place = refusal(kind, text)
    return BadSchema(kind, reason, place=place)


def refusal(kind: str, text: str) -> PlacedReason:
    """The reason and place of a refusal of a constraint of *kind*, which llguidance tells as *text*."""
    text = INTERNAL.sub("", text).strip()
    text = READER.sub("", text)
    place = ""
    # A rule of ours is around a pattern, so its line and column say nothing there.
    if located := PLACE.fullmatch(text):
        line, column, message = located.groups()
        if kind == "lark":
            lines = dict(LINE.findall(text))
            shown = _around(lines.get(line, ""), int(column) - 1)
            place = f"line {line}, column {column}{shown}"
        text = message
    text = text.removeprefix("failed to compile JSON schema: ").strip()
    return PlacedReason(cut(_reason(text), MAX_REFUSAL), place)


def _reason(text: str) -> str:
    keywords = re.fullmatch(r"Unimplemented keys: \[(.*)\]", text)
    if keywords is not None:
        names = keywords[1].replace('"', "'")
        return f"{names} cannot be held; docs/constraints.md says what to write instead"
    if pattern := PATTERN.fullmatch(text):
        return _of_pattern(*pattern.groups())
    # A value of the constraint may be in it, with which the table would take quadratic time.
    text = text[:MAX_READ]
    for known, words in TABLE:
        if (matched := re.fullmatch(known, text, re.DOTALL)) is not None:
            return " ".join(matched.expand(words).split())
    return " ".join(text.split()) or "it excludes every output: loosen it"


def _of_pattern(printed: str, error: str) -> str:
    """The mistake in a pattern, and the number of its character."""
    reason = " ".join(error.split())
    if marked := MARKED.fullmatch(printed):
        pattern, before = marked.groups()
        at = len(before)
        reason += f", at character {at + 1} of the pattern{_around(pattern, at)}"
    advice = next((advice for sign, advice in ADVICE.items() if sign in error), "")
    return f"{reason}: {advice}" if advice else reason


def _around(text: str, at: int) -> str:
    """The characters of *text* around *at*, as the end of a sentence; nothing if it is empty."""
    start, stop = max(0, at - N_AROUND), at + N_AROUND
    begin, end = ("..." if start else ""), ("..." if stop < len(text) else "")
    shown = f"{begin}{text[start:stop]}{end}"
    return f", in `{shown}`" if text else ""
