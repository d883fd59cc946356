"""Freed once, parents outlive children. Runs without libllama: the C side is a list."""

import gc
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.errors import ClosedError
from pyllama_raw.native.libllama import Handle


@pytest.fixture(scope="module", autouse=True)
def _small_heap():
    """A collection looks at what these tests make, not at all that others have loaded."""
    gc.freeze()
    yield
    gc.unfreeze()


def make_tree() -> tuple[dict[str, Handle], list[str]]:
    freed: list[str] = []
    model = Handle("model", freed.append)
    context = Handle("context", freed.append, parents=[model])
    other = Handle("other", freed.append, parents=[model])
    leaf = Handle("leaf", freed.append, parents=[context])
    return {"model": model, "context": context, "other": other, "leaf": leaf}, freed


def test_close_frees_once():
    """
    However often close() is called, C frees once; the pointer cannot be had any more.
    """
    freed: list[str] = []
    handle = Handle("p", freed.append)

    assert handle.ptr == "p"
    handle.close()
    handle.close()

    assert freed == ["p"]
    assert handle.closed
    with pytest.raises(ClosedError, match="Handle is closed"):
        _ = handle.ptr


def test_leaving_the_block_closes():
    """
    A with block frees at its end, also when it ends by an exception.
    """
    freed: list[str] = []
    with pytest.raises(ZeroDivisionError), Handle("p", freed.append):
        _ = 1 / 0

    assert freed == ["p"]


def test_a_parent_may_come_later():
    """
    What keep() names is freed after the handle, like a parent from the start.
    """
    freed: list[str] = []
    handle, late = Handle("handle", freed.append), Handle("late", freed.append)
    handle.keep(late)

    late.close()
    assert freed == []
    handle.close()
    assert freed == ["handle", "late"]
    with pytest.raises(ClosedError):
        handle.keep(late)


def test_a_forgotten_handle_is_freed():
    """
    The finaliser frees what nobody closed.
    """
    freed: list[str] = []
    handle = Handle("p", freed.append)
    del handle
    gc.collect()

    assert freed == ["p"]


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["model", "context", "other", "leaf"]))
)
def test_parents_are_freed_after_their_children(order):
    """
    In whatever order handles are closed, every child is freed before its parent, once.
    """
    handles, freed = make_tree()

    for name in order:
        handles[name].close()

    assert sorted(freed) == ["context", "leaf", "model", "other"]
    assert freed.index("leaf") < freed.index("context") < freed.index("model")
    assert freed.index("other") < freed.index("model")


@given(st.lists(st.sampled_from(["model", "context", "other", "leaf"]), max_size=8))
def test_closed_and_collected_handles_mix(names):
    """
    Some handles are closed and the rest collected: the promises hold all the same.
    """
    handles, freed = make_tree()

    for name in names:
        handles[name].close()
    handles.clear()
    gc.collect()

    assert sorted(freed) == ["context", "leaf", "model", "other"]
    assert freed.index("leaf") < freed.index("context") < freed.index("model")


def test_a_child_may_have_two_parents():
    """
    Every parent waits for the child, whichever is closed first.
    """
    freed: list[str] = []
    model, flag = Handle("model", freed.append), Handle("flag", freed.append)
    child = Handle("child", freed.append, parents=[model, flag])
    flag.close()
    model.close()

    assert freed == []
    child.close()
    assert freed == ["child", "model", "flag"]


def test_a_closed_parent_has_no_new_children():
    """
    A closed model cannot get a context, even while an old context keeps it in memory.
    """
    freed: list[str] = []
    model = Handle("model", freed.append)
    child = Handle("child", freed.append, parents=[model])
    model.close()

    with pytest.raises(ClosedError):
        Handle("late", freed.append, parents=[model])
    assert freed == []
    child.close()
    assert freed == ["child", "model"]
