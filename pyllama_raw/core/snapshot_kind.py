"""
The three things a snapshot can be, as the memory of the model allows.

The context finds out which one holds when it starts. A layout answers what of a tree path
can be restored, what is still to capture, and which entries need each other; it never
touches bytes.
"""

from __future__ import annotations

from enum import Enum

from pyllama_raw.core.cache_entry import Entry, Span
from pyllama_raw.core.radix_tree import Node, Path


class SnapshotKind(Enum):
    """What one snapshot holds and where it is of use."""

    RANGE = "range"  # its own positions only; restored as a chain, cut anywhere
    STATE = "state"  # all positions from 0; cut anywhere
    EXACT = "exact"  # all positions from 0; of use at its last position only


class RangeLayout:
    """Each token's bytes exist once; an entry needs those before it on its path."""

    def spans(self, path: Path[Entry]) -> tuple[Span, ...]:
        """The chain from position 0, best restore first to last."""
        spans: list[Span] = []
        for node in path.nodes:
            entry = node.cover
            assert entry is not None
            stop = min(node.stop, path.n_tokens)
            if spans and spans[-1].entry is entry:
                spans[-1] = Span(entry, spans[-1].start, stop)
            else:
                spans.append(Span(entry, node.start, stop))
        return tuple(spans)

    def to_capture(self, path: Path[Entry], stop: int) -> int | None:
        """The first position a snapshot up to *stop* must hold; None: all is there."""
        return None if path.n_tokens == stop else path.n_tokens

    def ground(self, path: Path[Entry]) -> tuple[Entry, ...]:
        """Entries without which a new one on *path* would be of no use."""
        return tuple(span.entry for span in self.spans(path))

    def repeats(self, n_shared: int, start: int, stop: int, other_stop: int) -> bool:
        """Would capturing [start, stop) repeat one under way with *n_shared* tokens?"""
        return n_shared > start

    def attach(self, entry: Entry, node: Node[Entry]) -> None:
        """Make *entry* the one that ends at *node*."""
        assert node.start == entry.start
        node.cover = node.entry = entry
        entry.node = node

    def is_needed(self, entry: Entry) -> bool:
        """Do other entries build on this one?"""
        node = entry.node
        assert node is not None
        # Without branches the positions of an entry lie in one node (see radix_tree).
        return bool(node.children) or node.start != entry.start

    def falls_with(self, entry: Entry) -> list[Entry]:
        """*entry* and all that build on it, those that are needed first."""
        node = entry.node
        assert node is not None
        while node.parent is not None and node.parent.cover is entry:
            node = node.parent
        return [below.entry for below in node.below() if below.entry is not None]

    def replaced(self, path: Path[Entry]) -> list[Entry]:
        """Entries that a new one at the end of *path* makes useless."""
        return []


class _WholeLayout(RangeLayout):
    """Every entry starts at 0 and stands alone."""

    def ground(self, path: Path[Entry]) -> tuple[Entry, ...]:
        return ()

    def attach(self, entry: Entry, node: Node[Entry]) -> None:
        node.entry = entry
        entry.node = node

    def is_needed(self, entry: Entry) -> bool:
        return False

    def falls_with(self, entry: Entry) -> list[Entry]:
        return [entry]


class StateLayout(_WholeLayout):
    """The longest state of a lineage serves every shorter prefix of it."""

    def spans(self, path: Path[Entry]) -> tuple[Span, ...]:
        if not path.nodes:
            return ()
        node = path.nodes[-1]
        while node.entry is None:  # every leaf has one
            node = next(iter(node.children.values()))
        return (Span(node.entry, 0, path.n_tokens),)

    def to_capture(self, path: Path[Entry], stop: int) -> int | None:
        return None if path.n_tokens == stop else 0

    def repeats(self, n_shared: int, start: int, stop: int, other_stop: int) -> bool:
        return n_shared == stop

    def replaced(self, path: Path[Entry]) -> list[Entry]:
        return _entries_on(path)


class ExactLayout(_WholeLayout):
    """Several points of a path are kept; the deepest one reached counts."""

    def spans(self, path: Path[Entry]) -> tuple[Span, ...]:
        return tuple(Span(entry, 0, entry.stop) for entry in _entries_on(path)[-1:])

    def to_capture(self, path: Path[Entry], stop: int) -> int | None:
        return None if any(e.stop == stop for e in _entries_on(path)) else 0

    def repeats(self, n_shared: int, start: int, stop: int, other_stop: int) -> bool:
        return n_shared == stop == other_stop


def _entries_on(path: Path[Entry]) -> list[Entry]:
    """Entries that end on *path*, in its order."""
    return [
        node.entry
        for node in path.nodes
        if node.entry is not None and node.stop <= path.n_tokens
    ]


LAYOUTS: dict[SnapshotKind, RangeLayout] = {
    SnapshotKind.RANGE: RangeLayout(),
    SnapshotKind.STATE: StateLayout(),
    SnapshotKind.EXACT: ExactLayout(),
}
