"""Answers in the words of llama.cpp's server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import exp, isfinite
from typing import Any

from pyllama_raw import Delta, FinishReason, Result
from pyllama_raw.results import LengthLimit, StopString, TokenLogprobs
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.codec import Codec, timings
from pyllama_raw.serve.events import event
from pyllama_raw.serve.native.body import NativeBody, settings

NO_SLOT = -1  # the engine may move a request while it runs


class NativeCodec(Codec):
    """Writes the answer to one or more prompts; output *index* counts through all."""

    def __init__(self, asked: Asked, body: NativeBody, texts: Sequence[str]) -> None:
        self._asked, self._body = asked, body
        self._texts = texts  # of the prompts
        self._has_output = body.n_most != 0
        self._n_predicted: defaultdict[int, int] = defaultdict(int)

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """The new text; with probabilities each token has an event of its own."""
        if not self._has_output:
            return b""
        index, frames = prompt * self._asked.params.n + delta.index, []
        groups = [delta.token_ids]
        if len(delta.logprobs) > 1:
            groups = [(token,) for token in delta.token_ids]
        for at, tokens in enumerate(groups):
            self._n_predicted[index] += len(tokens)
            told: dict[str, Any] = {
                "index": index,
                "content": delta.text if at == len(groups) - 1 else "",
                "tokens": tokens,
                "stop": False,
                "id_slot": NO_SLOT,
                "tokens_predicted": self._n_predicted[index],
                "tokens_evaluated": len(self._asked.prompts[prompt]),
            }
            entries = delta.logprobs[at : at + len(tokens)]
            frames.append(event(told | self._probabilities(entries)))
        return b"".join(frames)

    def ended(self, prompt: int, result: Result) -> bytes:
        """All but the text, which was told."""
        told = self._told(prompt, result) | {"content": "", "tokens": []}
        told.pop("completion_probabilities", None)
        return event(self._chosen(told))

    def whole(self, results: Sequence[Sequence[Result]]) -> Any:
        """An object, or a list of them if there is more than one output."""
        told = [
            self._chosen(self._told(prompt, result))
            for prompt, of_prompt in enumerate(results)
            for result in of_prompt
        ]
        return told[0] if len(told) == 1 else told

    def _told(self, prompt: int, result: Result) -> dict[str, Any]:
        text, tokens = result.text, result.token_ids
        if not self._has_output:
            text, tokens = "", ()
        stop, n_prompt = result.finish_detail, result.usage.prompt_tokens
        asked, engine = self._asked, self._asked.found.engine
        n_ctx = engine.n_ctx_slot
        shown = settings(asked.params, engine) | {"stream": asked.streams}
        shown["lora"] = dict(asked.options.get("adapters") or {})
        told: dict[str, Any] = {
            "index": prompt * asked.params.n + result.index,
            "content": text,
            "tokens": tokens if self._body.return_tokens else [],
            "id_slot": NO_SLOT,
            "stop": True,
            "model": asked.found.name,
            "tokens_predicted": len(tokens),
            "tokens_evaluated": n_prompt,
            "tokens_cached": result.usage.cached_tokens,
            "generation_settings": shown,
            "prompt": self._texts[prompt],
            "has_new_line": "\n" in text,
            "truncated": stop is LengthLimit.SLOT or n_prompt + len(tokens) > n_ctx,
            "stop_type": _stop_type(result),
            "stopping_word": stop.text if isinstance(stop, StopString) else "",
            "timings": timings(result, len(tokens)),
        }
        return told | self._probabilities(result.logprobs)

    def _probabilities(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        if not entries or not self._has_output:
            return {}
        is_post = self._asked.params.logprobs_of == "sampler"
        name = "top_probs" if is_post else "top_logprobs"
        listed = []
        for entry in entries:
            pairs = zip(entry.top, entry.top_pieces, strict=True)
            top = [
                _token(token, logprob, piece, is_post)
                for (token, logprob), piece in pairs
                if isfinite(logprob)  # others cannot come
            ]
            told = _token(entry.token_id, entry.logprob, entry.piece, is_post)
            listed.append(told | {name: top})
        return {"completion_probabilities": listed}

    def _chosen(self, told: dict[str, Any]) -> dict[str, Any]:
        names = self._body.response_fields
        return {n: v for n in names for v in _found(told, n)} if names else told


def _stop_type(result: Result) -> str:
    if result.finish_reason is not FinishReason.STOP:
        return "limit"
    return "word" if isinstance(result.finish_detail, StopString) else "eos"


def _token(token: int, logprob: float, piece: bytes, is_post: bool) -> dict[str, Any]:
    text = piece.decode(errors="ignore")
    value = {"prob": exp(logprob)} if is_post else {"logprob": logprob}
    return {"id": token, "token": text, "bytes": list(piece), **value}


def _found(told: dict[str, Any], name: str) -> Iterable[Any]:
    """The field, if there is one; a slash leads into an inner object."""
    value: Any = told
    for part in name.split("/"):
        if not isinstance(value, dict) or part not in value:
            return
        value = value[part]
    yield value
