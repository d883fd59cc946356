"""
Money for tokens: prices that were given, or those that `genai-prices` knows.

The extra `prices` brings the package; a model that it does not know has no price.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Literal, Self

from pyllama_raw.api.results import Usage
from pyllama_raw.errors import ConfigError
from pyllama_raw.runners.errors import BudgetExceeded
from pyllama_raw.runners.runner import Cost

PROMPT_SHARE = 0.8  # of the tokens of a request that only its sum is known of
MILLION = 1e6
PERIODS = {"hour": 3600.0, "day": 86400.0}


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars for a million tokens of one model."""

    prompt: float
    """Of the prompt."""
    completion: float
    """Of the output."""
    cached: float | None = None
    """Of the prompt, where they were cached. None: as all others."""
    model: str = ""
    """The model."""

    @classmethod
    def known(cls, model: str, provider: str | None = None) -> Self | None:
        """
        What the package `genai-prices` says; None: it does not know the model.

        Raises:
            ConfigError: the package is not installed.
        """
        try:
            import genai_prices
        except ImportError as error:
            said = "pip install 'pyllama_raw[prices]', or give Prices of your own"
            raise ConfigError(
                f"prices need the package genai-prices: {said}"
            ) from error

        def usd(**tokens: int) -> float:
            usage = genai_prices.Usage(**tokens)
            found = genai_prices.calc_price(usage, model, provider_id=provider)
            return float(found.total_price)

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


class Budget:
    """
    Money that may be spent in an hour and in a day.

    Args:
        when_spent: "reject" raises BudgetExceeded; "warn" calls *warn* with that error.
    """

    def __init__(
        self,
        *,
        usd_per_hour: float | None = None,
        usd_per_day: float | None = None,
        when_spent: Literal["reject", "warn"] = "reject",
        warn: Callable[[BudgetExceeded], None] = lambda _: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        given = {"hour": usd_per_hour, "day": usd_per_day}
        self._limits = {per: usd for per, usd in given.items() if usd is not None}
        self._rejects, self._warn, self._clock = when_spent == "reject", warn, clock
        self._spent = deque[tuple[float, float]]()

    def spend(self, cost: Cost | None) -> None:
        """Write down what a request has cost."""
        if cost is not None:
            self._spent.append((self._clock(), cost.usd))

    def check(self) -> None:
        """Raise BudgetExceeded, or warn, if a limit is reached."""
        now = self._clock()
        while self._spent and self._spent[0][0] <= now - PERIODS["day"]:
            self._spent.popleft()
        for per, limit in self._limits.items():
            since = now - PERIODS[per]
            spent = sum(usd for at, usd in self._spent if at > since)
            if spent >= limit:
                error = BudgetExceeded(spent, limit, per)
                if self._rejects:
                    raise error
                self._warn(error)
