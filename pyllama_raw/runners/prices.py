"""
Money for tokens: prices that were given, or those that `genai-prices` knows.

The extra `prices` brings the package; a model that it does not know has no price.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pyllama_raw.api.results import Usage
from pyllama_raw.errors import ConfigError

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
class Prices:
    """US dollars for a million tokens of one model."""

    prompt: float
    """The price of the prompt."""
    completion: float
    """The price of the output."""
    cached: float | None = None
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
