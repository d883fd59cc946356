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
    content = []
    for entry in entries:
        tops = zip(entry.top_pieces, entry.top, strict=True)
        top = [_entry(piece, logprob) for piece, (_, logprob) in tops]
        told = _entry(entry.piece, entry.logprob)
        content.append(told | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(piece: bytes, logprob: float) -> dict[str, Any]:
    logprob = max(logprob, LEAST)
    return {"token": _name(piece), "logprob": logprob, "bytes": list(piece)}


def _name(piece: bytes) -> str:
    return piece.decode(errors="backslashreplace")


class LegacyLogprobs:
    """
    `logprobs` of one output of a completion, part by part.

    Args:
        first: the bytes of a first token that nothing is known of.
    """

    def __init__(self, first: bytes | None = None) -> None:
        self._first = () if first is None else (first,)
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
        first, self._first = self._first, ()
        pieces, nothing = (
            [*first, *(entry.piece for entry in entries)],
            [None] * len(first),
        )
        return {
            "tokens": [_name(piece) for piece in pieces],
            "token_logprobs": nothing + [max(e.logprob, LEAST) for e in entries],
            "top_logprobs": nothing + [_likely(entry) for entry in entries],
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


def _likely(entry: TokenLogprobs) -> dict[str, float]:
    """The best token of each name, and the one that is there."""
    tops = zip(entry.top_pieces, entry.top, strict=True)
    named = [(piece, logprob) for piece, (_, logprob) in tops]
    named.append((entry.piece, entry.logprob))
    return {_name(piece): max(logprob, LEAST) for piece, logprob in reversed(named)}
