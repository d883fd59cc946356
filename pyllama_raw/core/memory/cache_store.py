"""
Holds the entries of the prefix cache: found by path, pinned, evicted, released.

Rule: every entry is in its tree, or was dropped while pinned and waits for unpin(). Its
bytes count until its payload is released.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from pyllama_raw.core.memory.cache_entry import CapturePlan, Entry
from pyllama_raw.core.memory.cache_stats import Eviction, Ledger
from pyllama_raw.core.memory.eviction import EvictionQueue
from pyllama_raw.core.memory.radix_tree import TOKEN_BYTES, Path, RadixTree
from pyllama_raw.core.memory.snapshot_kind import Layout
from pyllama_raw.core.namespace import Namespace, Private, is_of


class EntryStore:
    """Entries of all namespaces under one set of limits."""

    def __init__(self, layout: Layout, ledger: Ledger) -> None:
        self._layout = layout
        self._ledger = ledger
        self._trees: dict[Namespace, RadixTree[Entry]] = {}
        self._entries: set[Entry] = set()
        self._doomed: set[Entry] = set()  # dropped while pinned
        self._queue = EvictionQueue()
        self._released: list[object] = []
        self._ids = count()

    def walk(self, namespace: Namespace, key: bytes) -> Path[Entry]:
        """The longest prefix of *key* that is known."""
        tree = self._trees.get(namespace)
        return Path([], 0) if tree is None else tree.walk(key)

    def namespaces(self, salt: str | Private | None = None) -> list[Namespace]:
        """Namespaces that callers with *salt* use; None: any callers."""
        return [namespace for namespace in self._trees if is_of(namespace, salt)]

    def entries_of(self, namespace: Namespace) -> list[Entry]:
        """Entries, on each path those with more tokens first."""
        tree = self._trees.get(namespace)
        nodes = [] if tree is None else list(tree.root.below())
        return [node.entry for node in reversed(nodes) if node.entry is not None]

    def add(self, plan: CapturePlan, payload: object, n_bytes: int, now: int) -> Entry:
        """Store a snapshot that the ledger has room for."""
        path = self.walk(plan.namespace, plan.key)
        replaced = self._layout.replaced(path)
        entry_id = next(self._ids)
        entry = Entry(entry_id, plan.namespace, plan.start, plan.stop, n_bytes, payload)
        entry.last_used = now
        tree = self._trees.setdefault(plan.namespace, RadixTree())
        self._layout.attach(entry, tree.insert(plan.key))
        self._entries.add(entry)
        self._ledger.store(entry)
        self._queue.push(entry)
        for old in replaced:
            if old.n_pins == 0:
                self.forget(old, Eviction.REPLACED)
        return entry

    def forget(self, entry: Entry, reason: Eviction) -> None:
        """Take *entry* out of its tree; released at once unless it is pinned."""
        node, tree = entry.node, self._trees[entry.namespace]
        assert node is not None
        node.entry = entry.node = None
        remaining = tree.prune(node)
        if tree.is_empty:
            del self._trees[entry.namespace]
        elif remaining.cover is not None:
            self._queue.push(remaining.cover)  # perhaps nothing builds on it any more
        if entry.ground is not None:
            entry.ground.n_upon -= 1
            self._queue.push(entry.ground)
            entry.ground = None
        self._entries.remove(entry)
        self._ledger.evictions[reason] += 1
        if entry.n_pins:
            self._doomed.add(entry)
        else:
            self._release(entry)

    def make_room(
        self, n_bytes: int, n_entries: int = 1, first: Iterable[Entry] = ()
    ) -> None:
        """Evict until so much fits, *first* before others; the ledger said it can be."""
        for entry in first:
            if not self._ledger.has_room(n_bytes, n_entries) and self._may_go(entry):
                self.forget(entry, Eviction.REPLACED)
        while not self._ledger.has_room(n_bytes, n_entries):
            victim = self._queue.pop(self._may_go)
            assert victim is not None, "room was promised that is not there"
            self.forget(victim, Eviction.SPACE)

    def pin(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            assert entry.node is not None, "pinned too late: the entry is gone"
            if entry.n_pins == 0:
                self._ledger.pin(entry)
            entry.n_pins += 1

    def unpin(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            assert entry.n_pins > 0, "not pinned"
            entry.n_pins -= 1
            if entry.n_pins == 0:
                self._ledger.unpin(entry)
                if entry.node is None:
                    self._doomed.remove(entry)
                    self._release(entry)
                else:
                    self._queue.push(entry)

    def release(self, payload: object) -> None:
        """Have *payload* freed by whoever owns it."""
        self._released.append(payload)

    def take_released(self) -> list[object]:
        released, self._released = self._released, []
        return released

    def check_integrity(self) -> None:
        """Sums, pins and reachability, as assertions."""
        held = self._entries | self._doomed
        pinned = [entry for entry in held if entry.n_pins]
        ledger = self._ledger
        assert not self._entries & self._doomed
        assert all(entry.n_pins > 0 and entry.node is None for entry in self._doomed)
        assert all(entry.n_pins >= 0 for entry in held)
        assert ledger.n_entries == len(held)
        assert ledger.n_bytes == sum(entry.n_charged for entry in held)
        assert ledger.n_pinned == len(pinned)
        assert ledger.n_pinned_bytes == sum(entry.n_charged for entry in pinned)
        reachable = {e for name in self._trees for e in self.entries_of(name)}
        assert reachable == self._entries
        assert all(e.is_queued for e in self._entries if self._may_go(e))
        for name, tree in self._trees.items():
            self._check_tree(name, tree)

    def _check_tree(self, namespace: Namespace, tree: RadixTree[Entry]) -> None:
        assert not tree.is_empty
        tree.check_integrity()
        n_charged = 0
        for node in tree.root.below():
            n_charged -= len(node.edge)
            if (entry := node.entry) is not None:
                assert entry.node is node
                assert entry.namespace == namespace
                assert entry.stop == node.stop
                n_charged += TOKEN_BYTES * entry.n_tokens
            if (cover := node.cover) is not None:
                assert cover in self._entries
                assert cover.start <= node.start < node.stop <= cover.stop
        assert n_charged >= 0, "the tree holds more tokens than are counted"

    def _may_go(self, entry: Entry) -> bool:
        return (
            entry.node is not None
            and entry.n_pins == 0
            and not self._layout.is_needed(entry)
        )

    def _release(self, entry: Entry) -> None:
        self._ledger.release(entry)
        self.release(entry.payload)
        entry.payload = None
