"""
Swaps: sequences that lost their slots are kept in host memory, where that is worth it.

Rules:
1. A swap is a state in the host tier, held there until its sequence has it again or ends.
   Without room for it, or if it cannot be saved or loaded, the sequence is computed again.
2. It is worth it if its bytes are sooner saved and loaded than its tokens are computed.
3. With `deterministic` others must not have output, so such a state has a namespace of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyllama_raw.core.memory.cache_entry import Hit
from pyllama_raw.core.memory.placement import Restore
from pyllama_raw.core.memory.slots import Slots
from pyllama_raw.core.memory.tiers import Tiers, n_cells_of
from pyllama_raw.core.namespace import Namespace, Private
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.sequence import Running, Sequence


@dataclass(slots=True, eq=False)
class Swap:
    """The first *n_tokens* of a sequence."""

    sequence: Sequence
    namespace: Namespace
    n_tokens: int
    hit: Hit | None = None  # held; None: not saved yet


class Swaps:
    """The swaps of all sequences: a few, because only preempted ones have any."""

    def __init__(self, slots: Slots, tiers: Tiers) -> None:
        self.n_swapped = self.n_swapped_bytes = 0  # since the start
        self._slots = slots
        self._tiers = tiers
        self._all: list[Swap] = []

    def save(self, running: Running) -> None:
        """*running* is about to lose its slot: keep what it has, if that is worth it."""
        request, n_tokens = running.request, running.n_computed
        if self._of(running.sequence) is not None or not self._is_worth(running):
            return
        namespace = request.namespace
        if self._slots.limits.deterministic:
            namespace = Private()
        tokens = running.tokens[:n_tokens]
        self._slots.add(
            self._tiers.save(
                running.slot, namespace, tokens, request.spans, request.n_prompt
            )
        )
        self._all.append(Swap(running.sequence, namespace, n_tokens))

    def _of(self, sequence: Sequence) -> Swap | None:
        return next((swap for swap in self._all if swap.sequence is sequence), None)

    def _is_worth(self, running: Running) -> bool:
        sequence, n_tokens = running.sequence, running.n_computed
        is_known = not (sequence.is_shifted or sequence.is_scoring)
        is_whole = sequence.whole(n_tokens) == n_tokens
        is_movable = self._slots.limits.n_movable(n_tokens) == n_tokens
        if not (n_tokens and is_known and is_whole and is_movable):
            return False
        n_prompt = running.request.n_prompt
        return running.fetch_id is None and self._tiers.is_worth_a_swap(
            n_tokens, n_prompt
        )

    def find(self, sequence: Sequence) -> Restore | None:
        """Find what brings *sequence* back to where it was, if there are cells for it."""
        swap = self._of(sequence)
        if swap is None or swap.hit is None:
            return None
        is_known = all(entry.node is not None for entry in swap.hit.entries)
        if not is_known or n_cells_of(swap.hit) > self._slots.n_not_running:
            return None
        return Restore(CacheTier.HOST, swap.hit, 0)

    def settle(self) -> None:
        """A step is over: hold what it has saved, let go of what it has loaded."""
        for swap in tuple(self._all):
            running = self._slots.running.get(swap.sequence.request.request_id)
            if running is not None and running.n_computed >= swap.n_tokens:
                self.drop(swap.sequence)
            elif swap.hit is None:
                self._hold(swap)

    def _hold(self, swap: Swap) -> None:
        cache, tokens = self._tiers.host.cache, swap.sequence.tokens
        hit = cache.match(swap.namespace, tokens, swap.n_tokens)
        if hit.n_tokens < swap.n_tokens:
            self._all.remove(swap)  # it could not be saved
            return
        cache.pin(hit)
        swap.hit = hit
        self.n_swapped += 1
        self.n_swapped_bytes += hit.n_bytes

    def drop(self, sequence: Sequence) -> None:
        """*sequence* needs its swap no more, if it has one."""
        swap = self._of(sequence)
        if swap is None:
            return
        self._all.remove(swap)
        cache = self._tiers.host.cache
        if isinstance(swap.namespace, Private):
            cache.clear(swap.namespace)
        if swap.hit is not None:
            cache.unpin(swap.hit)

    def check_integrity(self) -> None:
        """A running sequence has a swap only until that is loaded; each swap has a sequence."""
        for swap in self._all:
            assert self._of(swap.sequence) is swap
            assert 0 < swap.n_tokens < len(swap.sequence.tokens)
