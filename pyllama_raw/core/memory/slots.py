"""
Places in the context's memory: where sequences run, and what idle slots still hold.

A slot that a request left keeps its tokens until somebody needs the place or the cells,
so the next turn of a chat finds them. Unified memory is one pool of cells for all
slots; in split memory each slot has its own and the slot limit alone counts.

Rules:
1. Nobody else writes what a slot holds or how much of a sequence is computed.
2. Each change leaves behind the move that the context has to make, in one list, because
   moves depend on each other: a slot may be copied first and emptied later in a step.
3. A cell counts once, however many slots share it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.request import (
    Namespace,
    Request,
    Scoring,
    Spans,
    TokenLogprobs,
    position,
)
from pyllama_raw.core.sequence import Running, Sequence, growth, n_kept, n_movable
from pyllama_raw.core.step import Copy, Load, Move, Piece, Release, Shift, Trim
from pyllama_raw.errors import BadMedia, PromptTooLong


@dataclass(frozen=True, slots=True)
class ContextLimits:
    """Limits of a context, as it reported them."""

    n_slots: int  # sequences that run at once
    n_ctx_slot: int  # tokens one slot may hold
    n_batch: int  # tokens of one step
    n_cells: int  # cells of all slots together
    n_parked: int = 0  # slots beyond n_slots, for what idle ones hold
    unified: bool = True
    deterministic: bool = (
        False  # outputs must not depend on others: see core/sequence.py
    )
    can_shift: bool = True
    kind: SnapshotKind = SnapshotKind.RANGE
    n_outputs: int | None = None  # output rows of one step; None: one a slot
    n_swa: int = 0  # positions a window of the model holds; 0: it has none
    n_ubatch: int = 0  # tokens of one graph; 0: as many as a step has
    n_source: int = 0  # tokens that an encoder reads at once; 0: there is no encoder

    def __post_init__(self) -> None:
        assert self.n_ctx_slot >= 2, "one token of a prompt and one of output"
        assert self.n_batch >= self.n_slots >= 1, "every stream goes on in every step"
        assert self.n_cells >= 1
        assert min(self.n_parked, self.n_swa) >= 0
        assert self.n_outputs is None or self.n_outputs >= self.n_slots
        assert 0 <= self.n_source <= self.n_batch

    @property
    def n_whole_rows(self) -> int:
        """The most rows that can see each other."""
        return min(self.n_ubatch or self.n_batch, self.n_batch)

    def check(self, request: Request) -> None:
        """
        Check that the context can compute *request*; other contexts compute texts.

        Raises:
            PromptTooLong: it leaves no room for an output token, or is more than an
                encoder reads at once.
            BadMedia: rows that see each other are more than one micro-batch.
        """
        if request.lot.makes_vectors:
            return
        if len(request.tokens) >= self.n_ctx_slot:
            raise PromptTooLong(request.n_prompt, self.n_ctx_slot)
        assert (request.source is None) is (self.n_source == 0)
        if request.source is not None and len(request.source) > self.n_source:
            raise PromptTooLong(request.n_prompt, self.n_ctx_slot, self.n_source)
        for index, span in enumerate(request.spans):
            n_rows, n_most = span.stop - span.start, self.n_whole_rows
            if not span.is_causal and n_rows > n_most:
                raise BadMedia(
                    f"its {n_rows} rows see each other, so they are computed at once, "
                    f"and n_ubatch lets {n_most} be: raise it",
                    index,
                )

    def n_kept(self, sequence: Sequence) -> int:
        """Tokens of *sequence* that others may take over, once they are computed."""
        return n_kept(sequence) if self.deterministic else len(sequence.tokens)

    def n_movable(self, n_tokens: int) -> int:
        """The most of a slot's first *n_tokens* that others may get a copy of."""
        return n_movable(n_tokens, self.n_swa) if self.deterministic else n_tokens

    def is_repeatable(self, sequence: Sequence) -> bool:
        """
        Whether *sequence*, computed again, has the output that it would have had.

        What a shifted one holds was computed with tokens that are not there any more.
        """
        return not (self.deterministic and sequence.is_shifted)


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
        # Parked slots only hold what sequences have left.
        return len(self.running) < self.limits.n_slots

    @property
    def idle(self) -> list[Idle]:
        """Slots without a sequence: those of no use first, then the longest unused."""
        idle = [place for place in self.all if type(place) is Idle]
        return sorted(idle, key=lambda i: i.last_used if i.key and i.is_usable else 0)

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
        # Idle slots would give what none of the running ones shares with them.
        idle = {place.slot: place.n_held for place in self.all if type(place) is Idle}
        return self.n_free_cells + self.cells.n_only_of(idle)

    @property
    def n_unpromised(self) -> int:
        """Cells that no running sequence needs; idle slots have to give theirs."""
        if not self.limits.unified:
            return self.n_not_running
        running = self.running.values()
        n_promised = sum([growth(r.sequence, r.n_computed) for r in running])
        return self.n_not_running - n_promised

    @property
    def n_source_room(self) -> int:
        """Tokens that an encoder could read beside the sources of all that run."""
        running = self.running.values()
        return self.limits.n_source - sum([r.sequence.n_source for r in running])

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
        n_ctx_slot = self.limits.n_ctx_slot
        self.all[slot] = running = Running(sequence, slot, place.n_held, n_ctx_slot)
        self._list_running()
        return running

    def copy(self, src: int, running: Running, n_tokens: int) -> None:
        """*running*, whose slot is empty, gets the first tokens of *src* too."""
        assert running.n_computed == 0
        running.n_computed = n_tokens
        # Unified memory has one pool, so both slots use the same cells from now on.
        if self.limits.unified:
            self.cells.share(src, n_held_by(self.all[src]), running.slot, n_tokens)
        else:
            self.cells.n_used += n_tokens
        n_pos = running.sequence.position(n_tokens)
        self._moves.append(Copy(src, running.slot, n_pos))

    def load(self, running: Running, n_tokens: int, load: Load) -> None:
        """*load* fills the slot of *running* up to *n_tokens*."""
        self._hold(running, n_tokens)
        self._moves.append(load)

    def advance(self, running: Running, n_tokens: int) -> None:
        """The next *n_tokens* of *running* are in memory, too."""
        running.n_computed += n_tokens
        self.cells.n_used += n_tokens

    def rewind(self, running: Running, n_tokens: int) -> None:
        """Keep the first *n_tokens* of *running* only, and no part of a span."""
        # A step that was aborted may have computed more than it had: then it grows.
        n_tokens = running.sequence.whole(n_tokens)
        self._hold(running, n_tokens)
        n_pos = running.sequence.position(n_tokens)
        self._moves.append(Trim(running.slot, n_pos))

    def shift(self, running: Running, n_keep: int, n_discard: int) -> bool:
        """
        Drop tokens from the middle; what is left is no prefix of anything.

        False: all of it is to be computed again.
        """
        shifts = self.limits.can_shift and not self.cells.is_shared(running.slot)
        running.sequence.drop(n_keep, n_discard)
        running.n_full = min(running.sequence.n_complete, self.limits.n_ctx_slot)
        if shifts:
            self._hold(running, running.n_computed - n_discard)
            self._moves.append(Shift(running.slot, n_keep, n_discard))
        else:
            # A cell has one position for all that share it, or none can be shifted.
            self.rewind(running, 0)
        return shifts

    def leave(self, running: Running, n_kept: int) -> None:
        """Take the slot of *running*; it still holds *n_kept* tokens, if it can."""
        self._n_departures += 1
        limits, sequence, n_held = self.limits, running.sequence, running.n_computed
        if running.request.spans:
            n_kept = sequence.whole(min(n_kept, n_held))
        # Memory that can be cut is cut to what others may have. Other memory stays as
        # it is, and is of use if others may have all of it.
        is_usable = limits.kind.can_cut or (
            n_held <= limits.n_kept(sequence)
            and n_held == limits.n_movable(n_held)
            and n_held == sequence.whole(n_held)
        )
        idle = Idle(
            running.slot,
            running.tokens[:n_held].tobytes(),
            n_held,
            running.request.namespace,
            self._n_departures,
            is_usable,
            running.request.spans,
            running.request.n_prompt,
            running.request.scoring,
            sequence.prompt_logprobs,
        )
        self.all[idle.slot] = idle
        self._list_running()
        if n_kept == 0 or limits.kind.can_cut:
            self.cut(idle, n_kept)

    def fill(self, contents: Contents, payload: object) -> None:
        """An empty slot gets *contents*, whose state *payload* is; it was used last of all."""
        slot, n_tokens = contents.slot, len(contents.tokens)
        self.all[slot] = Idle(
            slot,
            contents.tokens.tobytes(),
            n_held=n_tokens,
            namespace=contents.namespace,
            last_used=1 + max(idle.last_used for idle in self.idle),
            n_prompt=contents.n_prompt,
        )
        self.cells.n_used += n_tokens
        load = Load(slot, (Piece(payload, 0, n_tokens),), n_tokens - 1)
        self._moves.append(load)

    def cut(self, idle: Idle, n_tokens: int) -> None:
        """An idle slot keeps its first *n_tokens* only."""
        if n_tokens == 0:
            self._moves.append(Release(idle.slot))
        elif n_tokens < idle.n_held:
            # Cells after the cut stay in use where other slots share them.
            self._moves.append(Trim(idle.slot, position(idle.spans, n_tokens)))
        self._shorten(idle, n_tokens)

    def lose(self, slot: int) -> None:
        """The context turned out to hold nothing of *slot*."""
        # There is nothing to move: the context has nothing there.
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
            self.cells.n_used += n_more
        else:
            self.cells.cut(running.slot, running.n_computed, n_tokens)
        running.n_computed = n_tokens

    def _shorten(self, idle: Idle, n_tokens: int) -> None:
        n_tokens = min(n_tokens, idle.n_held)
        idle.key = idle.key[: n_tokens * array("i").itemsize]
        self.cells.cut(idle.slot, idle.n_held, n_tokens)
        idle.n_held = n_tokens

    def _list_running(self) -> None:
        # A new dictionary, because callers go through the old one meanwhile.
        self.running = {
            place.request.request_id: place
            for place in self.all
            if type(place) is Running
        }

    def check_integrity(self) -> None:
        """Each sequence is where it says; a slot's cells are its computed tokens."""
        self.cells.check_integrity([n_held_by(place) for place in self.all])
        for slot, place in enumerate(self.all):
            assert place.slot == slot
            n_held = n_held_by(place)
            if isinstance(place, Idle):
                assert len(place.key) == n_held * array("i").itemsize
            if isinstance(place, Running):
                assert place is self.running[place.request.request_id]
                assert place.tokens is place.sequence.tokens
                n_full = min(place.sequence.n_complete, self.limits.n_ctx_slot)
                assert len(place.tokens) < place.n_full == n_full
                assert 0 <= n_held < len(place.tokens)
        slots = [running.slot for running in self.running.values()]
        assert slots == sorted(slots)
        assert len(slots) <= self.limits.n_slots
        assert self.n_free_cells >= 0


@dataclass(slots=True)
class Idle:
    """A slot without a sequence, and what the last one left."""

    slot: int
    key: bytes = b""  # tokens it still holds, one C int each
    n_held: int = 0  # of these
    namespace: Namespace = None  # of these, as spans and n_prompt
    last_used: int = 0  # counts departures
    is_usable: bool = True  # False: it holds more than others may take over, uncut
    spans: Spans = ()
    n_prompt: int = 0  # tokens that were computed in chunks; others one by one
    scoring: Scoring | None = None  # of *scores*
    scores: Items[TokenLogprobs] = ()  # of its tokens from scoring.first on


def n_held_by(place: Idle | Running) -> int:
    """Tokens of which the slot at *place* has cells."""
    return place.n_held if isinstance(place, Idle) else place.n_computed


class Contents(NamedTuple):
    """The contents of a slot, as a state of it is saved."""

    slot: int
    namespace: Namespace
    tokens: array[int]
    spans: Spans = ()
    n_prompt: int = 0  # tokens that were computed in chunks; others one by one


def contents_of(place: Idle | Running) -> Contents:
    """The contents of the slot at *place*, at this moment."""
    if isinstance(place, Idle):
        tokens = array("i", place.key)
        return Contents(
            place.slot, place.namespace, tokens, place.spans, place.n_prompt
        )
    request, tokens = place.request, place.tokens[: place.n_computed]
    return Contents(
        place.slot, request.namespace, tokens, request.spans, request.n_prompt
    )


class CellPool:
    """
    The cells in use, and which of them slots share.

    A slot's cells are a path of segments, then a tail that only it uses. `Slots` knows how
    many they are together, so a slot that fills new cells only adds to `n_used`. A copy
    makes the tail of its source a segment and shares the path. A segment has as many cells
    as the holder that uses most of it.
    """

    def __init__(self, n_slots: int) -> None:
        self.n_used = 0
        self._paths: list[list[Segment]] = [[] for _ in range(n_slots)]

    def cut(self, slot: int, n_held: int, n_kept: int) -> None:
        """*slot* keeps *n_kept* of its *n_held* cells; others keep what they share."""
        path = self._paths[slot]
        # The tail goes first: nobody else uses it.
        excess = n_held - n_kept
        n_cut = min(excess, n_held - self._n_in_path(slot))
        self.n_used -= n_cut
        excess -= n_cut
        # Then segments, from the last one on; cells that others use stay in use.
        while excess:
            segment = path[-1]
            before = segment.n_cells
            n_cut = min(excess, segment.holds[slot])
            segment.holds[slot] -= n_cut
            excess -= n_cut
            if not segment.holds[slot]:
                del segment.holds[slot]
                path.pop()
            segment.n_cells = max(segment.holds.values(), default=0)
            self.n_used -= before - segment.n_cells

    def share(self, src: int, n_held: int, dst: int, n_cells: int) -> None:
        """*dst*, which is empty, gets the first *n_cells* of the *n_held* of *src* too."""
        assert not self._paths[dst]
        # The tail of *src* is not its own any more.
        n_tail = n_held - self._n_in_path(src)
        if n_tail:
            self._paths[src].append(Segment(src, n_tail))
        # The path is shared from its start on, and its last segment in part.
        for segment in self._paths[src]:
            if n_cells <= 0:
                return
            segment.holds[dst] = min(segment.holds[src], n_cells)
            self._paths[dst].append(segment)
            n_cells -= segment.holds[dst]

    def _n_in_path(self, slot: int) -> int:
        return sum([segment.holds[slot] for segment in self._paths[slot]])

    def is_shared(self, slot: int) -> bool:
        return any(len(segment.holds) > 1 for segment in self._paths[slot])

    def n_only_of(self, lengths: Mapping[int, int]) -> int:
        """Cells that some of the slots in *lengths* use, and nobody else; it has those of each."""
        # A segment stays as long as the slot beside them that uses most of it.
        n_cells = sum(
            [n_held - self._n_in_path(slot) for slot, n_held in lengths.items()]
        )
        segments = {segment for slot in lengths for segment in self._paths[slot]}
        for segment in segments:
            sharers = segment.holds.keys() - lengths.keys()
            n_others = max([segment.holds[slot] for slot in sharers], default=0)
            n_cells += segment.n_cells - n_others
        return n_cells

    def check_integrity(self, lengths: Items[int]) -> None:
        """Segments and tails are the used cells; *lengths* has those of each slot."""
        segments = {segment for path in self._paths for segment in path}
        n_in_segments = sum(segment.n_cells for segment in segments)
        tails = [n_held - self._n_in_path(slot) for slot, n_held in enumerate(lengths)]
        assert self.n_used == n_in_segments + sum(tails)
        assert min(tails) >= 0
        for segment in segments:
            assert segment.n_cells == max(segment.holds.values())
            assert all(n > 0 for n in segment.holds.values())
            assert all(segment in self._paths[slot] for slot in segment.holds)


class Segment:
    """A run of cells and how many of them each slot uses."""

    __slots__ = ("holds", "n_cells")

    def __init__(self, slot: int, n_cells: int) -> None:
        self.holds = {slot: n_cells}  # cells from the start of the segment, by slot
        self.n_cells = n_cells  # of the holder with most
