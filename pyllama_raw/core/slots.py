"""
Places in the context's memory, and the KV cells they use.

Unified memory is one pool of cells for all slots, so cells are counted; in split memory
each slot has its own and the slot limit alone counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyllama_raw.core.sequence import Sequence

HEADROOM = 64  # output tokens a running sequence is promised cells for


@dataclass(frozen=True, slots=True)
class ContextLimits:
    """What the context can hold, as it reported it."""

    n_slots: int
    n_ctx_slot: int  # positions one slot may hold
    n_batch: int  # tokens of one step
    n_cells: int  # cells of all slots together
    unified: bool = True
    can_shift: bool = True


class Slots:
    """Which sequence is where; the sum of computed tokens is the number of used cells."""

    def __init__(self, limits: ContextLimits) -> None:
        self.limits = limits
        self.n_used = 0
        self._at: list[Sequence | None] = [None] * limits.n_slots

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold a slot, by slot."""
        return [sequence for sequence in self._at if sequence is not None]

    @property
    def has_free(self) -> bool:
        return None in self._at

    @property
    def n_free_cells(self) -> int:
        """Cells the next step may fill; a split slot never lacks any."""
        limits = self.limits
        if not limits.unified:
            return limits.n_slots * limits.n_ctx_slot
        return limits.n_cells - self.n_used

    @property
    def n_unpromised(self) -> int:
        """Cells that no running sequence needs; a lone sequence may have them all."""
        if not self.limits.unified:
            return self.limits.n_slots * self.limits.n_ctx_slot
        return self.limits.n_cells - sum(need(s) for s in self.running)

    def place(self, sequence: Sequence) -> None:
        """Give *sequence* the lowest free slot; low slots keep libllama's rows dense."""
        assert sequence.slot is None
        assert sequence.n_computed == 0
        slot = self._at.index(None)
        self._at[slot] = sequence
        sequence.slot = slot

    def compute(self, sequence: Sequence, n_tokens: int) -> None:
        sequence.n_computed += n_tokens
        self.n_used += n_tokens

    def rewind(self, sequence: Sequence, n_computed: int) -> None:
        """Only the first *n_computed* tokens of *sequence* are in memory."""
        self.n_used += n_computed - sequence.n_computed
        sequence.n_computed = n_computed

    def shift(self, sequence: Sequence, n_keep: int, n_discard: int) -> None:
        sequence.drop(n_keep, n_discard)
        self.n_used -= n_discard

    def remove(self, sequence: Sequence) -> int:
        """Take the slot and cells of *sequence*; returns the slot."""
        slot = sequence.slot
        assert slot is not None
        self.rewind(sequence, 0)
        self._at[slot] = None
        sequence.slot = None
        sequence.deficit = 0
        return slot

    def check_integrity(self) -> None:
        """Each sequence is where it says; used cells are the sum of computed tokens."""
        used = 0
        for slot, sequence in enumerate(self._at):
            if sequence is None:
                continue
            assert sequence.slot == slot
            assert 0 <= sequence.n_computed < len(sequence.tokens)
            assert len(sequence.tokens) <= self.limits.n_ctx_slot
            used += sequence.n_computed
        assert used == self.n_used
        assert self.n_free_cells >= 0


def need(sequence: Sequence) -> int:
    """Cells to promise *sequence* when it starts: its tokens and some output."""
    left = sequence.request.max_tokens - sequence.n_output
    return len(sequence.tokens) + min(left, HEADROOM)
