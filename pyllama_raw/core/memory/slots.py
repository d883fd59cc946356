"""
Places in the context's memory: which sequence is where, and what an idle slot still holds.

A slot that a request left keeps its tokens until somebody needs the place or the cells,
so the next turn of a chat finds them. Unified memory is one pool of cells for all slots;
in split memory each slot has its own and the slot limit alone counts.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from pyllama_raw.core.limits import ContextLimits
from pyllama_raw.core.memory.cells import CellPool
from pyllama_raw.core.namespace import Namespace
from pyllama_raw.core.sequence import Sequence

HEADROOM = 64  # output tokens a running sequence is promised cells for


@dataclass(eq=False, slots=True)
class Slot:
    """One place: held by a running sequence, or idle with what the last one left."""

    index: int
    sequence: Sequence | None = None
    left: bytes = b""  # tokens an idle slot still holds, one C int each
    namespace: Namespace = None  # of left
    last_used: int = 0  # counts departures
    is_usable: bool = True  # False: left holds more than others may take over, uncut

    @property
    def n_left(self) -> int:
        return len(self.left) // array("i").itemsize


@dataclass(eq=False, slots=True)
class Slots:
    """The slots by index; used cells are those of running and of idle slots."""

    limits: ContextLimits
    all: list[Slot] = field(init=False)
    cells: CellPool = field(init=False)
    running: list[Sequence] = field(init=False)  # those that hold a slot, by slot
    _n_departures: int = 0

    def __post_init__(self) -> None:
        n_slots = self.limits.n_slots + self.limits.n_parked
        self.all = [Slot(index) for index in range(n_slots)]
        self.cells = CellPool(n_slots)
        self.running = []

    def _list_running(self) -> None:
        """A new list each time: callers go through the old one while it changes."""
        self.running = [s.sequence for s in self.all if s.sequence is not None]

    @property
    def has_free(self) -> bool:
        return len(self.running) < self.limits.n_slots

    @property
    def idle(self) -> list[Slot]:
        """Slots without a sequence: useless ones first, then the longest unused."""
        free = [slot for slot in self.all if slot.sequence is None]
        return sorted(
            free, key=lambda slot: slot.last_used if slot.left and slot.is_usable else 0
        )

    @property
    def n_used_by_running(self) -> int:
        running = {slot.index for slot in self.all if slot.sequence is not None}
        return self.cells.n_used_by(running)

    @property
    def n_free_cells(self) -> int:
        """Cells the next step may fill; a split slot never lacks any."""
        limits = self.limits
        if not limits.unified:
            return limits.n_slots * limits.n_ctx_slot
        return limits.n_cells - self.cells.n_used

    @property
    def n_not_running(self) -> int:
        """Cells that no running sequence holds; a split slot never lacks any."""
        if not self.limits.unified:
            return self.limits.n_slots * self.limits.n_ctx_slot
        return self.limits.n_cells - self.n_used_by_running

    @property
    def n_unpromised(self) -> int:
        """Cells that no running sequence needs; idle slots have to give theirs."""
        wanted = sum(growth(sequence) for sequence in self.running)
        return self.n_not_running - (wanted if self.limits.unified else 0)

    def place(self, sequence: Sequence, slot: Slot) -> None:
        """Give *sequence* an idle slot, with the tokens that are in it."""
        assert sequence.slot is None
        assert slot.sequence is None
        slot.sequence = sequence
        sequence.slot = slot.index
        sequence.n_computed = slot.n_left
        slot.left = b""
        self._list_running()

    def share(self, src: Slot, sequence: Sequence, n_tokens: int) -> None:
        """*sequence*, whose slot is empty, gets the first tokens of *src* too."""
        assert sequence.n_computed == 0
        sequence.n_computed = n_tokens
        dst = slot_of(sequence)
        if self.limits.unified:
            self.cells.share(src.index, dst, n_tokens)
        else:
            self.cells.grow(dst, n_tokens)

    def advance(self, sequence: Sequence, n_tokens: int) -> None:
        """The next *n_tokens* of *sequence* are in memory, too."""
        sequence.n_computed += n_tokens
        self.cells.grow(slot_of(sequence), n_tokens)

    def rewind(self, sequence: Sequence, n_computed: int) -> None:
        """Only the first *n_computed* tokens of *sequence* are in memory."""
        slot = slot_of(sequence)
        if n_computed > sequence.n_computed:
            self.cells.grow(slot, n_computed - sequence.n_computed)
        self.cells.cut(slot, n_computed)
        sequence.n_computed = n_computed

    def shift(self, sequence: Sequence, n_keep: int, n_discard: int) -> None:
        """Drop tokens from the middle; what is left is no prefix of anything."""
        sequence.drop(n_keep, n_discard)
        sequence.n_computed -= n_discard
        self.cells.cut(slot_of(sequence), sequence.n_computed)

    def depart(self, sequence: Sequence, *, keep: bool) -> Slot:
        """Take the slot of *sequence*; with *keep* the slot still holds its tokens."""
        slot = self.all[slot_of(sequence)]
        held = sequence.tokens[: sequence.n_computed].tobytes()
        slot.is_usable = self._is_usable(sequence)
        slot.sequence = None
        sequence.slot = None
        sequence.deficit = 0
        sequence.n_computed = 0
        self._n_departures += 1
        slot.last_used = self._n_departures
        slot.left, slot.namespace = held, sequence.request.namespace
        if not keep:
            self.empty(slot)
        self._list_running()
        return slot

    def _is_usable(self, sequence: Sequence) -> bool:
        """Whether what *sequence* leaves is of use; what can be cut will be."""
        limits, n_held = self.limits, sequence.n_computed
        return limits.can_cut or (
            n_held <= limits.n_kept(sequence) and n_held == limits.n_movable(n_held)
        )

    def trim(self, slot: Slot, n_tokens: int) -> None:
        """An idle slot keeps its first *n_tokens* only."""
        slot.left = slot.left[: n_tokens * array("i").itemsize]
        self.cells.cut(slot.index, n_tokens)

    def empty(self, slot: Slot) -> None:
        """An idle slot holds nothing any more."""
        self.trim(slot, 0)

    def check_integrity(self) -> None:
        """Each sequence is where it says; a slot's cells are its computed tokens."""
        self.cells.check_integrity()
        for slot in self.all:
            sequence = slot.sequence
            if sequence is None:
                assert self.cells.length(slot.index) == slot.n_left
                continue
            assert slot.left == b""
            assert sequence.slot == slot.index
            assert 0 <= sequence.n_computed < len(sequence.tokens)
            assert self.cells.length(slot.index) == sequence.n_computed
            assert len(sequence.tokens) <= self.limits.n_ctx_slot
        assert self.running == [s.sequence for s in self.all if s.sequence]
        assert len(self.running) <= self.limits.n_slots
        assert self.n_free_cells >= 0


def slot_of(sequence: Sequence) -> int:
    """Where a running *sequence* is."""
    assert sequence.slot is not None
    return sequence.slot


def growth(sequence: Sequence) -> int:
    """Cells to promise *sequence*: its tokens behind and some output."""
    left = sequence.request.max_tokens - sequence.n_output
    return sequence.n_behind + min(left, HEADROOM)
