"""
Parts of answers in OpenAI's words: events, counts and log-probabilities.

A token that is no whole UTF-8 is told with escapes, because JSON has no bytes.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from time import time
from typing import Any
from uuid import uuid4

from pydantic_core import to_json

from pyllama_raw import FinishReason, Result
from pyllama_raw.results import TokenLogprobs
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.codec import Codec, timings
from pyllama_raw.serve.events import DONE, event

LEAST = -9999.0  # JSON has no infinity


def usage(results: Sequence[Sequence[Result]]) -> dict[str, Any]:
    """Tokens of each prompt, which its outputs share, and of all outputs."""
    n_prompt = sum(of_prompt[0].usage.prompt_tokens for of_prompt in results)
    n_cached = sum(of_prompt[0].usage.cached_tokens for of_prompt in results)
    outputs = [each for of_prompt in results for each in of_prompt]
    n_output = sum(each.usage.completion_tokens for each in outputs)
    n_reasoning = sum(each.usage.reasoning_tokens for each in outputs)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_output,
        "total_tokens": n_prompt + n_output,
        "prompt_tokens_details": {"cached_tokens": n_cached},
        "completion_tokens_details": {"reasoning_tokens": n_reasoning},
    }


def reason_of(result: Result) -> dict[str, Any]:
    """Why an output ended, in the words that clients know, and in ours if there are none."""
    if result.finish_reason is FinishReason.STOP:
        return {"finish_reason": "tool_calls" if result.calls_tools else "stop"}
    told = {"finish_reason": "length"}  # all others cut the text
    if result.finish_reason is not FinishReason.LENGTH:
        told["x_finish"] = str(result.finish_reason)
    return told


class Chunks(Codec):
    """
    Writes frames of one answer. The prefix, which all have in common, is rendered once.

    Args:
        kind: of the object, such as "chat.completion.chunk".
        with_usage: whether a stream ends with the counts of tokens.
    """

    def __init__(
        self, prefix: str, kind: str, asked: Asked, *, with_usage: bool
    ) -> None:
        self.head = {
            "id": f"{prefix}-{uuid4().hex}",
            "object": kind,
            "created": int(time()),
            "model": asked.found.name,
        }
        self._n, self._with_usage = asked.params.n, with_usage
        self._before = b"data: %b" % to_json(self.head)[:-1] + b',"choices":[{"index":'
        self._after = b'}],"usage":null}\n\n' if with_usage else b"}]}\n\n"

    def frame(self, index: int, choice: bytes) -> bytes:
        """An event with one choice, whose other fields are in *choice*."""
        return b"%b%d,%b%b" % (self._before, index, choice, self._after)

    def done(self, results: Sequence[Sequence[Result]]) -> bytes:
        """The counts of tokens, if they are wanted, and the end."""
        if not self._with_usage:
            return DONE
        return event(self.answer([], results)) + DONE

    def answer(
        self, choices: list[dict[str, Any]], results: Sequence[Sequence[Result]]
    ) -> dict[str, Any]:
        """An object with *choices*, the counts of all outputs, and times of the first one."""
        first = results[0][0]
        times = timings(first, first.usage.completion_tokens)
        told = {"choices": choices, "usage": usage(results), "timings": times}
        return self.head | told


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
        pieces, nothing = [*first, *(e.piece for e in entries)], [None] * len(first)
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
