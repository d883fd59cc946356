"""
Places in the context's memory: where sequences run, and what idle slots still hold.

A slot that a request left keeps its tokens until somebody needs the place or the cells,
so the next turn of a chat finds them. Unified memory is one pool of cells for all slots;
in split memory each slot has its own and the slot limit alone counts.

Rules:
1. Nobody else writes what a slot holds or how much of a sequence is computed.
2. Each change leaves behind the move that the context has to make, in one list, because
   moves depend on each other: a slot may be copied first and emptied later in a step.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from pyllama_raw.core.memory.cells import CellPool
from pyllama_raw.core.memory.limits import ContextLimits
from pyllama_raw.core.namespace import Namespace
from pyllama_raw.core.sequence import Running, Sequence
from pyllama_raw.core.spans import Spans, position
from pyllama_raw.core.step import Copy, Load, Move, Release, Shift, Trim

HEADROOM = 64  # output tokens a running sequence is promised cells for


@dataclass(slots=True)
class Idle:
    """A slot without a sequence, and what the last one left."""

    slot: int
    left: bytes = b""  # tokens it still holds, one C int each
    namespace: Namespace = None  # of left
    last_used: int = 0  # counts departures
    is_usable: bool = True  # False: left holds more than others may take over, uncut
    spans: Spans = ()  # of left
    n_prompt: int = (
        0  # tokens of left that were computed in chunks; those after one by one
    )

    @property
    def n_left(self) -> int:
        return len(self.left) // array("i").itemsize

    @property
    def tokens(self) -> array[int]:
        return array("i", self.left)


class Slots:
    """The slots by index; used cells are those of running and of idle slots."""

    def __init__(self, limits: ContextLimits) -> None:
        n_slots = limits.n_slots + limits.n_parked
        self.limits = limits
        self.all: list[Idle | Running] = [Idle(slot) for slot in range(n_slots)]
        self.running: dict[int, Running] = {}  # by request_id, in the order of slots
        self.cells = CellPool(n_slots)
        self._moves: list[Move] = []
        self._n_departures = 0

    # -- what there is -------------------------------------------------------------

    @property
    def has_free(self) -> bool:
        """Whether another sequence may have a slot."""
        return len(self.running) < self.limits.n_slots

    @property
    def idle(self) -> list[Idle]:
        """Slots without a sequence: useless ones first, then the longest unused."""
        idle = [place for place in self.all if type(place) is Idle]
        return sorted(
            idle, key=lambda place: place.last_used if _is_of_use(place) else 0
        )

    def is_here(self, running: Running) -> bool:
        """Whether *running* has not left its slot since."""
        return self.all[running.slot] is running

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
            return self.n_free_cells
        idle = {place.slot for place in self.all if type(place) is Idle}
        return self.n_free_cells + self.cells.n_only_of(idle)

    @property
    def n_unpromised(self) -> int:
        """Cells that no running sequence needs; idle slots have to give theirs."""
        if not self.limits.unified:
            return self.n_not_running
        running = self.running.values()
        wanted = sum([growth(each.sequence, each.n_computed) for each in running])
        return self.n_not_running - wanted

    @property
    def n_source_room(self) -> int:
        """Tokens that an encoder could read beside the sources of all that run."""
        running = self.running.values()
        return self.limits.n_source - sum([each.request.n_source for each in running])

    @property
    def has_moves(self) -> bool:
        """Whether the context does not hold yet what slots say."""
        return bool(self._moves)

    def take_moves(self) -> list[Move]:
        """Moves of the context, in their order."""
        moves, self._moves = self._moves, []
        return moves

    def add(self, moves: Iterable[Move]) -> None:
        """Have *moves* done that change no slot."""
        self._moves += moves

    # -- a sequence comes, goes on and leaves ----------------------------------------

    def seat(self, sequence: Sequence, slot: int) -> Running:
        """Give *sequence* an idle slot, with the tokens that are in it."""
        place = self.all[slot]
        assert isinstance(place, Idle)
        self.all[slot] = running = Running(sequence, slot, place.n_left)
        self._list_running()
        return running

    def copy(self, src: int, running: Running, n_tokens: int) -> None:
        """*running*, whose slot is empty, gets the first tokens of *src* too."""
        assert running.n_computed == 0
        running.n_computed = n_tokens
        if self.limits.unified:
            self.cells.share(src, running.slot, n_tokens)
        else:
            self.cells.grow(running.slot, n_tokens)
        n_pos = running.sequence.position(n_tokens)
        self._moves.append(Copy(src, running.slot, n_pos))

    def load(self, running: Running, n_tokens: int, load: Load) -> None:
        """*load* fills the slot of *running* up to *n_tokens*."""
        self._hold(running, n_tokens)
        self._moves.append(load)

    def advance(self, running: Running, n_tokens: int) -> None:
        """
        The next *n_tokens* of *running* are in memory, too.

        It is grow() by hand, because every token of every stream comes through here.
        """
        running.n_computed += n_tokens
        cells = self.cells
        cells.tails[running.slot] += n_tokens
        cells.n_used += n_tokens

    def rewind(self, running: Running, n_tokens: int) -> None:
        """
        Keep the first *n_tokens* of *running* only, and no part of a span.

        They may be more than it had, if a step was aborted.
        """
        n_tokens = running.sequence.whole(n_tokens)
        self._hold(running, n_tokens)
        n_pos = running.sequence.position(n_tokens)
        self._moves.append(Trim(running.slot, n_pos))

    def shift(self, running: Running, n_keep: int, n_discard: int) -> bool:
        """
        Drop tokens from the middle; what is left is no prefix of anything.

        False: all of it is to be computed again, because cells have one position for all that
        share them, or this memory cannot shift.
        """
        shifts = self.limits.can_shift and not self.cells.is_shared(running.slot)
        running.sequence.drop(n_keep, n_discard)
        if shifts:
            self._hold(running, running.n_computed - n_discard)
            self._moves.append(Shift(running.slot, n_keep, n_discard))
        else:
            self.rewind(running, 0)
        return shifts

    def leave(self, running: Running, n_kept: int) -> None:
        """Take the slot of *running*; it still holds its first *n_kept* tokens, if it can."""
        self._n_departures += 1
        n_held, spans = running.n_computed, running.request.spans
        if spans:
            n_kept = running.sequence.whole(min(n_kept, n_held))
        idle = Idle(
            running.slot,
            running.tokens[:n_held].tobytes(),
            running.request.namespace,
            self._n_departures,
            self._is_usable(running),
            spans,
            running.request.n_prompt,
        )
        self.all[idle.slot] = idle
        self._list_running()
        if n_kept == 0 or self.limits.can_cut:
            self.cut(idle, n_kept)

    def _is_usable(self, running: Running) -> bool:
        """Whether what *running* leaves is of use; what can be cut will be."""
        limits, n_held = self.limits, running.n_computed
        return limits.can_cut or (
            n_held <= limits.n_kept(running.sequence)
            and n_held == limits.n_movable(n_held)
            and n_held == running.sequence.whole(n_held)
        )

    def cut(self, idle: Idle, n_tokens: int) -> None:
        """An idle slot keeps its first *n_tokens* only."""
        if n_tokens == 0:
            self._moves.append(Release(idle.slot))
        elif n_tokens < idle.n_left:
            self._moves.append(Trim(idle.slot, position(idle.spans, n_tokens)))
        self._shorten(idle, n_tokens)

    def lose(self, slot: int) -> None:
        """The context turned out to hold nothing of *slot*."""
        place = self.all[slot]
        if isinstance(place, Idle):
            self._shorten(place, 0)
        else:
            self._hold(place, 0)
            place.note_cached(None)

    def lose_all(self) -> None:
        """The context is new, and there is nothing left to move in it."""
        self._moves = []
        for slot in range(len(self.all)):
            self.lose(slot)

    def _hold(self, running: Running, n_tokens: int) -> None:
        n_more = n_tokens - running.n_computed
        if n_more > 0:
            self.cells.grow(running.slot, n_more)
        else:
            self.cells.cut(running.slot, n_tokens)
        running.n_computed = n_tokens

    def _shorten(self, idle: Idle, n_tokens: int) -> None:
        idle.left = idle.left[: n_tokens * array("i").itemsize]
        self.cells.cut(idle.slot, n_tokens)

    def _list_running(self) -> None:
        """Another dictionary each time: callers go through the old one meanwhile."""
        self.running = {
            place.request.request_id: place
            for place in self.all
            if type(place) is Running
        }

    def check_integrity(self) -> None:
        """Each sequence is where it says; a slot's cells are its computed tokens."""
        self.cells.check_integrity()
        for slot, place in enumerate(self.all):
            assert place.slot == slot
            n_held = place.n_left if isinstance(place, Idle) else place.n_computed
            assert self.cells.length(slot) == n_held
            if isinstance(place, Running):
                assert place is self.running[place.request.request_id]
                assert place.tokens is place.sequence.tokens
                assert 0 <= n_held < len(place.tokens) <= self.limits.n_ctx_slot
        slots = [running.slot for running in self.running.values()]
        assert slots == sorted(slots)
        assert len(slots) <= self.limits.n_slots
        assert self.n_free_cells >= 0


def growth(sequence: Sequence, n_computed: int = 0) -> int:
    """Cells to promise *sequence*: its tokens behind and some output."""
    left = sequence.request.max_tokens - sequence.n_output
    return len(sequence.tokens) - n_computed + min(left, HEADROOM)


def _is_of_use(idle: Idle) -> bool:
    return bool(idle.left) and idle.is_usable
