"""
Answers to completions.

The log-probabilities of a prompt are known at the end. So an answer that begins with them comes
in one event, also in a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic_core import to_json

from pyllama_raw import Delta, FinishReason, Result
from pyllama_raw.results import TokenLogprobs
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.openai.chunks import Chunks, reason_of
from pyllama_raw.serve.openai.logprobs import LegacyLogprobs


class Echo(NamedTuple):
    """What an answer says of its prompt; nothing without echo."""

    text: str = ""
    first: bytes | None = None  # the bytes of its first token


class CompletionCodec(Chunks):
    """
    Writes the answer to a completion. Choices count the outputs of all prompts.

    Args:
        echoes: of each prompt.
        shows_output: otherwise there is the prompt alone.
        with_usage: whether a stream ends with the counts of tokens.
    """

    def __init__(
        self,
        asked: Asked,
        echoes: Sequence[Echo],
        *,
        shows_output: bool,
        with_usage: bool,
    ) -> None:
        super().__init__("cmpl", "text_completion", asked, with_usage=with_usage)
        self._echoes, self._shows_output = echoes, shows_output
        self._lists = asked.params.logprobs is not None
        self._waits = not shows_output or asked.params.prompt_logprobs is not None
        self._unsaid = [echo.text for echo in echoes for _ in range(self._n)]
        self._listed = [LegacyLogprobs() for _ in self._unsaid]
        self._scores: dict[int, tuple[TokenLogprobs, ...]] = {}  # by prompt

    def begin(self) -> bytes:
        """Nothing: the first event has text."""
        return b""

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """The new text."""
        if self._waits:
            return b""
        index = prompt * self._n + delta.index
        logprobs = self._listed[index].take(delta.logprobs) if self._lists else None
        told = b'"text":%b,"logprobs":%b,"finish_reason":null'
        text = to_json(self._say(index) + delta.text)
        return self.frame(index, told % (text, to_json(logprobs)))

    def ended(self, prompt: int, result: Result) -> bytes:
        """Why an output ended; all of it, if it waited."""
        told = self._choice(prompt, result)
        if not self._waits:
            told |= {"text": self._say(told["index"]), "logprobs": None}
        return self.frame(told.pop("index"), to_json(told)[1:-1])

    def done(self, results: Sequence[Sequence[Result]]) -> bytes:
        """The counts of tokens, if they are wanted, and the end."""
        return super().done([list(map(self._shown, each)) for each in results])

    def whole(self, results: Sequence[Sequence[Result]]) -> dict[str, Any]:
        """The answer at once."""
        choices = [
            self._choice(prompt, result)
            for prompt, of_prompt in enumerate(results)
            for result in of_prompt
        ]
        return self.answer(choices, [list(map(self._shown, each)) for each in results])

    def _say(self, index: int) -> str:
        text, self._unsaid[index] = self._unsaid[index], ""
        return text

    def _choice(self, prompt: int, result: Result) -> dict[str, Any]:
        result, echo = self._shown(result), self._echoes[prompt]
        logprobs, text = None, echo.text + result.text
        if self._lists:  # only the first output has the scores of the prompt
            scores = self._scores.setdefault(prompt, result.prompt_logprobs)
            shown = None if echo.first is None else text
            entries = (*scores, *result.logprobs)
            logprobs = LegacyLogprobs(echo.first).take(entries, shown)
        index = prompt * self._n + result.index
        told = {"index": index, "text": text, "logprobs": logprobs}
        return told | reason_of(result)

    def _shown(self, result: Result) -> Result:
        """*result* without an output that nobody wanted."""
        if self._shows_output:
            return result
        reason, counts = FinishReason.LENGTH, replace(result.usage, completion_tokens=0)
        return replace(result, text="", logprobs=(), finish_reason=reason, usage=counts)
