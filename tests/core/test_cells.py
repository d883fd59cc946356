"""Cells of unified memory are counted once, whoever shares them."""

from pyllama_raw.core.memory.slots import CellPool


def make_shared() -> CellPool:
    """Slot 0 uses ten cells, slot 1 the first six of them and four of its own."""
    pool = CellPool(3)
    pool.grow(0, 10)
    pool.share(0, 1, 6)
    pool.grow(1, 4)
    return pool


def test_a_copy_uses_no_cells():
    """
    What slots share counts once; each grows with cells of its own.
    """
    pool = make_shared()

    assert (pool.n_used, pool.length(0), pool.length(1)) == (14, 10, 10)
    assert pool.is_shared(0)
    assert pool.is_shared(1)
    assert not pool.is_shared(2)
    pool.check_integrity()


def test_a_copy_of_several_segments_ends_where_asked():
    """
    A path is shared segment by segment, the last one in part.
    """
    pool = make_shared()
    pool.share(1, 2, 8)

    assert (pool.n_used, pool.length(2)) == (14, 8)
    pool.cut(1, 0)
    assert (pool.n_used, pool.length(2)) == (12, 8)
    pool.check_integrity()


def test_a_copy_ends_with_a_segment():
    """
    Nothing of the segments after it is shared.
    """
    pool = make_shared()
    pool.share(1, 2, 6)

    pool.cut(0, 0)
    pool.cut(1, 0)

    assert (pool.n_used, pool.length(2), pool.is_shared(2)) == (6, 6, False)
    pool.check_integrity()


def test_cut_cells_stay_while_another_slot_uses_them():
    """
    The longest user of a segment decides how many of its cells are in use.
    """
    pool = make_shared()

    pool.cut(0, 0)
    assert pool.n_used == 10
    pool.cut(1, 5)
    assert pool.n_used == 5
    pool.cut(1, 0)
    assert pool.n_used == 0
    pool.check_integrity()


def test_a_source_that_was_cut_and_grows_leaves_the_copy_alone():
    """
    New cells after a cut are not those the copy still uses.
    """
    pool = CellPool(2)
    pool.grow(0, 10)
    pool.share(0, 1, 10)

    pool.cut(0, 4)
    pool.grow(0, 3)

    assert (pool.n_used, pool.length(0), pool.length(1)) == (13, 7, 10)
    pool.check_integrity()


def test_cells_of_some_slots_only_are_what_would_be_free_without_them():
    """
    What others share with them does not count; what they share among themselves does, once.
    """
    pool = make_shared()

    assert pool.n_only_of({0}) == 4
    assert pool.n_only_of({1}) == 4
    assert pool.n_only_of({0, 1}) == 14
    assert pool.n_only_of({2}) == 0
