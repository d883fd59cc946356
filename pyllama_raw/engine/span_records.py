"""
Tokens with spans in a file, where other processes read them.

The numbers of rows are of one engine, so a file has keys instead: each row is -1, and behind
the tokens is a record of each span, then their number, below 0. Tokens without spans are what
they are. All of it are C ints.
"""

from __future__ import annotations

from array import array

from pyllama_raw.core.spans import Spans
from pyllama_raw.engine.span_keys import SpanKeys
from pyllama_raw.engine.state_file import TOKEN_BYTES, BadFile

KEY_BYTES = 32
_ROW = -1
_FACTS = 3  # start, stop, n_pos
_RECORD = _FACTS + KEY_BYTES // TOKEN_BYTES  # ints


def to_file(tokens: bytes, spans: Spans) -> bytes:
    """*tokens*, one C int each, as they are written; *spans* are whole in them."""
    if not spans:
        return tokens
    ints, records = array("i", tokens), array("i")
    for span in spans:
        assert len(span.key) == KEY_BYTES
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
    n_spans = max(-ints[-1], 0)
    n_tokens = len(ints) - n_spans * _RECORD - bool(n_spans)
    if n_tokens < 1:
        raise BadFile("more spans than tokens")
    tokens, end, n_rows = ints[:n_tokens], 0, 0
    for at in range(n_tokens, n_tokens + n_spans * _RECORD, _RECORD):
        start, stop, n_pos = ints[at : at + _FACTS]
        if not (end <= start < stop <= n_tokens and 1 <= n_pos <= stop - start):
            raise BadFile("a span that is none")
        number = keys.number(ints[at + _FACTS : at + _RECORD].tobytes())
        tokens[start:stop] = _rows(number, stop - start)
        end, n_rows = stop, n_rows + stop - start
    if n_rows != sum(1 for token in ints[:n_tokens] if token == _ROW) or (
        n_rows != sum(1 for token in tokens if token < 0)
    ):
        raise BadFile("rows of no span")
    return tokens


def _rows(number: int, n_rows: int) -> array[int]:
    return array("i", [number]) * n_rows
