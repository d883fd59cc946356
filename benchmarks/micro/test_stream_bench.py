"""
Cost of what happens to a token beside scheduling: batch, delivery, text. No model.

Run: python -m pytest benchmarks/micro -q (tests/ does not collect it).
"""

from __future__ import annotations

from array import array
from itertools import count

import pytest

from pyllama_raw.api.preparation import Choice
from pyllama_raw.core.memory.snapshots import n_common
from pyllama_raw.core.request import NewTokens, Request
from pyllama_raw.core.text import Detokenizer, StopStrings
from pyllama_raw.engine.mailbox import Stream
from pyllama_raw.testing import FakeVocab

rows = pytest.mark.parametrize("n_rows", [1, 8, 64, 256])
N_PIECES = 1000


@pytest.mark.native
@pytest.mark.benchmark(group="fill a batch with rows")
@rows
def test_fill_rows(benchmark, n_rows):
    """clear() and add_rows(): a decode step that did not follow from the last one."""
    from pyllama_raw.native.batch import Batch

    batch = Batch(2048)
    tokens, pos, seq_ids = [5] * n_rows, [100] * n_rows, list(range(n_rows))

    def fill() -> None:
        batch.clear()
        batch.add_rows(tokens, pos, seq_ids)

    benchmark(fill)


@pytest.mark.native
@pytest.mark.benchmark(group="fill a batch with one prompt")
@pytest.mark.parametrize("n_tokens", [16, 128, 2048])
def test_fill_prompt(benchmark, n_tokens):
    """clear() and add()."""
    from pyllama_raw.native.batch import Batch

    batch, tokens = Batch(2048), array("i", range(n_tokens))

    def fill() -> None:
        batch.clear()
        batch.add(tokens, 0, 0, True)

    benchmark(fill)


@pytest.mark.benchmark(group="text of 1,000 pieces")
@pytest.mark.parametrize("stop", [(), (b"\n\nUser:",), (b"###", b"e of", "ö".encode())])
@pytest.mark.parametrize("piece", [b" word", "ü".encode()], ids=["ascii", "utf-8"])
def test_detokenize(benchmark, piece, stop):
    """push() of whole pieces, and of pieces that end inside a character."""
    pieces = [piece] * N_PIECES if piece.isascii() else [piece[:1], piece[1:]] * 500

    strings = StopStrings(stop)

    def detokenize() -> None:
        detokenizer = Detokenizer(strings)
        for part in pieces:
            detokenizer.push(part)

    benchmark(detokenize)


@pytest.mark.benchmark(group="deliver a token to each stream, read all")
@rows
def test_deliver(benchmark, n_rows):
    """Append to every stream, take from every stream and make text; no event loop."""
    pieces = FakeVocab().pieces
    requests = [Request(i, array("i", [1]), 10**9) for i in range(n_rows)]
    streams = [Stream(loop=object()) for _ in requests]
    choices = [Choice(0, request, 0, pieces) for request in requests]

    def deliver() -> None:
        for stream, request in zip(streams, requests, strict=True):
            stream.events.append(NewTokens(request.request_id, (97,)))
        for stream, choice in zip(streams, choices, strict=True):
            if choice.take(stream.events.popleft()):
                choice.take_delta()

    benchmark.pedantic(deliver, rounds=300)


@pytest.mark.benchmark(group="common prefix of two prompts")
@pytest.mark.parametrize("n_tokens", [100, 10_000])
def test_common_prefix(benchmark, n_tokens):
    """n_common() of prompts that part at their last token."""
    first = array("i", range(n_tokens))
    second = array("i", [*first[:-1], -1])
    turn = count()

    benchmark(lambda: n_common(first.tobytes(), second.tobytes()) + next(turn))
