"""
JSON schemas, regular expressions and Lark grammars, by the package llguidance.

Its tokenizer is made once a model, from the pieces of the vocabulary. A request has a
matcher, which gives the mask of the tokens that may come next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any

from pyllama_raw.engine.parts import Reading, at_once
from pyllama_raw.errors import BadSchema, ClosedError, Unsupported
from pyllama_raw.native.guidance import Kind, MaskTokenizer, Matcher
from pyllama_raw.native.vocab import Vocab
from pyllama_raw.options.ascii_classes import with_ascii_classes
from pyllama_raw.options.sampling import MAX_PATTERN
from pyllama_raw.options.schemas import rewritten

MAX_MADE = 256  # compiled constraints kept: some take a tenth of a second
MAX_TOKENIZERS = 4  # kept for grammars that name tokens: each has the whole vocabulary
MAX_VALUES = 2**14  # of a schema
MAX_CHARACTERS = 2**17  # of a schema's texts
MAX_NAMES = 1000  # of one mapping: the time to compile them is quadratic
Tokenize = Callable[[bytes], Sequence[int]]
NUMBER = re.compile(r"<\[(\d{1,9})\]>")


class Guidance:
    """Compiles constraints for one vocabulary; any thread may call it."""

    def __init__(self, vocab: Vocab, reading: Reading = at_once) -> None:
        """
        Reads the whole vocabulary.

        Args:
            reading: around what reads more of it later.

        Raises:
            Unsupported: the vocabulary has no end token, or no llguidance can be loaded.
        """
        if vocab.kind == "none" or not vocab.eog_tokens:
            raise Unsupported("a constraint", "the vocabulary has no end token")

        read = partial(vocab.tokenize, add_special=False, parse_special=False)

        def tokenize(text: bytes) -> Sequence[int]:
            try:
                return reading(partial(read, text.decode()))
            except ClosedError:  # what is being compiled will never be used
                return ()

        pieces = _pieces(vocab)
        made = partial(_without, pieces, sorted(vocab.eog_tokens), tokenize)
        tokenizers = lru_cache(MAX_TOKENIZERS)(made)
        try:
            tokenizers(frozenset())
        except ImportError as error:
            text = f"they need llguidance 1.9 or later, below 2: {error}"
            raise Unsupported("json_schema, regex and lark", text) from None
        # Concurrent callers may compile the same grammar twice.
        self._compile = lru_cache(MAX_MADE)(partial(_compiled, pieces, tokenizers))

    def make(self, kind: Kind, value: Any) -> partial[MaskState]:
        """
        Compile *value*, or find it among the latest; gives states at its beginning.

        A token that a Lark grammar names by its number has no text there, so it is only where
        the grammar names it.

        Raises:
            BadSchema: it cannot be used; the error has the reason.
        """
        text = _as_json(value) if kind == "json_schema" else value
        if kind == "regex":
            text = with_ascii_classes(text)
        made: partial[MaskState] = self._compile(kind, text)
        return made


def _without(
    pieces: Sequence[bytes],
    ends: Sequence[int],
    tokenize: Tokenize,
    named: frozenset[int],
) -> MaskTokenizer:
    """A vocabulary in which the tokens *named* have no text."""
    names = [pieces[token] for token in named]
    rest = [b"\xff" + p if t in named else p for t, p in enumerate(pieces)]

    def tokenize_without(text: bytes) -> Sequence[int]:
        if any(name in text for name in names):
            return _longest(rest, text)
        return tokenize(text)

    return MaskTokenizer(rest, ends, tokenize_without)


def _compiled(
    pieces: Sequence[bytes],
    tokenizers: Callable[[frozenset[int]], MaskTokenizer],
    kind: Kind,
    text: str,
) -> partial[MaskState]:
    numbers = map(int, NUMBER.findall(text) if kind == "lark" else ())
    found = {token for token in numbers if token < len(pieces)}
    named = frozenset(token for token in found if pieces[token][0] != 0xFF)
    return _compile(tokenizers(named), kind, text)


def checked_schema(schema: object) -> str:
    """*schema* as JSON for a Lark grammar. Raises BadSchema: it cannot be used."""
    text = _as_json(schema)
    _check(text)
    return text


@lru_cache(MAX_MADE)
def _check(text: str) -> None:
    _compile(_bytes(), "json_schema", text)


@cache
def _bytes() -> MaskTokenizer:
    """A vocabulary of bytes, which is enough to check schemas."""
    pieces = [*(bytes([byte]) for byte in range(256)), b"\xff<end>"]
    return MaskTokenizer(pieces, [256], None)


def _compile(tokenizer: MaskTokenizer, kind: Kind, text: str) -> partial[MaskState]:
    """With its first mask, which shows mistakes that compiling does not."""
    matcher = Matcher.compile(tokenizer, kind, text)
    matcher.compute_mask()
    if matcher.error:
        raise BadSchema(kind, matcher.error)
    return partial(MaskState, matcher)


def _as_json(schema: object) -> str:
    try:
        _check_size(schema)
        return json.dumps(rewritten(schema))
    except BadSchema:
        raise
    except Exception as error:  # whatever stands in it
        raise BadSchema("json_schema", f"it is no JSON: {error}") from error


def _check_size(schema: object) -> None:
    """Value by value, because no other thread runs while C writes all of them."""
    waiting, n_values, n_characters = [schema], 1, 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            n_characters += len(value)
            _check_count(len(value), "characters in one text", MAX_PATTERN)
            _check_count(n_characters, "characters", MAX_CHARACTERS)
        elif isinstance(value, Mapping | list | tuple):
            n_values += len(value)
            _check_count(n_values, "values", MAX_VALUES)
            waiting += value
            if isinstance(value, Mapping):
                _check_count(len(value), "names in one mapping", MAX_NAMES)
                waiting += value.values()


def _check_count(count: int, what: str, most: int) -> None:
    if count > most:
        text = f"it has {count} or more {what}, at most {most} are allowed"
        raise BadSchema("json_schema", text)


class MaskState:
    """
    Place of one request in its constraint, and the mask of what may follow.

    It shares the matcher of the constraint up to its first token, because a copy takes 0.3 ms
    and all outputs of a request begin in the same step.
    """

    def __init__(self, compiled: Matcher) -> None:
        self._matcher, self._is_shared = compiled, True
        self.mask = compiled.mask[:]
        self._is_current = True

    @property
    def error(self) -> str:
        """Why nothing can follow; empty if something can."""
        return self._matcher.error

    def prepare(self) -> None:
        """Fill the mask; all zero, which fails the row, if nothing can follow."""
        if not self._is_current:  # else the step that wanted it sampled nothing
            self._matcher.compute_mask()
            self._is_current = True

    def accept(self, token: int) -> None:
        """Go on after *token*."""
        if self._is_shared:
            self._matcher, self._is_shared = self._matcher.copy(self.mask), False
        self._matcher.accept(token)
        self._is_current = False


def _longest(pieces: Sequence[bytes], text: bytes) -> list[int]:
    """Tokens of *text*, each the longest that fits; of few texts, so nothing is kept."""
    ids = {piece: token for token, piece in enumerate(pieces) if piece in text}
    found: list[int] = []
    while text:
        piece = max((p for p in ids if text.startswith(p)), key=len, default=b"")
        if not piece:
            return []
        found.append(ids[piece])
        text = text[len(piece) :]
    return found


def _pieces(vocab: Vocab) -> list[bytes]:
    """0xff, which is in no text, marks the names of control tokens."""
    return [
        piece or b"\xff" + vocab.piece(token, special=True)
        for token, piece in enumerate(vocab.pieces)
    ]
