"""
Log-probabilities as clients of OpenAI's API read them: of chats, and the legacy form.

A token that is no whole UTF-8 is told with escapes, because JSON has no bytes.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from pyllama_raw.results import TokenLogprobs

LEAST = -9999.0  # JSON has no infinity


def chat_logprobs(entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`logprobs` of a choice of a chat."""
    content = [
        _entry(entry.piece, entry.logprob)
        | {
            "top_logprobs": [
                _entry(piece, logprob)
                for piece, (_, logprob) in zip(
                    entry.top_pieces, entry.top, strict=False
                )
            ]
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class LegacyLogprobs:
    """
    `logprobs` of one output of a completion, part by part.

    Args:
        first: the bytes of a first token that nothing is known of.
    """

    def __init__(self, first: bytes | None = None) -> None:
        self._first = first
        self._at = 0  # characters before the next token
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def take(
        self, entries: Sequence[TokenLogprobs], text: str | None = None
    ) -> dict[str, Any]:
        """
        The next tokens.

        Args:
            text: all of it, from its beginning. A token that it does not show, such as one
                that begins prompts, takes no room.
        """
        pieces = [entry.piece for entry in entries]
        logprobs: list[float | None] = [max(e.logprob, LEAST) for e in entries]
        top: list[dict[str, float] | None] = [_likely(entry) for entry in entries]
        if self._first is not None:
            pieces.insert(0, self._first)
            logprobs.insert(0, None)
            top.insert(0, None)
            self._first = None
        return {
            "tokens": [_name(piece) for piece in pieces],
            "token_logprobs": logprobs,
            "top_logprobs": top,
            "text_offset": [self._place(piece, text) for piece in pieces],
        }

    def _place(self, piece: bytes, text: str | None) -> int:
        """Where *piece* begins; the next one begins behind it."""
        at, shown = self._at, self._decoder.decode(piece)
        for form in (shown, shown.removeprefix(" ")):  # some models add a blank
            if text is None or text.startswith(form, at):
                self._at += len(form)
                break
        return at


def _entry(piece: bytes, logprob: float) -> dict[str, Any]:
    logprob = max(logprob, LEAST)
    return {"token": _name(piece), "logprob": logprob, "bytes": list(piece)}


def _name(piece: bytes) -> str:
    return piece.decode(errors="backslashreplace")


def _likely(entry: TokenLogprobs) -> dict[str, float]:
    """The best token of each name, and the one that is there."""
    found: dict[str, float] = {}
    pairs = zip(entry.top_pieces, entry.top, strict=False)
    for piece, (_, logprob) in pairs:
        found.setdefault(_name(piece), max(logprob, LEAST))
    found.setdefault(_name(entry.piece), max(entry.logprob, LEAST))
    return found
