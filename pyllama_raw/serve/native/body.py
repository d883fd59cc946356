"""
Fields of bodies of llama.cpp's server, in the words of the engine and back.

Defaults are those of the service, then those of SamplingParams, but for the tokens: the rest of
the context.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import BaseModel, Field

from pyllama_raw import AsyncEngine, SamplingParams
from pyllama_raw.results import Operation
from pyllama_raw.serve import fields
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.body import (
    NO_LIMIT,
    SAMPLED,
    Items,
    Named,
    TextBody,
    adapted,
    checked_params,
)
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import refused
from pyllama_raw.serve.forms import READERS, Form, form_of
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
SAME = {"top_n_sigma", "adaptive_target"}
OURS = {ours: theirs for theirs, ours in NAMES.items()}

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

    rules: ClassVar[fields.Rules] = fields.COMPLETIONS

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
    grammar: str | dict[str, Any] | None = None
    json_schema: str | dict[str, Any] | None = None
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
        return None if n_predict in NO_LIMIT else n_predict

    @cached_property
    def form(self) -> Form:
        """The form that the text must have. Raises Failure."""
        given = {name: getattr(self, name, None) for name in READERS}
        given |= {n: v for n, v in self._extra.items() if n in READERS}
        if given["grammar"]:
            del given["json_schema"]
        return form_of(given)

    @property
    def names(self) -> dict[str, str]:
        """Fields of the body, by what the engine calls them."""
        return {**OURS, **super().names}

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
        biases = await self._biases(found, service)
        read = partial(self._read, found, service.config, biases)
        params = await service.bodies.walk(read)
        options = self.options(found, service.config)
        if self.lora is not None:
            options["adapters"] = self._scales(found)
        if not self.cache_prompt:
            options["cache_salt"] = f"{options.get('cache_salt') or ''}{uuid4().hex}"
        names = self.names
        return Asked(found, prompts, params, options, bool(self.stream), names)

    def _read(
        self, found: Found, config: ServeConfig, biases: dict[str, Any]
    ) -> SamplingParams:
        """The parameters of the outputs. Raises Failure."""
        return checked_params(self._params(found, config) | biases, self.names)

    def _params(self, found: Found, config: ServeConfig) -> dict[str, Any]:
        included = {*NAMES} | SAME | SAMPLED
        named = self.model_dump(include=included, exclude_none=True)
        n_ctx = found.engine.n_ctx_slot
        given = {"max_tokens": n_ctx} | config.sampling
        given |= {n: v for n, v in self._extra.items() if n not in READERS}
        given |= {NAMES.get(name, name): value for name, value in named.items()}
        given = {**adapted(given, n_ctx), **self.form.params}
        given["max_tokens"] = max(given["max_tokens"], 1)
        if self.post_sampling_probs:
            given["logprobs_of"] = "sampler"
        if self.samplers is not None:
            given["stages"] = [STAGES.get(name, name) for name in self.samplers]
        if given.get("logprobs") == 0:  # llama.cpp's word for none
            del given["logprobs"]
        return given

    async def _biases(self, found: Found, service: Service) -> dict[str, Any]:
        given = self.logit_bias
        if given is None:
            return {}
        by_id = isinstance(given, dict)  # its names may be token ids
        pairs = given.items() if isinstance(given, dict) else given

        def is_id(key: int | str) -> bool:
            return isinstance(key, int) or (by_id and key.isdecimal() and len(key) < 11)

        def texts() -> list[str]:
            return [str(key) for key, _ in pairs if not is_id(key)]

        def all_biases() -> dict[str, Any]:
            biases: dict[int, float] = {}
            never: set[int] = set()
            for key, bias in pairs:
                named = [int(key)] if is_id(key) else tokens[str(key)]
                if bias is False:
                    never.update(named)
                else:
                    biases |= dict.fromkeys(named, bias)
            return {"logit_bias": biases} | (
                {"suppress_tokens": [*never]} if never else {}
            )

        names = await service.bodies.walk(texts)
        if len(names) > MAX_TEXT_BIASES:
            reason = f"at most {MAX_TEXT_BIASES} names are texts: give token ids"
            raise refused("logit_bias", reason)
        tokenize = found.engine.tokenize
        tokens = {name: await tokenize(name, add_special=False) for name in names}
        return await service.bodies.walk(all_biases)

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
