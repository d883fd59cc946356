"""The radix tree: shared prefixes share nodes, and nothing useless stays."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.core.memory.snapshots import RadixTree, n_common


def key(text: str) -> bytes:
    return array("i", map(ord, text)).tobytes()


def make_tree(*texts: str) -> RadixTree[str]:
    tree: RadixTree[str] = RadixTree()
    for text in texts:
        tree.insert(key(text)).entry = text
        tree.check_integrity()
    return tree


def edges(tree: RadixTree[str]) -> list[tuple[str, int]]:
    """The text of every edge and where it starts."""
    return sorted(
        ("".join(map(chr, array("i", node.edge))), node.start)
        for node in tree.root.below()
        if not node.is_root
    )


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [("", "", 0), ("a", "", 0), ("abc", "abd", 2), ("abc", "abcd", 3), ("x", "y", 0)],
)
def test_common_prefix_is_counted_in_tokens(a, b, expected):
    """
    Two runs of tokens share as many as are equal from the start.
    """
    assert n_common(key(a), key(b)) == expected


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.data())
def test_common_prefix_of_any_ids(ids, data):
    """
    Ids that differ in any one bit, of any sign, end the common prefix.
    """
    at = data.draw(st.integers(0, len(ids)))
    other = ids[:at] + [n ^ (1 << data.draw(st.integers(0, 30))) for n in ids[at:]]

    assert n_common(array("i", ids).tobytes(), array("i", other).tobytes()) == at


def test_paths_share_their_common_prefix():
    """
    Two keys that part inside an edge split it; each token is in the tree once.
    """
    tree = make_tree("hello", "help", "hel")

    assert edges(tree) == [("hel", 0), ("lo", 3), ("p", 3)]


def test_walk_counts_into_an_edge():
    """
    A key that parts inside an edge has matched up to there.
    """
    tree = make_tree("hello")

    path = tree.walk(key("help"))

    assert (path.n_tokens, path.is_at_node, path.is_at_leaf) == (3, False, False)


def test_walk_of_an_unknown_key_matches_nothing():
    """
    A first token nobody has leads to no node.
    """
    path = make_tree("hello").walk(key("yes"))

    assert path.nodes == []
    assert (path.n_tokens, path.is_at_node, path.is_at_leaf) == (0, True, True)


def test_inserting_a_known_key_gives_its_node():
    """
    The same key always ends at the same node.
    """
    tree = make_tree("hello")

    assert tree.insert(key("hello")).entry == "hello"


def test_pruning_joins_what_no_longer_parts():
    """
    When one of two branches goes, the other becomes one edge again.
    """
    tree = make_tree("hello", "help")
    node = tree.insert(key("help"))
    node.entry = None

    tree.prune(node)

    tree.check_integrity()
    assert edges(tree) == [("hello", 0)]


def test_pruning_keeps_nodes_with_entries():
    """
    An entry above the pruned one stays where it is.
    """
    tree = make_tree("hel", "hello")
    node = tree.insert(key("hello"))
    node.entry = None

    remaining = tree.prune(node)

    assert remaining.entry == "hel"
    assert edges(tree) == [("hel", 0)]


def test_pruning_the_last_entry_empties_the_tree():
    """
    No path stays without an entry.
    """
    tree = make_tree("hello")
    node = tree.insert(key("hello"))
    node.entry = None

    tree.prune(node)

    assert tree.is_empty


def test_pruning_an_inner_entry_joins_its_edges():
    """
    A node without entry and with one child is no node.
    """
    tree = make_tree("hel", "hello")
    node = tree.insert(key("hel"))
    node.entry = None

    tree.prune(node)

    tree.check_integrity()
    assert edges(tree) == [("hello", 0)]


def test_nodes_of_different_covers_are_not_joined():
    """
    Edges whose positions are held by different entries stay apart.
    """
    tree = make_tree("hel", "hello")
    upper, lower = tree.insert(key("hel")), tree.insert(key("hello"))
    upper.entry, upper.cover, lower.cover = None, "first", "second"

    tree.prune(upper)

    assert edges(tree) == [("hel", 0), ("lo", 3)]
