"""
Numbers for the rows of spans, as the tokens of a prompt have them, in memory and in files.

Whatever compares prompts compares ints: so a key of 32 bytes gets a number below 0. A number
is never given to another key. A key that was forgotten gets a new one: what is cached under
the old one is not found again, which is a miss.

The numbers of rows are of one engine, so a file has keys instead: each row is -1, and behind
the tokens is a record of each span, then their number, below 0. Tokens without spans are what
they are. All of it are C ints.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from itertools import count
from threading import Lock

from pyllama_raw.core.spans import Spans
from pyllama_raw.engine.state_file import TOKEN_BYTES, BadFile

MAX_KEYS = 2**16  # about 10 MB
KEY_BYTES = 32
_ROW = -1
_FACTS = 3  # start, stop, n_pos
_RECORD = _FACTS + KEY_BYTES // TOKEN_BYTES  # ints


class SpanKeys:
    """
    The numbers of one engine.

    Thread:
        Any.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        numbers = count(-1, -1)
        self._number = lru_cache(max_keys)(lambda _: next(numbers))
        self._lock = Lock()  # two threads with one new key get one number

    def number(self, key: bytes) -> int:
        """The number of *key*, below 0: equal only for equal keys."""
        with self._lock:
            return self._number(key)


def to_file(tokens: bytes, spans: Spans) -> bytes:
    """*tokens*, one C int each, as they are written; *spans* are whole in them."""
    if not spans:
        return tokens
    ints, records = array("i", tokens), array("i")
    for span in spans:
        assert len(span.key) == KEY_BYTES
        # Numbers of this engine mean nothing elsewhere.
        ints[span.start : span.stop] = _rows(_ROW, span.stop - span.start)
        records.extend((span.start, span.stop, span.n_pos))
        records.frombytes(span.key)
    return (ints + records + array("i", [-len(spans)])).tobytes()


def from_file(ints: array[int], keys: SpanKeys) -> array[int]:
    """
    Tokens that to_file() got, with the numbers of this engine; anybody may have written *ints*.

    Raises:
        BadFile: no tokens are written like that.
    """
    # Whatever stands there was written by anybody.
    n_spans = max(-ints[-1], 0)
    n_tokens = len(ints) - n_spans * _RECORD - bool(n_spans)
    if n_tokens < 1:
        raise BadFile("more spans than tokens")
    tokens, end, n_rows = ints[:n_tokens], 0, 0
    for at in range(n_tokens, n_tokens + n_spans * _RECORD, _RECORD):
        start, stop, n_pos = ints[at : at + _FACTS]
        # In order, apart, and within the tokens.
        if not (end <= start < stop <= n_tokens and 1 <= n_pos <= stop - start):
            raise BadFile("a span that is none")
        number = keys.number(ints[at + _FACTS : at + _RECORD].tobytes())
        tokens[start:stop] = _rows(number, stop - start)
        end, n_rows = stop, n_rows + stop - start
    # Every row belongs to a span, and no other token is below 0.
    if n_rows != sum(1 for token in ints[:n_tokens] if token == _ROW) or (
        n_rows != sum(1 for token in tokens if token < 0)
    ):
        raise BadFile("rows of no span")
    return tokens


def _rows(number: int, n_rows: int) -> array[int]:
    return array("i", [number]) * n_rows
