"""
KV cells of unified memory, counted once however many slots share them.

A slot's cells are a path of segments, then a tail that only it uses: growing is counting.
A copy makes the tail of its source a segment and shares the path. A segment has as many
cells as the holder that uses most of it.
"""

from __future__ import annotations

from collections.abc import Collection


class Segment:
    """A run of cells and how many of them each slot uses."""

    __slots__ = ("holds", "n_cells")

    def __init__(self, slot: int, n_cells: int) -> None:
        self.holds = {slot: n_cells}  # cells from the start of the segment, by slot
        self.n_cells = n_cells  # of the holder with most


class CellPool:
    """Counts of the cells in use, by all and by some slots."""

    def __init__(self, n_slots: int) -> None:
        self.n_used = 0
        self._paths: list[list[Segment]] = [[] for _ in range(n_slots)]
        self.tails = [0] * n_slots  # cells after the path

    def grow(self, slot: int, n_cells: int) -> None:
        """*slot* fills *n_cells* new cells."""
        self.tails[slot] += n_cells
        self.n_used += n_cells

    def cut(self, slot: int, n_kept: int) -> None:
        """*slot* keeps its first *n_kept* cells; others keep what they share."""
        path = self._paths[slot]
        excess = max(self.length(slot) - n_kept, 0)
        n_cut = min(excess, self.tails[slot])
        self.tails[slot] -= n_cut
        self.n_used -= n_cut
        excess -= n_cut
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

    def share(self, src: int, dst: int, n_cells: int) -> None:
        """*dst*, which is empty, gets the first *n_cells* of *src* too."""
        assert self.length(dst) == 0
        if self.tails[src]:
            self._paths[src].append(Segment(src, self.tails[src]))
            self.tails[src] = 0
        for segment in self._paths[src]:
            if n_cells <= 0:
                return
            segment.holds[dst] = min(segment.holds[src], n_cells)
            self._paths[dst].append(segment)
            n_cells -= segment.holds[dst]

    def length(self, slot: int) -> int:
        """Cells *slot* uses, shared or not."""
        return self.tails[slot] + sum(s.holds[slot] for s in self._paths[slot])

    def is_shared(self, slot: int) -> bool:
        return any(len(segment.holds) > 1 for segment in self._paths[slot])

    def n_only_of(self, slots: Collection[int]) -> int:
        """Cells that some of *slots* use, and nobody else."""
        n_cells = sum([self.tails[slot] for slot in slots])
        segments = {segment for slot in slots for segment in self._paths[slot]}
        for segment in segments:
            others = segment.holds.keys() - slots
            n_others = max([segment.holds[slot] for slot in others], default=0)
            n_cells += segment.n_cells - n_others
        return n_cells

    def check_integrity(self) -> None:
        """The sum of the segments is the number of used cells."""
        segments = {segment for path in self._paths for segment in path}
        n_in_segments = sum(segment.n_cells for segment in segments)
        assert self.n_used == n_in_segments + sum(self.tails)
        assert min(self.tails) >= 0
        for segment in segments:
            assert segment.n_cells == max(segment.holds.values())
            assert all(n > 0 for n in segment.holds.values())
            assert all(segment in self._paths[slot] for slot in segment.holds)
