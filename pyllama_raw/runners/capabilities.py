"""
Abilities of a runner, and prices of its tokens.

What a runner cannot do is refused before anything is sent. Prices were given, or `genai-prices`
knows them: the extra `prices` brings that package; a model that it does not know has no price.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, get_args

from pyllama_raw import Prompt
from pyllama_raw.api.results import Usage
from pyllama_raw.errors import ConfigError, InvalidRequest, Unsupported, reading
from pyllama_raw.options.frozen import Checked, NotNegative
from pyllama_raw.options.requests import SALT, Need, checked
from pyllama_raw.options.sampling import CONSTRAINTS, SamplingParams

Verb = Need
VERBS: frozenset[Verb] = frozenset(get_args(Verb))
MAX_ITEMS = 2**20  # of a prompt: range(10**9) is small until it is written as JSON


@dataclass(frozen=True, slots=True)
class RunnerCapabilities:
    """The abilities of a runner, as far as they are known."""

    verbs: frozenset[Verb] = frozenset({"generate"})
    """The operations that it has."""
    logprobs: bool = False
    """Whether it tells log-probabilities of output tokens."""
    prompt_logprobs: bool = False
    """Whether it tells those of prompt tokens."""
    tools: bool = False
    """Whether chats may have tools."""
    json_schema: bool = False
    """Whether an output can be held to a JSON schema."""
    grammars: bool = False
    """Whether it can be held to a grammar or a regular expression."""
    n: bool = False
    """Whether a prompt may have several outputs."""
    media: bool = False
    """Whether prompts may have images or sounds."""
    token_ids: bool = False
    """Whether prompts may be token ids."""
    sampling: frozenset[str] | None = None
    """Names of SamplingParams that are taken. None: all."""
    options: frozenset[str] | None = None
    """Names of RequestOptions that are taken. None: all."""
    n_ctx: int | None = None
    """Tokens of prompt and output together. None: not known."""
    n_slots: int | None = None
    """Requests that run at once. None: not known."""

    def only(self, verbs: Iterable[Verb] | None) -> Self:
        """The abilities with no other verbs than *verbs*; None: all of them."""
        return self if verbs is None else replace(self, verbs=frozenset(verbs))

    def check_verb(self, verb: Verb) -> None:
        """Raise Unsupported if there is no such operation."""
        if verb not in self.verbs:
            has = ", ".join(sorted(self.verbs)) or "nothing"
            raise Unsupported(verb, f"this runner has {has}: give it to another one")

    def check(
        self, prompt: Prompt, params: SamplingParams, options: Mapping[str, Any]
    ) -> None:
        """
        Raise Unsupported if something is asked for that the runner cannot do.

        Raises:
            InvalidRequest: the prompt is none or too long to be sent, or an option that all
                runners read is wrong.
        """
        self.check_verb("generate")
        check_length("prompt", prompt)
        for name in ("client", "cache_salt"):  # a pool routes by them
            checked(SALT, options.get(name), name)
        tools = options.get("tools")
        with reading("tools", tools, "a list of mappings, or None"):
            has_tools = bool(tools)
        features = {
            "logprobs": params.logprobs is not None,
            "prompt_logprobs": params.prompt_logprobs is not None,
            "tools": has_tools,
            "json_schema": params.json_schema is not None,
            "grammars": any(
                getattr(params, c) for c in CONSTRAINTS if c != "json_schema"
            ),
            "n": params.n > 1,
            "token_ids": are_ids(prompt),
            "media": not isinstance(prompt, str) and _has_media(prompt),
        }
        for name, is_needed in features.items():
            if is_needed and not getattr(self, name):
                raise Unsupported(name, "this runner has none of it: leave it out")
        for names, supported in (
            (params.model_fields_set, self.sampling),
            (options.keys(), self.options),
        ):
            if supported is not None and (unknown := sorted({*names} - supported)):
                advice = "this runner cannot send it: leave it out"
                raise Unsupported(unknown[0], advice)


def check_length(name: str, items: Sequence[Any]) -> None:
    """Raise InvalidRequest if *items*, a prompt or a text, cannot be read or have no end to speak of."""
    allowed = f"text, or at most {MAX_ITEMS} token ids or messages"
    with reading(name, items, allowed):
        if not isinstance(items, str) and len(items) > MAX_ITEMS:
            raise InvalidRequest(name, items, allowed)
        _first(items)


def are_ids(prompt: Prompt) -> bool:
    """Whether *prompt* is token ids."""
    return isinstance(_first(prompt), int)


def are_messages(prompt: Prompt) -> bool:
    """Whether *prompt* is a chat."""
    return isinstance(_first(prompt), Mapping)


def _first(prompt: Prompt) -> object:
    """The first item of *prompt*; None if it is a text or empty."""
    return None if isinstance(prompt, str) or not len(prompt) else prompt[0]


def _has_media(prompt: Sequence[Any]) -> bool:
    """Whether a part of *prompt* is neither text nor a token."""
    parts: list[Any] = []
    for item in prompt:
        content = item.get("content") if isinstance(item, Mapping) else item
        parts += content if isinstance(content, list | tuple) else [content]
    return any(
        part.get("type", "text") != "text"
        if isinstance(part, Mapping)
        else not isinstance(part, str | int | None)
        for part in parts
    )


PROMPT_SHARE = 0.8  # of the tokens of a request that only its sum is known of
MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Cost:
    """Money for one request."""

    usd: float
    """US dollars."""
    model: str = ""
    """The model whose price it is."""


@dataclass(frozen=True, slots=True)
class Prices(Checked):
    """US dollars for a million tokens of one model. Raises ConfigError for a wrong one."""

    prompt: NotNegative
    """The price of the prompt."""
    completion: NotNegative
    """The price of the output."""
    cached: NotNegative | None = None
    """The price of cached tokens of the prompt. None: as all others."""
    model: str = ""
    """The model."""

    @classmethod
    def known(cls, model: str, provider: str | None = None) -> Self | None:
        """
        Prices that the package `genai-prices` has; None: it does not know the model.

        Raises:
            ConfigError: the package is not installed.
        """
        try:
            import genai_prices
        except ImportError as error:
            advice = "pip install 'pyllama_raw[prices]', or give Prices of your own"
            raise ConfigError(
                f"prices need the package genai-prices: {advice}"
            ) from error

        def usd(**tokens: int) -> float:
            usage = genai_prices.Usage(**tokens)
            calculation = genai_prices.calc_price(usage, model, provider_id=provider)
            return float(calculation.total_price)

        try:
            prompt, completion = usd(input_tokens=10**6), usd(output_tokens=10**6)
            cached = usd(input_tokens=10**6, cache_read_tokens=10**6)
        except LookupError:
            return None
        return cls(prompt, completion, cached, model)

    def cost(self, usage: Usage) -> Cost:
        """The price of *usage*."""
        price = self.prompt if self.cached is None else self.cached
        n_new = usage.prompt_tokens - usage.cached_tokens
        usd = n_new * self.prompt + usage.cached_tokens * price
        return Cost(
            (usd + usage.completion_tokens * self.completion) / MILLION, self.model
        )

    def estimate(self, n_tokens: int) -> Cost:
        """The price of a request of which only the sum of its tokens is known."""
        n_tokens = max(1, n_tokens)
        n_prompt = PROMPT_SHARE * n_tokens
        usd = n_prompt * self.prompt + (n_tokens - n_prompt) * self.completion
        return Cost(usd / MILLION, self.model)
