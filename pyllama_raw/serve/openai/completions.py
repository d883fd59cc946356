"""`/v1/completions`: texts and token ids that are to go on."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from fastapi import APIRouter
from pydantic import Field, Strict
from starlette.responses import Response

from pyllama_raw import AsyncEngine, Prompt
from pyllama_raw.results import Operation
from pyllama_raw.serve.answer import TextAnswer
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.body import TextBody
from pyllama_raw.serve.failures import Failure
from pyllama_raw.serve.openai.completion_codec import CompletionCodec, Echo
from pyllama_raw.serve.service import Service

T = TypeVar("T")
Several = Annotated[list[T], Field(min_length=1, fail_fast=True)]
TokenIds = Several[Annotated[int, Strict()]]
GAP = ("prefix", "suffix", "middle")


class CompletionBody(TextBody):
    """Prompts that are to go on."""

    prompt: str | TokenIds | Several[str] | Several[TokenIds]
    """A text or token ids, or a list of them."""
    echo: bool | None = None
    """Whether the prompt comes before the output; with max_tokens 0, alone."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Likely tokens that are listed with each token."""
    best_of: int | None = None
    """As many as n, if it is given."""
    suffix: str | None = None
    """The text behind the output, of models that can fill gaps."""

    async def asked(self, service: Service) -> tuple[Asked, list[Echo]]:
        """As the engine takes it; raises Failure and PyllamaError."""
        found = service.find(self.model, Operation.GENERATE)
        if self.best_of not in (None, self.n or 1):
            raise _unsupported(
                "best_of", "outputs are not compared: give n, or the same"
            )
        more: dict[str, Any] = {}
        if self.logprobs is not None:
            more["logprobs"] = self.logprobs
            if self.echo:
                more["prompt_logprobs"] = self.logprobs
        if self.echo and self.max_tokens == 0:
            more["max_tokens"] = 1  # the engine makes one at least
        params = self.params(found, **more)
        prompts = self._prompts()
        echoes: list[Echo] = []
        if self.suffix:
            prompts = [await self._gap(found.engine, prompt) for prompt in prompts]
        elif self.echo:
            pairs = [await _echoed(found.engine, prompt) for prompt in prompts]
            prompts, echoes = [ids for ids, _ in pairs], [echo for _, echo in pairs]
        options = self.options(found, service.config)
        streams = bool(self.stream)
        asked = Asked(found, tuple(prompts), params, options, streams, self.names)
        return asked, echoes

    def _prompts(self) -> list[Prompt]:
        given = self.prompt
        if isinstance(given, str) or isinstance(given[0], int):
            return [given]
        return list(given)

    async def _gap(self, engine: AsyncEngine, prompt: Prompt) -> list[int]:
        """The tokens that ask for what is between *prompt* and the suffix."""
        vocab = engine.info.vocab
        if not {*GAP} <= vocab.fill.keys():
            raise _unsupported("suffix", "the model has no tokens for gaps in texts")
        if self.echo or not isinstance(prompt, str):
            raise _unsupported("suffix", "it goes with texts, and without echo")
        assert self.suffix is not None
        tokens = [vocab.bos.token_id] if vocab.adds_bos and vocab.bos else []
        for name, text in zip(GAP, (prompt, self.suffix, ""), strict=True):
            tokens.append(vocab.fill[name].token_id)
            tokens += await engine.tokenize(
                text, add_special=False, parse_special=False
            )
        return tokens


async def _echoed(engine: AsyncEngine, prompt: Any) -> tuple[list[int], Echo]:
    """*prompt* as tokens, and what is told of it."""
    is_text = isinstance(prompt, str)
    tokens = await engine.tokenize(prompt)
    first = await engine.pieces(tokens[:1])
    text = prompt if is_text else await engine.detokenize(tokens)
    return tokens, Echo(text, b"".join(first))


def _unsupported(name: str, reason: str) -> Failure:
    return Failure(400, "unsupported", f"{name}: {reason}", name)


def routes(service: Service) -> APIRouter:
    """Endpoints of completions."""
    router = APIRouter(tags=["completions"])

    @router.post("/v1/completions")
    async def completions(body: CompletionBody) -> Response:
        """Go on with texts."""
        asked, echoes = await body.asked(service)
        shows_output = body.max_tokens != 0
        codec = CompletionCodec(asked, echoes, shows_output=shows_output)
        await codec.count(body.stream_options)
        return TextAnswer(service, asked, codec)

    return router
