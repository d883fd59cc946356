"""
The four things a snapshot can be, as the memory of the model allows.

The context finds out which one holds when it starts. A layout answers what of a tree path
can be restored, what is still to capture, and which entries need each other. It decides;
it never touches bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum

from pyllama_raw.core.memory.cache_entry import CapturePlan, Entry, Stretch
from pyllama_raw.core.memory.radix_tree import TOKEN_BYTES, Node, Path, n_common
from pyllama_raw.core.namespace import Namespace


class SnapshotKind(Enum):
    """A kind of snapshot: what one holds and where it is of use."""

    RANGE = "range"  # its own positions only; restored as a chain, cut anywhere
    STATE = "state"  # all positions from 0; cut anywhere
    EXACT = "exact"  # all positions from 0; of use at its last position only
    CHAIN = (
        "chain"  # its own positions only, and what holds at its last one: of use there
    )

    @property
    def can_cut(self) -> bool:
        """Whether memory of this kind can forget its last tokens only."""
        return self in (SnapshotKind.RANGE, SnapshotKind.STATE)

    @property
    def is_part(self) -> bool:
        """Whether what lies before its own positions comes from other snapshots."""
        return self in (SnapshotKind.RANGE, SnapshotKind.CHAIN)

    @property
    def whole(self) -> SnapshotKind:
        """The kind that the same memory has if each snapshot stands alone."""
        if not self.is_part:
            return self
        return SnapshotKind.STATE if self.can_cut else SnapshotKind.EXACT


class Layout(ABC):
    """The rules of one kind of snapshot; by default each starts at 0 and stands alone."""

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
        ground = tuple(span.entry for span in self.spans(path))
        return CapturePlan(namespace, key, path.n_tokens, stop, ground)

    def overlaps(self, plan: CapturePlan, other: CapturePlan) -> bool:
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
        node = path.nodes[-1]
        while node.entry is None:  # every leaf has one
            node = next(iter(node.children.values()))
        return (Stretch(node.entry, 0, path.n_tokens),)

    def plan(
        self, namespace: Namespace, key: bytes, path: Path[Entry]
    ) -> CapturePlan | None:
        stop = len(key) // TOKEN_BYTES
        return None if path.n_tokens == stop else CapturePlan(namespace, key, 0, stop)

    def overlaps(self, plan: CapturePlan, other: CapturePlan) -> bool:
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
    Points of a path that share the positions before them: each needs the one it goes on from.

    Memory with a recurrent state or a window is of use at a point only, but most bytes of a
    point are those of positions that earlier points have, too.
    """

    def spans(self, path: Path[Entry]) -> tuple[Stretch, ...]:
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
        return (
            None if start == stop else CapturePlan(namespace, key, start, stop, ground)
        )

    def attach(self, entry: Entry, node: Node[Entry]) -> None:
        super().attach(entry, node)
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
