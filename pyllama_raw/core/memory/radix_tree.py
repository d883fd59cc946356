"""
A radix tree over token ids: paths with a common prefix share its nodes.

Rule: nothing stays in the tree that does not lead to an entry, and no two nodes stay
that could be one.

Tokens are kept as bytes (one C int each), so runs are compared by memcmp and the length
of an edge costs next to nothing. A position that is no token (an image patch) is any id
the caller gives it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

TOKEN_BYTES = array("i").itemsize

T = TypeVar("T")


class RadixTree(Generic[T]):
    """Token paths of one namespace."""

    def __init__(self) -> None:
        self.root: Node[T] = Node(None, b"", 0)

    @property
    def is_empty(self) -> bool:
        return not self.root.children

    def walk(self, key: bytes) -> Path[T]:
        """The longest prefix of *key* in the tree, counted inside edges too."""
        nodes: list[Node[T]] = []
        node, at = self.root, 0
        while (child := node.children.get(key[at : at + TOKEN_BYTES])) is not None:
            nodes.append(child)
            # The key parts from this edge, or ends inside it.
            if not key.startswith(child.edge, at):
                n_shared = n_common(child.edge, key[at : at + len(child.edge)])
                return Path(nodes, at // TOKEN_BYTES + n_shared)
            node, at = child, at + len(child.edge)
        return Path(nodes, at // TOKEN_BYTES)

    def insert(self, key: bytes) -> Node[T]:
        """The node that ends with *key*, made if need be; its caller sets the entry."""
        path = self.walk(key)
        node = path.nodes[-1] if path.nodes else self.root
        if not path.is_at_node:
            # The key ends or parts inside an edge: cut that, *lower* stays what it was.
            lower, parent = node, node.parent
            assert parent is not None
            cut = (path.n_tokens - lower.start) * TOKEN_BYTES
            node = Node(parent, lower.edge[:cut], lower.start)
            node.cover = lower.cover
            parent.children[node.edge[:TOKEN_BYTES]] = node
            lower.parent, lower.edge, lower.start = node, lower.edge[cut:], node.stop
            node.children[lower.edge[:TOKEN_BYTES]] = lower
        tail = key[path.n_tokens * TOKEN_BYTES :]
        if not tail:
            return node
        leaf: Node[T] = Node(node, tail, path.n_tokens)
        node.children[tail[:TOKEN_BYTES]] = leaf
        return leaf

    def prune(self, node: Node[T]) -> Node[T]:
        """Take away what leads to no entry, from *node* up; the node that stays."""
        while node.parent is not None and node.entry is None and not node.children:
            del node.parent.children[node.edge[:TOKEN_BYTES]]
            node = node.parent
        if node.parent is None or not _is_needless(node):
            return node
        # One path goes on and nothing ends here: join it with its child, which stays.
        (child,), parent = node.children.values(), node.parent
        child.parent, child.start = parent, node.start
        child.edge = node.edge + child.edge
        parent.children[child.edge[:TOKEN_BYTES]] = child
        return child

    def check_integrity(self) -> None:
        """The rule of this module, as assertions."""
        for node in self.root.below():
            for first, child in node.children.items():
                assert child.parent is node
                assert child.start == node.stop
                assert first == child.edge[:TOKEN_BYTES] != b""
            if not node.is_root:
                assert node.entry is not None or node.children
                assert not _is_needless(node)


class Path(NamedTuple, Generic[T]):
    """The nodes a key runs through; the last one perhaps in part."""

    nodes: list[Node[T]]  # without the root
    n_tokens: int  # matched

    @property
    def is_at_node(self) -> bool:
        """Does the match end where a node ends?"""
        return not self.nodes or self.nodes[-1].stop == self.n_tokens

    @property
    def is_at_leaf(self) -> bool:
        """Does the match end where a path ends, or before it began?"""
        return not self.nodes or (self.is_at_node and not self.nodes[-1].children)


class Node(Generic[T]):
    """The end of a run of tokens at positions [start, stop)."""

    __slots__ = ("children", "cover", "edge", "entry", "parent", "start")

    def __init__(self, parent: Node[T] | None, edge: bytes, start: int) -> None:
        self.parent = parent
        self.edge = edge
        self.start = start
        self.children: dict[bytes, Node[T]] = {}  # by the first token of their edge
        self.entry: T | None = None  # ends at stop
        self.cover: T | None = None  # holds the positions of this edge, if one does

    @property
    def stop(self) -> int:
        return self.start + len(self.edge) // TOKEN_BYTES

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def below(self) -> Iterator[Node[T]]:
        """This node and all under it, parents before children."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())


def _is_needless(node: Node[T]) -> bool:
    """Whether *node* and its only child could be one node."""
    if node.is_root or node.entry is not None or len(node.children) != 1:
        return False
    (child,) = node.children.values()
    return child.cover is node.cover


def n_common(a: bytes, b: bytes) -> int:
    """Tokens at the start of *a* and *b* that are equal."""
    # Most often the first ones differ already.
    if a[:TOKEN_BYTES] != b[:TOKEN_BYTES]:
        return 0
    n_bytes = min(len(a), len(b))
    a, b = a[:n_bytes], b[:n_bytes]
    if a == b:
        return n_bytes // TOKEN_BYTES
    # The lowest set bit of the difference lies in the first byte that differs.
    difference = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)
