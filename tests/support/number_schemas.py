"""Schemas about numbers, drawn at random, and outputs that follow a schema, without a model."""

import re
from collections.abc import Iterator
from decimal import Decimal, localcontext
from json import dumps, loads
from random import Random
from typing import Any

import jsonschema
import numpy as np

from pyllama_raw.engine.guidance import Guidance
from pyllama_raw.errors import BadSchema, SamplingFailed
from pyllama_raw.native.sampler import Grammar, RowSampler
from pyllama_raw.native.vocab import Vocab
from tests.support.schemas import Schema

MAX_BYTES = 200  # of an output
HUGE = re.compile(rb"[eE][+-]?[0-9]{4}")  # an exponent that Decimal cannot divide
END = 0.3  # how often an output ends where it may

STEPS = [1, 0.5, 0.25, 0.1, 0.01, 3, 7, 10, 2.5, 0.3]
LARGE = [2**31, 2**53 - 1, 2**53, 2**53 + 1, 2**63, 10**18, -(2**53) - 1, -(10**20)]
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def number(chance: Random) -> float:
    """Often whole, often near zero, seldom large."""
    match chance.randrange(6):
        case 0:
            return chance.choice(LARGE)
        case 1 | 2:
            return chance.randint(-12, 12)
        case 3:
            return chance.randint(-2000, 2000)
        case _:
            return round(chance.uniform(-3, 3), chance.randint(1, 4))


def plain(chance: Random) -> Schema:
    """Of one number."""
    if chance.random() < 0.15:
        return {"const": number(chance)}
    if chance.random() < 0.15:
        return {"enum": [number(chance) for _ in range(3)]}
    schema: Schema = {"type": chance.choice(["number", "number", "integer"])}
    low = number(chance)
    if chance.random() < 0.8:
        schema[chance.choice(["minimum", "exclusiveMinimum"])] = low
    if chance.random() < 0.8:
        high = low + chance.choice([0.5, 1, 0.25, 2, 40, 1.5])
        schema[chance.choice(["maximum", "exclusiveMaximum"])] = high
    if chance.random() < 0.2:
        schema["multipleOf"] = chance.choice(STEPS)
    return schema


def placed(chance: Random) -> Schema:
    """A plain one where a schema may stand."""
    inner = plain(chance)
    bounds = {name: inner[name] for name in BOUNDS if name in inner}
    match chance.randrange(8):
        case 0:
            return {"anyOf": [inner, plain(chance)]}
        case 1:
            return {"allOf": [{"type": "number"}, *({k: v} for k, v in bounds.items())]}
        case 2:
            properties = {"a": inner}
            return {"type": "object", "properties": properties, "required": ["a"],
                    "additionalProperties": False}  # fmt: skip
        case 3:
            return {"type": "array", "items": inner, "minItems": 1, "maxItems": 2}
        case 4:
            return {"$defs": {"n": inner}, "$ref": "#/$defs/n", **bounds}
        case _:
            return inner


def outputs(
    guidance: Guidance, vocab: Vocab, schema: Schema, count: int, chance: Random
) -> Iterator[str]:
    """
    Finished outputs of random tokens.

    Raises:
        BadSchema: it is refused.
    """
    compiled = guidance.make("json_schema", schema)
    for _ in range(count):
        state, written = compiled(), bytearray()
        while len(written) < MAX_BYTES:
            state.prepare()
            bits = np.frombuffer(state.mask, np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            assert len(allowed), f"a dead end after {written!r}: {schema}"
            ends = vocab.eog_tokens.intersection(allowed.tolist())
            if ends and (len(ends) == len(allowed) or chance.random() < END):
                if not HUGE.search(written):
                    yield written.decode()
                break
            token = int(chance.choice(allowed))
            if token not in vocab.eog_tokens:
                written += vocab.piece(token)
                state.accept(token)


def is_valid(text: str, schema: Schema) -> bool:
    """By jsonschema, with exact numbers."""

    def read(raw: str) -> Any:
        return loads(raw, parse_float=Decimal)

    validator = jsonschema.Draft202012Validator(read(dumps(schema)))
    with localcontext(prec=2000):
        return bool(validator.is_valid(read(text)))


def invalid(
    guidance: Guidance, vocab: Vocab, n_schemas: int, n_each: int, seed: int
) -> tuple[int, int, list[tuple[Schema, str]]]:
    """How many finished, how many schemas were refused, and what is not valid."""
    n_finished, n_refused, wrong = 0, 0, []
    for index in range(n_schemas):
        chance = Random(f"{seed} {index}")  # noqa: S311 - no secret
        schema = placed(chance)
        try:
            for text in outputs(guidance, vocab, schema, n_each, chance):
                n_finished += 1
                if not is_valid(text, schema):
                    wrong.append((schema, text))
        except BadSchema:
            n_refused += 1
    return n_finished, n_refused, wrong


def follows(constraint: Any, vocab: Vocab, text: str) -> bool:
    """Whether *text*, byte by byte, is a whole output of *constraint*. For llama-bytes."""
    state, end = constraint(), min(vocab.eog_tokens)
    tokens = [*text.encode(), end]
    if isinstance(state, Grammar):
        return _is_sampled(RowSampler(grammar=state), vocab, tokens)
    for token in tokens:
        state.prepare()
        if token == end:
            return bool(state.mask[token // 32] >> (token % 32) & 1)
        state.accept(token)
        if state.error:
            return False
    return True


def _is_sampled(sampler: RowSampler, vocab: Vocab, tokens: list[int]) -> bool:
    for token in tokens:
        logits = np.full(vocab.n_tokens, -np.inf, np.float32)
        logits[token] = 0
        try:
            sampler.sample(logits)
        except SamplingFailed:
            return False
    return True
