"""
JSON schemas, regular expressions and Lark grammars, by the package llguidance.

Its tokenizer is made once a model, from the pieces of the vocabulary. A request has a
matcher, which gives the mask of the tokens that may come next.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Any, Literal

from pyllama_raw.engine.parts import Reading, at_once
from pyllama_raw.errors import BadSchema, ClosedError, Unsupported
from pyllama_raw.native.arrays import UINT32, zeros
from pyllama_raw.native.vocab import Vocab
from pyllama_raw.sampling.params import MAX_PATTERN

MAX_MADE = 256  # compiled constraints kept: some take a tenth of a second
MAX_VALUES = 2**14  # of a schema
MAX_CHARACTERS = 2**17  # of a schema's texts
INSTALL = 'pip install "pyllama-raw[guidance]"'


class Guidance:
    """Compiles constraints for one vocabulary."""

    def __init__(self, vocab: Vocab, reading: Reading = at_once) -> None:
        """
        Reads the whole vocabulary.

        Args:
            reading: around what reads more of it later.

        Raises:
            Unsupported: llguidance is not installed.
        """
        try:
            import llguidance
        except ImportError:
            text = f"they need llguidance: {INSTALL}"
            raise Unsupported("json_schema, regex and lark", text) from None
        if vocab.kind == "none" or not vocab.eog_tokens:
            raise Unsupported("a constraint", "the vocabulary has no end token")
        self._n_tokens = vocab.n_tokens
        self._lock = Lock()
        self._made: OrderedDict[tuple[str, str], MaskConstraint] = OrderedDict()
        self._matcher: Any = llguidance.LLMatcher
        # In two parts, because no other thread runs while one of them is made.
        plain = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Pieces(vocab, reading)),
            eos_token=sorted(vocab.eog_tokens),
            slices=[],
        )
        self._tokenizer = plain.with_slices(llguidance.LLTokenizer.general_slices())

    def make(
        self, kind: Literal["json_schema", "regex", "lark"], value: Any
    ) -> MaskConstraint:
        """Compile *value*, or find it among the latest. Raises BadSchema with the reason."""
        text = _as_json(value) if kind == "json_schema" else value
        key = kind, text
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
        made = self._compile(kind, text)
        with self._lock:
            self._made[key] = made
            if len(self._made) > MAX_MADE:
                self._made.popitem(last=False)
        return made

    def _compile(self, kind: str, text: str) -> MaskConstraint:
        translate = {
            "json_schema": self._matcher.grammar_from_json_schema,
            "regex": self._matcher.grammar_from_regex,
            "lark": self._matcher.grammar_from_lark,
        }
        try:
            grammar = translate[kind](text)
        except (ValueError, RecursionError) as error:
            raise BadSchema(kind, str(error)) from error
        matcher = self._matcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise BadSchema(kind, str(matcher.get_error()))
        return MaskConstraint(matcher, self._n_tokens)


def _as_json(schema: object) -> str:
    try:
        _check_size(schema)
        return json.dumps(schema)
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
            if len(value) > MAX_PATTERN:
                raise _too_large(f"a text of {len(value)} characters", MAX_PATTERN)
            if n_characters > MAX_CHARACTERS:
                raise _too_large(f"{n_characters} characters", MAX_CHARACTERS)
        elif isinstance(value, Mapping | list | tuple):
            n_values += len(value)
            if n_values > MAX_VALUES:
                raise _too_large(f"{n_values} values", MAX_VALUES)
            waiting += value
            if isinstance(value, Mapping):
                waiting += value.values()


def _too_large(given: str, most: int) -> BadSchema:
    return BadSchema(
        "json_schema", f"it has {given} or more, at most {most} are allowed"
    )


class MaskConstraint:
    """A compiled constraint without a state."""

    def __init__(self, matcher: Any, n_tokens: int) -> None:
        self._matcher, self._n_tokens = matcher, n_tokens

    def start(self) -> MaskState:
        """For one request, at its beginning."""
        return MaskState(self._matcher.deep_copy(), self._n_tokens)


class MaskState:
    """Where one request is in its constraint, and the mask of what may follow."""

    def __init__(self, matcher: Any, n_tokens: int) -> None:
        self._empty = zeros(UINT32, (n_tokens + 31) // 32)
        self.mask = self._empty[:]
        self._matcher = matcher
        self._is_current = False

    @property
    def error(self) -> str:
        """Why nothing can follow; empty if something can."""
        return str(self._matcher.get_error())

    def prepare(self) -> None:
        """Fill the mask; all zero, which fails the row, if nothing can follow."""
        if self._is_current:
            return  # the step that wanted it sampled nothing
        address, n_words = self.mask.buffer_info()
        self._matcher.unsafe_compute_mask_ptr(address, 4 * n_words)
        if self._matcher.is_error():
            self.mask[:] = self._empty
        self._is_current = True

    def accept(self, token: int) -> None:
        """Go on after *token*."""
        self._matcher.consume_token(token)
        self._is_current = False


class _Pieces:
    """The vocabulary as llguidance.TokenizerWrapper wants it."""

    def __init__(self, vocab: Vocab, reading: Reading) -> None:
        self._vocab, self._reading = vocab, reading
        self.eos_token_id = min(vocab.eog_tokens)
        self.bos_token_id = vocab.bos
        self.tokens = [
            piece or b"\xff" + vocab.piece(token, special=True)
            for token, piece in enumerate(vocab.pieces)
        ]  # 0xff, which is in no text, marks names of control tokens

    def __call__(self, text: str) -> list[int]:
        try:
            return self._reading(
                lambda: self._vocab.tokenize(
                    text, add_special=False, parse_special=False
                ).tolist()
            )
        except ClosedError:  # what is being compiled will never be used
            return []
