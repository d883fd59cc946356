"""
Constraints as llguidance reads them, and its refusals in words for whoever wrote a constraint.

Schemas are rewritten where llguidance reads them otherwise than JSON Schema says:
- It reads all numbers as doubles, and those of more than 15 digits not always as the nearest
  one. A bound that it would not keep is a narrower one, and such a value is refused.
- Above an excluded whole number it allows that number, too. So the bound is a number beside
  it, 14 places or fewer behind the point: no output lies between the two.
- It refuses a format that it does not know. The standard says to ignore it.
- It allows white space without an end, which some models write until their last token.
- It makes a state of each remainder of `multipleOf`, and lets a number go on that is no multiple yet. So
  a multiple has bounds on both sides.
- Its classes of characters are of Unicode, and an output that is sampled has some of its rare
  characters: ten thousand kinds of digits fit where a program expects 0 to 9. JSON schemas mean ASCII.
- It refuses keywords whatever their value, also one that limits nothing, as generators write it:
  zod has the names of a record as strings, which all names are. So they are left out, as is null, which
  is a keyword that was not given. What means the same as something that it has is written so.

Rules of refusals:
1. The reason is one sentence of at most MAX_REFUSAL characters: what is wrong, and what to do. It
   has nothing of the library: no states, no names of its limits, none of its option.
2. The place is one in the text of the constraint, with what stands there. A constraint that we
   put together has no text that its writer knows, so the place is apart, and can be left out.
3. What the table does not know is told in the words of the library, in one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from logging import getLogger
from typing import Any, NamedTuple, TypeGuard
from urllib.parse import quote

from pyllama_raw.errors import BadSchema, cut

# -- schemas --------------------------------------------------------------------

MOST = 2**53  # the doubles hold every whole number up to it
N_DIGITS = 15  # that a double keeps, and llguidance's reader of numbers
N_PLACES = 22  # behind the point
MAX_MULTIPLE = 10_000  # takes 0.1 s; ten times as much takes ten times as long

# Between two parts of an output: nothing, a space, or a line break and some indentation.
OPTIONS = {"whitespace_pattern": r"( |\n[ \t]{0,20})"}

FORMATS = frozenset(
    [
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "unknown",
        "uri",
        "uuid",
    ]
)
NAMED = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)
# Values with which keywords that it lacks limit nothing, but for flags, which are numbers to Python.
IDLE: dict[str, tuple[Any, ...]] = {
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "propertyNames": ({}, {"type": "string"}),
    "unevaluatedItems": ({},),
    "unevaluatedProperties": ({},),
}
IDLE_FLAGS = {
    "uniqueItems": False, "not": False,
    "propertyNames": True, "unevaluatedItems": True, "unevaluatedProperties": True,
}  # fmt: skip
# Where no other schema is applied in place, all that is unevaluated is additional.
IN_PLACE = frozenset(
    [
        "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not",
        "if", "then", "else", "dependentSchemas", "contains",
    ]
)  # fmt: skip
ADDITIONAL = {
    "unevaluatedItems": "items",
    "unevaluatedProperties": "additionalProperties",
}
# Whole numbers that some languages write as floats.
COUNTS = frozenset(
    [
        "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
    ]
)  # fmt: skip
# Signs that may stand in the fragment of an address, beside letters and digits.
IN_FRAGMENTS = "!#$&'()*+,/:;=?@-._~%"
NO_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")
# Well-known patterns with look-around, and regular ones of the same texts.
REGULAR = {
    # zod's of emails
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$":
    r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
}  # fmt: skip
UPWARDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
EXACT = frozenset({"const", "enum", "multipleOf"})
UNREAD = frozenset({"default", "examples"})  # values that limit nothing
EXCLUDING = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}

_log = getLogger(__name__)


def for_llguidance(schema: Any) -> Any:
    """
    The same schema for llguidance, with the options that hold for all schemas.

    Raises:
        BadSchema: a number in it has too many digits, or is too large.
    """
    root = rewritten({} if schema is True else schema)
    if isinstance(root, dict):  # else llguidance says what is wrong
        root["x-guidance"] = OPTIONS
    return root


def rewritten(schema: Any) -> Any:
    """
    The same schema for llguidance; what is no schema is left to it.

    Raises:
        BadSchema: a number in it has too many digits.
    """
    if not isinstance(schema, Mapping):
        return schema
    # Nothing fits what no value may be.
    if schema.get("not") is True or schema.get("not") == {}:
        return False
    result = {name: _value(name, value) for name, value in _plain(schema).items()}
    if isinstance(result.get("format"), str) and result["format"] not in FORMATS:
        _log.warning("json_schema: the unknown format %r is ignored", result["format"])
        del result["format"]
    for name in EXCLUDING.keys() & result.keys():
        _include(result, name)
    # A number that has to be a multiple goes on until it is one, so it needs an end.
    if _is_number(result.get("multipleOf")):
        for excluding, name in EXCLUDING.items():
            if excluding not in result:
                result.setdefault(name, -UPWARDS[name] * MOST)
    return result


def _plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    """*schema* with what means nothing left out, and what means the same in words that are known."""
    plain = {
        name: value
        for name, value in schema.items()
        if (value is not None or name in UNREAD | {"const"})
        and value not in IDLE.get(name, ())
        and not (isinstance(value, bool) and IDLE_FLAGS.get(name) is value)
    }
    for name, additional in ADDITIONAL.items():
        if name in plain and additional in plain:
            del plain[name]  # nothing is left unevaluated
        elif name in plain and not plain.keys() & IN_PLACE:
            plain[additional] = plain.pop(name)
    # Earlier drafts have a flag of the bound beside it.
    for excluding, bound in EXCLUDING.items():
        if not isinstance(plain.get(excluding), bool):
            continue
        if plain.pop(excluding) and _is_number(plain.get(bound)):
            plain[excluding] = plain.pop(bound)
    for name in COUNTS & plain.keys():
        if isinstance(plain[name], float) and plain[name].is_integer():
            plain[name] = int(plain[name])
    # Generators write names of types into addresses as they are, also those of other alphabets.
    if isinstance(reference := plain.get("$ref"), str):
        reference = NO_ESCAPE.sub("%25", reference)
        plain["$ref"] = quote(reference, safe=IN_FRAGMENTS)
    if isinstance(pattern := plain.get("pattern"), str):
        plain["pattern"] = REGULAR.get(pattern, pattern)
    return plain


def _value(name: str, value: Any) -> Any:
    if name in NAMED and isinstance(value, Mapping):
        return {key: rewritten(item) for key, item in value.items()}
    if name in UPWARDS and _is_number(value):
        return _bound(name, value)
    if name in EXACT:
        _check_digits(name, value)
    if name == "multipleOf" and _is_number(value):
        _check_multiple(value)
    if name in EXACT | UNREAD:
        return value
    if isinstance(value, list | tuple):
        return [rewritten(item) for item in value]
    return rewritten(value)


def _bound(name: str, value: float) -> float:
    """The nearest number inside it that llguidance reads exactly."""
    sign = UPWARDS[name]
    if sign * value > MOST:
        raise _inexact(name, value)
    if sign * value < -MOST:
        return -sign * MOST
    inwards = Context(N_DIGITS, ROUND_CEILING if sign > 0 else ROUND_FLOOR)
    if value == int(value):
        return int(value)
    return float(inwards.quantize(Decimal(repr(value)), _last_place(value)))


def _last_place(value: float) -> Decimal:
    """The place of the last digit that may stand in it."""
    first = Decimal(repr(value)).adjusted()
    return Decimal((0, (1,), max(first - N_DIGITS + 2, -N_PLACES)))


def _include(schema: dict[str, Any], name: str) -> None:
    """Instead of the excluded whole number *name*, its neighbour is included."""
    bound, sign, other = schema[name], UPWARDS[name], EXCLUDING[name]
    if not _is_number(bound) or bound != int(bound):
        return
    del schema[name]
    number = int(bound)
    n_places = N_DIGITS - len(str(abs(number)))
    beside = number + sign * (10**-n_places if n_places > 0 else 1)
    if abs(beside) > MOST:
        raise _inexact(name, bound)
    neighbour = schema.get(other)
    if not _is_number(neighbour) or sign * neighbour < sign * beside:
        schema[other] = beside


def _check_digits(name: str, value: Any) -> None:
    if _is_number(value) and not _is_exact(value):
        raise _inexact(name, value)
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _check_digits(name, item)


def _check_multiple(value: float) -> None:
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    n_states = int("".join(map(str, digits))) * 10 ** max(int(exponent), 0)
    if value == int(value):
        n_states = int(value)
    if n_states > MAX_MULTIPLE:
        allowed = f"at most {MAX_MULTIPLE}, without counting a decimal point"
        raise BadSchema("json_schema", f"multipleOf: {value} is too large; {allowed}")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_exact(value: float) -> bool:
    if isinstance(value, int):
        return -MOST <= value <= MOST
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    return (
        isinstance(exponent, int)  # else it is no number, or infinite
        and exponent >= -N_PLACES
        and exponent + len(digits) <= N_DIGITS
        and len(digits) <= N_DIGITS
    )


def _inexact(name: str, value: float) -> BadSchema:
    text = f"{name}: {value} is not kept exactly; allowed are whole numbers up to 2**53"
    fractions = (
        f"and fractions of {N_DIGITS} digits, at most {N_PLACES} behind the point"
    )
    return BadSchema("json_schema", f"{text}, {fractions}")


# -- patterns -------------------------------------------------------------------

_CLASSES = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
    r"\s": r"[\t\n\x0b\f\r ]",
    r"\S": r"[^\t\n\x0b\f\r ]",
}
# A bracket that closes is a character where a set begins; so are dashes.
_PART = re.compile(r"\\.|\[\^?\]?-*|\]|-+|.", re.DOTALL)


def with_ascii_classes(pattern: str) -> str:
    r"""
    *pattern* for llguidance; `\p{Nd}` and its like stay classes of Unicode.

    The end of a range, as in `[a-\d]`, stays as it is, because that is a mistake which
    llguidance names.
    """
    parts, depth = [], 0
    before, last = "", ""
    for part in _PART.findall(pattern):
        if part[0] == "[":
            depth += 1
        elif part == "]":
            depth = max(depth - 1, 0)
        # Behind another class, a dash is a character.
        ends_range = depth and last == "-" and before not in (*_CLASSES, "]")
        parts.append(part if ends_range else _CLASSES.get(part, part))
        before, last = last, part
    return "".join(parts)


# -- refusals -------------------------------------------------------------------

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
        r".*lark grammar too deeply nested.*",
        "it nests too deeply, at most 28 parentheses or 14 grammars in each other are read: "
        "flatten it",
    ),
    (
        r".*recursion limit.*",
        "it nests too deeply, at most 126 levels are read: flatten it",
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
            excerpt = _around(lines.get(line, ""), int(column) - 1)
            place = f"line {line}, column {column}{excerpt}"
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
    for form, words in TABLE:
        if (matched := re.fullmatch(form, text, re.DOTALL)) is not None:
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
    excerpt = f"{begin}{text[start:stop]}{end}"
    return f", in `{excerpt}`" if text else ""
