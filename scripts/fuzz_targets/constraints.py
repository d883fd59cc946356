"""Schemas, grammars and patterns: each is tried apart, as an engine does, then followed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from pyllama_raw.errors import BadGrammar, BadSchema
from scripts.fuzz_targets.target import Target, Try


def _constraint(kind: str, text_of: Callable[[bytes], str]) -> Try:
    """Try it apart, as an engine does, then compile it here and go some way through it."""
    from pyllama_raw.engine import guidance

    tokenizer = guidance.MaskTokenizer(guidance.BYTES, [256], None)
    trials = guidance.Trials(guidance.BYTES, [256])

    def attempt(data: bytes) -> None:
        text = text_of(data)
        trials.n_bytes(kind, text)  # type: ignore[arg-type]
        matcher = guidance._compile(tokenizer, kind, text)  # type: ignore[arg-type]
        rng = random.Random(data)  # noqa: S311 - repeats
        for _ in range(20):
            matcher.compute_mask()
            bits = int.from_bytes(matcher.mask.tobytes(), "little")
            tokens = [token for token in range(256) if bits >> token & 1]
            if matcher.error or not tokens:
                return
            matcher.accept(rng.choice(tokens))

    return attempt


def _schemas() -> Try:
    from pyllama_raw.engine.guidance import checked_schema

    def text_of(data: bytes) -> str:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = data.decode(errors="replace")
        return checked_schema(value)

    return _constraint("json_schema", text_of)


def _schema_seeds() -> list[bytes]:
    texts = {
        "type": "string",
        "pattern": "^[a-z]{1,5}$",
        "minLength": 1,
        "maxLength": 20,
        "format": "date",
    }
    numbers = {
        "type": "number",
        "minimum": -1.5,
        "exclusiveMaximum": 10,
        "multipleOf": 0.5,
    }
    fields = {"a": texts, "b": numbers, "c": {"$ref": "#/$defs/d"}}
    schemas: list[Any] = [
        True,
        texts,
        numbers,
        {"type": ["integer", "null"], "enum": [1, None]},
        {"type": "object", "properties": fields, "required": ["a"], "additionalProperties": False, "$defs": {"d": {"const": {"x": [1]}}}},
        {"type": "array", "items": {"anyOf": [texts, numbers]}, "prefixItems": [{}], "minItems": 1, "maxItems": 3},
        {"allOf": [{"oneOf": [texts, numbers]}, {"not": {"const": 1}}]},
        {"patternProperties": {"^a": texts}, "minProperties": 1, "maxProperties": 2},
        {"$defs": {"t": {"type": "object", "properties": {"left": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"},
    ]  # fmt: skip
    return [json.dumps(schema).encode() for schema in schemas]


SCHEMA_WORDS = tuple(
    word.encode()
    for word in (
        "type", "object", "array", "string", "number", "integer", "properties", "items", "required", "enum", "const",
        "$ref", "#", "#/$defs/d", "$defs", "anyOf", "allOf", "oneOf", "not", "if", "then", "pattern", "format", "uuid",
        "minimum", "maximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems", "uniqueItems",
        "additionalProperties", "patternProperties", "propertyNames", "dependentSchemas", "prefixItems", "x-guidance",
    )
)  # fmt: skip


def _gbnf() -> Try:
    from pyllama_raw.options.gbnf import to_lark

    def text_of(data: bytes) -> str:
        text = data.decode(errors="surrogateescape")
        return to_lark(
            text,
            "root",
            lambda token: token if isinstance(token, int) and token < 256 else None,
            {256},
        )

    return _constraint("lark", text_of)


def _regex() -> Try:
    from pyllama_raw.options.constraints import with_ascii_classes

    return _constraint(
        "regex", lambda data: with_ascii_classes(data.decode(errors="replace"))
    )


def _lark() -> Try:
    return _constraint("lark", lambda data: data.decode(errors="replace"))


TARGETS = (
    Target("schemas", _schemas, _schema_seeds, (BadSchema,), words=SCHEMA_WORDS),
    Target(
        "gbnf",
        _gbnf,
        lambda: [
            b'root ::= "a" [b-z]* (num | <[65]>){2,3} # c\nnum ::= [0-9]+ ("." [^a\\n\\x41]?)? | "\\u00e4"',
            b"root ::= root | .\n",
        ],
        (BadGrammar, BadSchema),
        words=(b"root", b" ::= ", b"|", b"(", b")", b"*", b"+", b"?", b"{2,3}", b"{,", b"[", b"]", b"^", b'"', b"\\x", b"\\u", b"\\U0010ffff", b"<[1]>", b"!<[2]>", b"\n", b"#", b"."),
    ),
    Target(
        "lark",
        _lark,
        lambda: [
            b'start: "a" rule* -> x\nrule: /[0-9]+/ | TERM{2,3} | %json {"type": "integer"}\nTERM: "b".."z"\n%ignore /\\s+/',
            b'%llguidance {}\nstart: <[65]> gen\ngen[temperature=0.5, capture, stop=""]: /.*/\n%regex {"substring_words": "a b"}',
        ],
        (BadSchema,),
        words=(b"start", b": ", b"|", b"(", b")", b"*", b"+", b"?", b"~2..3", b"{2,3}", b"/", b'"', b"%json ", b"%regex ", b"%ignore ", b"%import ", b"%override ", b"%declare ", b"{}", b"<[1]>", b"<[0-9]>", b"\n", b"//", b"&", b"~", b"..", b"[max_tokens=3]", b"[lazy]", b"@a"),
    ),
    Target(
        "regex",
        _regex,
        lambda: [rb"(a|b)*[c-z\d]{2,5}\w+?(?:x|\p{Lu})\.\s$", rb"^(?i:a)[^\]\-[:alpha:]]\u00e4\x{41}|(?<n>b)&&c"],
        (BadSchema,),
        words=(b"(", b")", b"[", b"]", b"|", b"*", b"+", b"?", b"{1,", b"{1000}", b"\\d", b"\\p{L}", b"\\b", b"(?=", b"(?!", b"(?s:", b"[^", b"--", b"&&", b"~~", b"\\", b"^", b"$", b"."),
    ),
)  # fmt: skip
