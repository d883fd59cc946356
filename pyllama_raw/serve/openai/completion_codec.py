"""
Answers to completions.

The log-probabilities of a prompt are known at the end. So an answer that begins with them comes
in one event, also in a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyllama_raw import Delta, FinishReason, Result
from pyllama_raw.results import TokenLogprobs
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.openai.chunks import Chunks, reason_of
from pyllama_raw.serve.openai.completions import CompletionBody, Echo
from pyllama_raw.serve.openai.logprobs import LegacyLogprobs


class CompletionCodec(Chunks):
    """
    Writes the answer to a completion. Choices count the outputs of all prompts.

    Args:
        echoes: of each prompt.
    """

    def __init__(
        self, asked: Asked, body: CompletionBody, echoes: Sequence[Echo]
    ) -> None:
        usage = body.wants_usage
        super().__init__("cmpl", "text_completion", asked, with_usage=usage)
        self._echoes, self._has_output = echoes, body.max_tokens != 0
        self._lists = asked.params.logprobs is not None
        scores = asked.params.prompt_logprobs is not None
        self._waits = scores or not self._has_output
        self._unsaid = [echo.text for echo in echoes for _ in range(self._n)]
        self._listed = [LegacyLogprobs() for _ in self._unsaid]
        self._scores: dict[int, tuple[TokenLogprobs, ...]] = {}  # by prompt

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """The new text."""
        if self._waits:
            return b""
        index = prompt * self._n + delta.index
        logprobs = self._listed[index].take(delta.logprobs) if self._lists else None
        text = self._say(index) + delta.text
        choice = {"text": text, "logprobs": logprobs, "finish_reason": None}
        return self.frame(index, choice)

    def ended(self, prompt: int, result: Result) -> bytes:
        """Why an output ended; all of it, if it waited."""
        told = self._choice(prompt, result)
        if not self._waits:
            told |= {"text": self._say(told["index"]), "logprobs": None}
        return self.frame(told.pop("index"), told)

    def whole(self, results: Sequence[Sequence[Result]]) -> dict[str, Any]:
        """The answer at once."""
        choices = [
            self._choice(prompt, result)
            for prompt, of_prompt in enumerate(results)
            for result in of_prompt
        ]
        return self.answer(choices, results)

    def answer(
        self, choices: list[dict[str, Any]], results: Sequence[Sequence[Result]]
    ) -> dict[str, Any]:
        """An object with *choices* and the counts of what is shown."""
        shown = [list(map(self._shown, each)) for each in results]
        return super().answer(choices, shown)

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
        if self._has_output:
            return result
        reason, counts = FinishReason.LENGTH, replace(result.usage, completion_tokens=0)
        return replace(result, text="", logprobs=(), finish_reason=reason, usage=counts)
