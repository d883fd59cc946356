"""Cells of unified memory are counted once, whoever shares them."""

from pyllama_raw.core.memory.slots import CellPool


class Holders:
    """Slots that say how many cells they hold."""

    def __init__(self, n_slots: int) -> None:
        self.pool = CellPool(n_slots)
        self.lengths = [0] * n_slots

    def grow(self, slot: int, n_cells: int) -> None:
        self.lengths[slot] += n_cells
        self.pool.n_used += n_cells

    def share(self, src: int, dst: int, n_cells: int) -> None:
        self.pool.share(src, self.lengths[src], dst, n_cells)
        self.lengths[dst] = n_cells

    def cut(self, slot: int, n_kept: int) -> None:
        self.pool.cut(slot, self.lengths[slot], n_kept)
        self.lengths[slot] = n_kept

    def n_used(self) -> int:
        self.pool.check_integrity(self.lengths)
        return self.pool.n_used

    def n_only_of(self, *slots: int) -> int:
        return self.pool.n_only_of({slot: self.lengths[slot] for slot in slots})


def make_shared() -> Holders:
    """Slot 0 uses ten cells, slot 1 the first six of them and four of its own."""
    slots = Holders(3)
    slots.grow(0, 10)
    slots.share(0, 1, 6)
    slots.grow(1, 4)
    return slots


def test_a_copy_uses_no_cells():
    """
    What slots share counts once; each grows with cells of its own.
    """
    slots = make_shared()

    assert slots.n_used() == 14
    assert [slots.pool.is_shared(slot) for slot in range(3)] == [True, True, False]


def test_a_copy_of_several_segments_ends_where_asked():
    """
    A path is shared segment by segment, the last one in part.
    """
    slots = make_shared()
    slots.share(1, 2, 8)

    assert slots.n_used() == 14
    slots.cut(1, 0)
    assert slots.n_used() == 12


def test_a_copy_ends_with_a_segment():
    """
    Nothing of the segments after it is shared.
    """
    slots = make_shared()
    slots.share(1, 2, 6)

    slots.cut(0, 0)
    slots.cut(1, 0)

    assert slots.n_used() == 6
    assert not slots.pool.is_shared(2)


def test_cut_cells_stay_while_another_slot_uses_them():
    """
    The longest user of a segment decides how many of its cells are in use.
    """
    slots = make_shared()

    slots.cut(0, 0)
    assert slots.n_used() == 10
    slots.cut(1, 5)
    assert slots.n_used() == 5
    slots.cut(1, 0)
    assert slots.n_used() == 0


def test_a_source_that_was_cut_and_grows_leaves_the_copy_alone():
    """
    New cells after a cut are not those the copy still uses.
    """
    slots = Holders(2)
    slots.grow(0, 10)
    slots.share(0, 1, 10)

    slots.cut(0, 4)
    slots.grow(0, 3)

    assert slots.n_used() == 13


def test_cells_of_some_slots_only_are_what_would_be_free_without_them():
    """
    What others share with them does not count; what they share among themselves does, once.
    """
    slots = make_shared()

    assert slots.n_only_of(0) == 4
    assert slots.n_only_of(1) == 4
    assert slots.n_only_of(0, 1) == 14
    assert slots.n_only_of(2) == 0
