"""
The adapters that a context may compute with, and those that it computes with now.

To change these makes libllama prepare all graphs anew, within the next decode. What that costs
is how much longer the first decode with a set takes than the next one of as many tokens.
"""

from __future__ import annotations

from pyllama_raw.core.request import AdapterSet
from pyllama_raw.core.scheduling.lots import SWITCH_S
from pyllama_raw.native.adapter import Adapter
from pyllama_raw.native.context import Context

SMOOTHING = 0.25  # weight of the newest switch


class AdapterSets:
    """Belongs to the engine thread; outlives the context."""

    def __init__(self) -> None:
        self.on: AdapterSet = ()  # what the context computes with
        self.n_switches = 0
        self.spent_s = 0.0  # on switches, by what one costs
        self.switch_s = SWITCH_S  # what one costs
        self._known: dict[int, Adapter] = {}
        # Tokens and time of the first decode.
        self._first: tuple[int, int] | None = None

    def add(self, number: int, adapter: Adapter) -> None:
        """Take over *adapter*, which sets name by *number* from now on."""
        self._known[number] = adapter

    def remove(self, number: int, context: Context) -> None:
        """Free an adapter, which no set of a plan names any more."""
        if self.is_on(number):
            self.switch(context, ())
        self._known.pop(number).close()

    def switch(self, context: Context, wanted: AdapterSet) -> None:
        """Have *context*, with no step ahead, compute with *wanted*. Raises NativeError."""
        context.set_adapters([(self._known[n], scale) for n, scale in wanted])
        self.on, self._first = wanted, (0, 0)
        self.n_switches += 1
        self.spent_s += self.switch_s

    def is_on(self, number: int) -> bool:
        """Whether the context computes with that adapter."""
        return any(number == each for each, _ in self.on)

    @property
    def is_learning(self) -> bool:
        """Whether the next decode is one of the first two after a switch."""
        return self._first is not None

    def learned(self, n_tokens: int, decode_ns: int) -> float | None:
        """Learn from a decode; returns the cost of a switch, if it is known better now."""
        assert self._first is not None
        n_first, first_ns = self._first
        self._first = None if n_first else (n_tokens, decode_ns)
        if n_first != n_tokens:
            return None
        found = max(first_ns - decode_ns, 0) / 1e9
        self.switch_s += SMOOTHING * (found - self.switch_s)
        return self.switch_s

    def renew(self) -> None:
        """The context is a new one, which has none."""
        self.on, self._first = (), None

    def close(self) -> None:
        """Free all, after the context."""
        for adapter in self._known.values():
            adapter.close()
        self._known.clear()
