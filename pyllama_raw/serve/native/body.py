"""
Fields of bodies of llama.cpp's server, in the words of the engine and back.

Defaults are those of the service, then those of SamplingParams, but for the tokens: the rest of
the context.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import BaseModel, Field

from pyllama_raw import AsyncEngine, SamplingParams
from pyllama_raw.errors import InvalidSampling
from pyllama_raw.results import Operation
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.body import SAMPLED, Items, Named, TextBody
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import Failure, refused, renamed
from pyllama_raw.serve.native.prompts import (
    Prompts,
    TokenId,
    n_texts,
    prompts_of,
    tokens_of,
)
from pyllama_raw.serve.service import Found, Service

NAMES = {  # of llama.cpp's server, and those of SamplingParams
    "n_predict": "max_tokens", "n_cmpl": "n", "n_probs": "logprobs",
    "repeat_last_n": "penalty_last_n", "dry_penalty_last_n": "dry_last_n",
    "samplers": "stages",
}  # fmt: skip
STAGES = {"typ_p": "typical"}  # others have one name
SAME = {"grammar", "json_schema", "top_n_sigma", "adaptive_target"}
OURS = {ours: theirs for theirs, ours in NAMES.items()}
OFF = {"logprobs": 0, "grammar": ""}

Last = Annotated[int, Field(ge=-1)]  # tokens; -1: all
Bias = float | Literal[False]  # False: never
Pair = Annotated[tuple[TokenId | str, Bias], Field(strict=False)]  # JSON has only lists
Biases = Named[Bias] | Items[Pair]
MAX_TEXT_BIASES = 1000  # each of them becomes tokens first


class LoraScale(BaseModel):
    """An adapter by its place in `/lora-adapters`."""

    id: Annotated[int, Field(ge=0)]
    scale: float


class NativeBody(TextBody):
    """What bodies of llama.cpp's server have that ask for text."""

    n_predict: Last | None = None
    """Most tokens of an output; -1: what is left of the context, 0: only the prompt."""
    n_cmpl: Annotated[int, Field(ge=1, le=256)] | None = None
    """Outputs of each prompt."""
    n_probs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Likely tokens that are listed with each output token."""
    post_sampling_probs: bool = False
    """Whether they have their probabilities after all samplers."""
    repeat_last_n: Last | None = None
    dry_penalty_last_n: Last | None = None
    samplers: Items[str] | None = None
    top_n_sigma: float | None = None
    adaptive_target: float | None = None
    logit_bias: Biases | None = None  # type: ignore[assignment]
    """Numbers added to logits, by token id or by text, which stands for all its tokens."""
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    """A schema; a grammar beside it wins."""
    lora: Items[LoraScale] | None = None
    """Scales of adapters; those left out are off."""

    cache_prompt: bool = True
    """Whether earlier requests may save work of this one."""
    return_tokens: bool = False
    """Whether a whole answer has its token ids; events always have."""
    response_fields: Items[str] = Field(default_factory=list)
    """The only fields of the answer, such as `generation_settings/n_predict`."""

    @property
    def n_most(self) -> int | None:
        """Most tokens of an output; None: what is left of the context."""
        n_predict = self.max_tokens if self.n_predict is None else self.n_predict
        return None if n_predict == -1 else n_predict

    @property
    def n_prompts(self) -> int:
        """Prompts, each of which has outputs of its own."""
        return 1

    @abstractmethod
    async def tokens(self, service: Service, engine: AsyncEngine) -> list[list[int]]:
        """Those of each prompt. Raises Failure and InvalidRequest."""

    async def asked(self, service: Service) -> Asked:
        """As the engine takes it; raises Failure and InvalidRequest."""
        found = service.find(self.model, Operation.GENERATE)
        service.check_outputs(found, self.n_prompts, self.n_cmpl or self.n)
        prompts = tuple(await self.tokens(service, found.engine))
        given = self._params(found, service.config) | await self._biases(found)
        try:
            params = SamplingParams(**given)
        except InvalidSampling as error:
            name = renamed(error.name, OURS)
            message = str(error).replace(f"SamplingParams.{error.name}", name)
            raise Failure(400, error.code, message, name) from error
        options = self.options(found, service.config)
        if self.lora is not None:
            options["adapters"] = self._scales(found)
        if not self.cache_prompt:
            options["cache_salt"] = f"{options.get('cache_salt') or ''}{uuid4().hex}"
        return Asked(found, prompts, params, options, bool(self.stream))

    def _params(self, found: Found, config: ServeConfig) -> dict[str, Any]:
        included = {*NAMES} | SAME | SAMPLED
        named = self.model_dump(include=included, exclude_none=True)
        given = {"max_tokens": found.engine.n_ctx_slot} | config.sampling
        given |= self._unnamed()
        given |= {NAMES.get(name, name): value for name, value in named.items()}
        if self.n_predict == -1:
            given["max_tokens"] = found.engine.n_ctx_slot
        given["max_tokens"] = max(given["max_tokens"], 1)
        if self.post_sampling_probs:
            given["logprobs_of"] = "sampler"
        if self.samplers is not None:
            given["stages"] = [STAGES.get(name, name) for name in self.samplers]
        if self.stop is not None:
            stop = [self.stop] if isinstance(self.stop, str) else self.stop
            given["stop"] = [text for text in stop if text]
        _adapt(given)
        return given

    async def _biases(self, found: Found) -> dict[str, Any]:
        given = self.logit_bias
        if given is None:
            return {}
        by_id = isinstance(given, dict)  # its names may be token ids
        biases: dict[int, float] = {}
        never: set[int] = set()
        n_named = 0  # by a text
        for key, bias in given.items() if isinstance(given, dict) else given:
            if isinstance(key, int) or (by_id and key.isdecimal() and len(key) < 11):
                tokens = [int(key)]
            else:
                n_named += 1
                if n_named > MAX_TEXT_BIASES:
                    reason = (
                        f"at most {MAX_TEXT_BIASES} names are texts: give token ids"
                    )
                    raise refused("logit_bias", reason)
                tokens = await found.engine.tokenize(key, add_special=False)
            if bias is False:
                never.update(tokens)
            else:
                biases |= dict.fromkeys(tokens, bias)
        return {"logit_bias": biases} | ({"suppress_tokens": [*never]} if never else {})

    def _scales(self, found: Found) -> dict[str, float]:
        """By name; raises Failure if there is no such adapter."""
        names = [info.name for info in found.engine.adapters()]
        try:
            return {names[each.id]: each.scale for each in self.lora or ()}
        except IndexError as error:
            reason = f"each id is that of an adapter, and there are {len(names)}"
            raise refused("lora", reason) from error


class NativeCompletionBody(NativeBody):
    """Prompts that are to go on."""

    prompt: Prompts
    """A text, token ids, both mixed, or a list of these."""

    @property
    def n_prompts(self) -> int:
        """Prompts, each of which has outputs of its own."""
        return len(prompts_of(self.prompt))

    async def tokens(self, service: Service, engine: AsyncEngine) -> list[list[int]]:
        """Those of each prompt: of a list without token ids, each is one."""
        prompts = prompts_of(self.prompt)
        service.check_texts("prompt", n_texts(prompts))
        return [await tokens_of(engine, prompt) for prompt in prompts]


def _adapt(given: dict[str, Any]) -> None:
    """Values that mean something else in SamplingParams."""
    for name, off in OFF.items():
        if given.get(name) == off:
            del given[name]
    for name in ("top_n_sigma", "adaptive_target"):
        if given.get(name, 0) < 0:
            del given[name]
    for name in ("penalty_last_n", "dry_last_n"):
        if given.get(name) == -1:
            given[name] = None
    if "grammar" in given:
        given.pop("json_schema", None)


def settings(params: SamplingParams, engine: AsyncEngine) -> dict[str, Any]:
    """*params* in the words of llama.cpp's server."""
    eos = engine.info.vocab.eos
    told = params.model_dump()
    told |= {theirs: told.pop(ours) for ours, theirs in OURS.items()}
    theirs = {ours: theirs for theirs, ours in STAGES.items()}
    never = [*params.suppress_tokens]
    never += [eos.token_id] if params.ignore_eos and eos is not None else []
    biases = [*params.logit_bias.items(), *((token, None) for token in never)]
    for name in ("repeat_last_n", "dry_penalty_last_n", "seed", "adaptive_target"):
        told[name] = -1 if told[name] is None else told[name]
    return told | {
        "max_tokens": params.max_tokens,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in biases],
        "samplers": [theirs.get(stage, stage) for stage in params.stages],
        "post_sampling_probs": params.logprobs_of == "sampler",
    }
