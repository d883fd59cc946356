"""
Snapshots: saved states of slots, their kinds, the points of a prompt to save, and their tree.

Rules:
1. The memory of a model allows one of four kinds of snapshot. The context finds out
   which one when it starts.
2. A layout has the rules of a kind: what of a path in a tree of tokens can be restored,
   what is still to be captured, and which entries need each other. It decides; it never
   touches bytes.
3. An entry changes in the hands of its `PrefixCache` only; others read it.
4. Memory that cannot be cut is captured at points of a prompt, where its chunks end.

The tree is a radix tree over token ids: paths with a common prefix share its nodes. Nothing stays
in the tree that does not lead to an entry, and no two nodes stay that could be one. Tokens are kept
as bytes (one C int each), so runs are compared by memcmp and the length of an edge costs next to
nothing. A position that is no token (an image patch) is any id the caller gives it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from pyllama_raw.core.request import Namespace
from pyllama_raw.core.sequence import N_FRESH

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


class SnapshotKind(Enum):
    """A kind of snapshot: what one holds and where it is of use."""

    RANGE = "range"  # its own positions only; restored as a chain, cut anywhere
    STATE = "state"  # all positions from 0; cut anywhere
    EXACT = "exact"  # all positions from 0; of use at its last position only
    CHAIN = "chain"  # its own positions, and what holds at its last one: of use there

    def __init__(self, kind: str) -> None:
        self.can_cut = kind in ("range", "state")
        """Whether memory of this kind can forget its last tokens only."""
        self.is_part = kind in ("range", "chain")
        """Whether what lies before its own positions comes from other snapshots."""

    @property
    def whole(self) -> SnapshotKind:
        """The kind that the same memory has if each snapshot stands alone."""
        if not self.is_part:
            return self
        return SnapshotKind.STATE if self.can_cut else SnapshotKind.EXACT


def snapshot_points(n_prompt: int, interval: int, marked: Iterable[int]) -> set[int]:
    """
    Positions to capture at, each at least 1; what is left is computed on a full hit.

    Args:
        interval: tokens between regular points; 0: none.
        marked: other positions that are of use.
    """
    last = n_prompt - N_FRESH
    regular = range(interval, last, interval) if interval else ()
    return {point for point in (*regular, *marked, last) if 0 < point <= last}


def spaced(points: Iterable[int], start: int, gap: int) -> list[int]:
    """Select *points*, rising, that are at least *gap* after *start* and each other."""
    selected: list[int] = []
    for point in sorted(points):
        if point >= start + gap:
            selected.append(point)
            start = point
    return selected


# -- values ---------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Entry:
    """One snapshot of the positions [start, stop) of a token path."""

    entry_id: int  # rises with the order of storing
    namespace: Namespace
    start: int  # 0 unless the snapshot is a part
    stop: int
    n_bytes: int  # of the snapshot
    payload: object = field(repr=False)  # the executor's; None once released
    node: Node[Entry] | None = field(default=None, repr=False)  # None: dropped
    n_pins: int = 0
    last_used: int = 0  # count of queries and stores so far, not a time
    is_queued: bool = False  # the eviction queue has it
    # In a chain: the entry that this one goes on from, and the number that go on here.
    ground: Entry | None = field(default=None, repr=False)
    n_upon: int = 0

    @property
    def n_tokens(self) -> int:
        return self.stop - self.start

    @property
    def n_charged(self) -> int:
        """Bytes counted against the limit: the snapshot and its tokens in the tree."""
        return charged(self.n_bytes, self.start, self.stop)


def charged(n_bytes: int, start: int, stop: int) -> int:
    """
    Bytes that a snapshot of [start, stop) costs.

    Tokens that several entries share in the tree are charged to each of them, so the
    sum is never less than what is held.
    """
    return n_bytes + TOKEN_BYTES * (stop - start)


class Stretch(NamedTuple):
    """The part [start, stop) of an entry that a restore uses; the rest is trimmed."""

    entry: Entry
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Hit:
    """
    Snapshots that can be restored for a prompt.

    Valid until the cache changes, or while pinned.
    """

    n_tokens: int  # in the slot after restoring all spans and trimming to here
    spans: tuple[Stretch, ...]  # to restore in this order; they join without gap from 0
    n_matched: int  # tokens the tree knows, usable or not
    n_prompt: int

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(span.entry for span in self.spans)

    @property
    def n_bytes(self) -> int:
        """Bytes of all snapshots, because each is restored whole."""
        return sum(span.entry.n_bytes for span in self.spans)

    @property
    def n_cells(self) -> int:
        """Cells of a restore, before the end of the last snapshot is cut off."""
        return max((span.entry.stop for span in self.spans), default=0)


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """A snapshot to be made: positions [start, stop) of the path *key*."""

    namespace: Namespace
    key: bytes = field(repr=False)  # all tokens before stop
    start: int
    stop: int
    ground: tuple[Entry, ...] = ()  # must stay for the new entry to be of use


# -- layouts --------------------------------------------------------------------------


class Layout(ABC):
    """The rules of one kind; by default each snapshot starts at 0 and stands alone."""

    @abstractmethod
    def spans(self, path: Path[Entry]) -> tuple[Stretch, ...]:
        """Spans to restore for the deepest usable point of *path*."""

    @abstractmethod
    def plan(
        self, namespace: Namespace, key: bytes, path: Path[Entry]
    ) -> CapturePlan | None:
        """Plan a snapshot of *key*; None if *path*, its walk, has it all."""

    @abstractmethod
    def overlaps(self, plan: CapturePlan, other: CapturePlan) -> bool:
        """Would *plan* capture again what *other* is capturing?"""

    def attach(self, entry: Entry, node: Node[Entry]) -> None:
        """Make *entry* the one that ends at *node*."""
        node.entry = entry
        entry.node = node

    def replaced(self, path: Path[Entry]) -> list[Entry]:  # noqa: ARG002
        """Entries made useless by a new one that *path* leads to."""
        return []

    def is_needed(self, entry: Entry) -> bool:  # noqa: ARG002
        """Do other entries build on this one?"""
        return False

    def falling(self, entry: Entry) -> list[Entry]:
        """*entry* and all that build on it, in an order to take them away in."""
        return [entry]


class RangeLayout(Layout):
    """Each token's bytes exist once; an entry needs those before it on its path."""

    def spans(self, path: Path[Entry]) -> tuple[Stretch, ...]:
        spans: list[Stretch] = []
        for node in path.nodes:
            assert node.cover is not None
            stop = min(node.stop, path.n_tokens)
            if spans and spans[-1].entry is node.cover:
                # Branches of the tree have parted the positions of one entry.
                spans[-1] = spans[-1]._replace(stop=stop)
            else:
                spans.append(Stretch(node.cover, node.start, stop))
        return tuple(spans)

    def plan(
        self, namespace: Namespace, key: bytes, path: Path[Entry]
    ) -> CapturePlan | None:
        stop = len(key) // TOKEN_BYTES
        if path.n_tokens == stop:
            return None
        # Only what no entry has is captured; those before it must stay.
        ground = tuple(span.entry for span in self.spans(path))
        return CapturePlan(namespace, key, path.n_tokens, stop, ground)

    def overlaps(self, plan: CapturePlan, other: CapturePlan) -> bool:
        # Both would have the position at which this one starts.
        return n_common(plan.key, other.key) > plan.start

    def attach(self, entry: Entry, node: Node[Entry]) -> None:
        assert node.start == entry.start
        super().attach(entry, node)
        node.cover = entry

    def is_needed(self, entry: Entry) -> bool:
        assert entry.node is not None
        # Without branches the tree has merged all its positions into one node.
        return bool(entry.node.children) or entry.node.start != entry.start

    def falling(self, entry: Entry) -> list[Entry]:
        node = entry.node
        assert node is not None
        while node.parent is not None and node.parent.cover is entry:
            node = node.parent
        # All below the first position of a range builds on it.
        return [n.entry for n in node.below() if n.entry is not None][::-1]


class StateLayout(Layout):
    """The longest state of a lineage serves every shorter prefix of it."""

    def spans(self, path: Path[Entry]) -> tuple[Stretch, ...]:
        if not path.nodes:
            return ()
        # Any state below has the tokens of the path, too; every leaf has one.
        node = path.nodes[-1]
        while node.entry is None:
            node = next(iter(node.children.values()))
        return (Stretch(node.entry, 0, path.n_tokens),)

    def plan(
        self, namespace: Namespace, key: bytes, path: Path[Entry]
    ) -> CapturePlan | None:
        stop = len(key) // TOKEN_BYTES
        return None if path.n_tokens == stop else CapturePlan(namespace, key, 0, stop)

    def overlaps(self, plan: CapturePlan, other: CapturePlan) -> bool:
        # The other one will serve this prefix, too.
        return other.key.startswith(plan.key)

    def replaced(self, path: Path[Entry]) -> list[Entry]:
        return _entries_on(path)


class ExactLayout(Layout):
    """Several points of a path are kept; the deepest one that is reached counts."""

    def spans(self, path: Path[Entry]) -> tuple[Stretch, ...]:
        return tuple(Stretch(entry, 0, entry.stop) for entry in _entries_on(path)[-1:])

    def plan(
        self, namespace: Namespace, key: bytes, path: Path[Entry]
    ) -> CapturePlan | None:
        stop = len(key) // TOKEN_BYTES
        if any(entry.stop == stop for entry in _entries_on(path)[-1:]):
            return None
        return CapturePlan(namespace, key, 0, stop)

    def overlaps(self, plan: CapturePlan, other: CapturePlan) -> bool:
        return other.key == plan.key


class ChainLayout(ExactLayout):
    """
    Points of a path that share the positions before them: each needs the one before.

    Memory with a recurrent state or a window is of use at a point only, but most bytes
    of a point are those of positions that earlier points have, too.
    """

    def spans(self, path: Path[Entry]) -> tuple[Stretch, ...]:
        # Back from the last point that is reached, to the one at the beginning.
        spans: list[Stretch] = []
        entry = next(iter(_entries_on(path)[-1:]), None)
        while entry is not None:
            spans.append(Stretch(entry, entry.start, entry.stop))
            entry = entry.ground
        return tuple(reversed(spans))

    def plan(
        self, namespace: Namespace, key: bytes, path: Path[Entry]
    ) -> CapturePlan | None:
        stop = len(key) // TOKEN_BYTES
        ground = tuple(span.entry for span in self.spans(path))
        start = ground[-1].stop if ground else 0
        if start == stop:
            return None
        return CapturePlan(namespace, key, start, stop, ground)

    def attach(self, entry: Entry, node: Node[Entry]) -> None:
        super().attach(entry, node)
        # Nodes above may end inside its positions, where other points of the path are.
        above = node.parent
        while above is not None and above.stop > entry.start:
            above = above.parent
        assert above is not None
        entry.ground = above.entry
        if entry.ground is not None:
            entry.ground.n_upon += 1

    def is_needed(self, entry: Entry) -> bool:
        return entry.n_upon > 0

    def falling(self, entry: Entry) -> list[Entry]:
        assert entry.node is not None
        falling = [entry]
        for node in entry.node.below():
            # Parents come before children: what an entry goes on from is there already.
            if node.entry is not None and node.entry.ground in falling:
                falling.append(node.entry)
        return falling[::-1]


def _entries_on(path: Path[Entry]) -> list[Entry]:
    """Entries that end on *path*, in its order."""
    return [
        node.entry
        for node in path.nodes
        if node.entry is not None and node.stop <= path.n_tokens
    ]


LAYOUTS: dict[SnapshotKind, Layout] = {
    SnapshotKind.RANGE: RangeLayout(),
    SnapshotKind.STATE: StateLayout(),
    SnapshotKind.EXACT: ExactLayout(),
    SnapshotKind.CHAIN: ChainLayout(),
}
