"""Saves of idle slots, before another sequence needs the place or the cells."""

from __future__ import annotations

from collections.abc import Iterator

from pyllama_raw.core.memory.slots import Idle, Slots
from pyllama_raw.core.memory.tiers import Tiers
from pyllama_raw.core.namespace import is_of
from pyllama_raw.core.sequence import Running
from pyllama_raw.core.step import Move


class Keeping:
    """Takes from idle slots what others need; what a slot held goes to the tiers first."""

    def __init__(self, slots: Slots, tiers: Tiers) -> None:
        self._slots = slots
        self._tiers = tiers

    def reclaim(self, n_cells: int) -> None:
        """Empty idle slots, the longest unused first, until *n_cells* are free."""
        for idle in self._slots.idle:
            if self._slots.n_free_cells >= n_cells:
                return
            self.cut(idle, 0)

    def cut(self, idle: Idle, n_tokens: int) -> None:
        """Keep the first *n_tokens* of an idle slot only, after what pays of it was saved."""
        if n_tokens < idle.n_left:
            if idle.is_usable:
                saves = self._tiers.save(
                    idle.slot, idle.namespace, idle.tokens, idle.spans, idle.n_prompt
                )
                self._slots.add(saves)
            self._slots.add(self._writes(idle))
            self._slots.cut(idle, n_tokens)

    def capture(self, running: Running) -> None:
        """Save *running* as it stands."""
        request, tokens = running.request, running.tokens[: running.n_computed]
        n_prompt = request.n_prompt
        self._slots.add(
            self._tiers.save(
                running.slot, request.namespace, tokens, request.spans, n_prompt
            )
        )

    def last_moves(self) -> Iterator[tuple[Move, ...]]:
        """
        Moves that write idle slots to files, when no sequence runs.

        Each is to be done and settled before the next one is asked for.
        """
        for idle in self._slots.idle:
            if writes := self._writes(idle):
                yield tuple(writes)

    def clear(self, salt: str | None) -> None:
        """Empty idle slots of *salt*, None: all."""
        for idle in self._slots.idle:
            if idle.n_left and is_of(idle.namespace, salt):
                self._slots.cut(idle, 0)

    def _writes(self, idle: Idle) -> list[Move]:
        """Moves that keep an idle slot in files."""
        return self._tiers.write(
            idle.slot,
            idle.namespace,
            idle.tokens,
            idle.spans,
            idle.n_prompt,
            is_whole=idle.is_usable,
        )
