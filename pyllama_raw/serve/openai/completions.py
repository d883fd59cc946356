"""
`/v1/completions`: texts and token ids that are to go on, and answers.

The log-probabilities of a prompt are known at the end. So an answer that begins with them comes
in one event, also in a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import Field, Strict
from pydantic_core import to_json

from pyllama_raw import AsyncEngine, Delta, FinishReason, Prompt, Result
from pyllama_raw.results import Operation, TokenLogprobs
from pyllama_raw.serve import fields
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.body import NO_LIMIT, Limit, TextBody
from pyllama_raw.serve.failures import refused
from pyllama_raw.serve.openai.chunks import Chunks, LegacyLogprobs, reason_of
from pyllama_raw.serve.service import Service

T = TypeVar("T")
Several = Annotated[list[T], Field(min_length=1, fail_fast=True)]
TokenIds = Several[Annotated[int, Strict()]]
GAP = ("prefix", "suffix", "middle")


class Echo(NamedTuple):
    """What an answer says of its prompt; nothing without echo."""

    text: str = ""
    first: bytes | None = None  # the bytes of its first token


class CompletionBody(TextBody):
    """Prompts that are to go on."""

    rules: ClassVar[fields.Rules] = fields.COMPLETIONS

    prompt: str | TokenIds | Several[str] | Several[TokenIds]
    """A text or token ids, or a list of them."""
    n_predict: Limit | None = None
    """llama.cpp's name of max_tokens, which wins; -1: what is left of the context."""
    echo: bool | None = None
    """Whether the prompt comes before the output; with max_tokens 0, alone."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Likely tokens that are listed with each token."""
    best_of: int | None = None
    """As many as n, if it is given."""
    suffix: str | None = None
    """The text behind the output, of models that can fill gaps."""

    def model_post_init(self, context: Any) -> None:  # noqa: ARG002
        """Take n_predict for max_tokens."""
        if self.max_tokens is None and self.n_predict not in NO_LIMIT:
            self.max_tokens = self.n_predict

    async def asked(self, service: Service) -> tuple[Asked, Sequence[Echo]]:
        """As the engine takes it; raises Failure and PyllamaError."""
        found = service.find(self.model, Operation.GENERATE)
        if self.best_of not in (None, self.n or 1):
            reason = "outputs are not compared: give n, or the same number"
            raise refused("best_of", reason, "unsupported")
        given = self.prompt
        is_one = isinstance(given, str) or isinstance(given[0], int)
        several: Any = [given] if is_one else given
        service.check_texts("prompt", len(several))
        service.check_outputs(found, len(several), self.n)
        more: dict[str, Any] = {}
        if self.logprobs is not None:
            more["logprobs"] = self.logprobs
        if self.echo:
            more["prompt_logprobs"] = self.logprobs
            if self.max_tokens == 0:
                more["max_tokens"] = 1  # the engine makes one at least
        params = self.params(found, service.config, **more)
        told = [await self._told(found.engine, prompt) for prompt in several]
        prompts, echoes = zip(*told, strict=True)
        options, streams = self.options(found, service.config), bool(self.stream)
        return Asked(found, prompts, params, options, streams, self.names), echoes

    async def _told(self, engine: AsyncEngine, prompt: Any) -> tuple[Prompt, Echo]:
        """*prompt* for the engine, and what is told of it."""
        if self.suffix:
            return await self._gap(engine, prompt, self.suffix), Echo()
        if not self.echo:
            return prompt, Echo()
        tokens = await engine.tokenize(prompt)
        text = prompt if isinstance(prompt, str) else await engine.detokenize(tokens)
        return tokens, Echo(text, (await engine.pieces(tokens[:1]))[0])

    async def _gap(self, engine: AsyncEngine, prompt: Any, suffix: str) -> list[int]:
        """The tokens that ask for what is between *prompt* and *suffix*."""
        vocab = engine.info.vocab
        if not {*GAP} <= vocab.fill.keys() or self.echo or not isinstance(prompt, str):
            reason = "it goes with models that have tokens for gaps, and without echo"
            raise refused("suffix", reason, "unsupported")
        tokens = [vocab.bos.token_id] if vocab.adds_bos and vocab.bos else []
        for name, text in zip(GAP, (prompt, suffix, ""), strict=True):
            of_text = await engine.tokenize(
                text, add_special=False, parse_special=False
            )
            tokens += [vocab.fill[name].token_id, *of_text]
        return tokens


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
        told = b'"text":%b,"logprobs":%b,"finish_reason":null'
        text = to_json(self._say(index) + delta.text)
        return self.frame(index, told % (text, to_json(logprobs)))

    def ended(self, prompt: int, result: Result) -> bytes:
        """Why an output ended; all of it, if it waited."""
        told = self._choice(prompt, result)
        if not self._waits:
            told |= {"text": self._say(told["index"]), "logprobs": None}
        return self.frame(told.pop("index"), to_json(told)[1:-1])

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
