"""
The prefix cache against a list that is searched from end to end.

The list knows what must be found, who may leave and what is held; only the order of
eviction is read from the cache, and then checked against when entries were used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from weakref import WeakSet

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from pyllama_raw.core.memory.cache import PrefixCache, Reservation
from pyllama_raw.core.memory.snapshots import Entry, Hit, SnapshotKind
from tests.core.cache_support import toks

MAX_BYTES = 400
MAX_ENTRIES = 6
N_EXAMPLES = int(os.environ.get("PYLLAMA_RAW_TEST_EXAMPLES", "6"))
RANGE, STATE, EXACT, CHAIN = SnapshotKind

namespaces = st.sampled_from(["a", "b"])
bases = st.sampled_from(["xxxxxxxx", "xxxxyyyy", "xxxyxxxx", "yyyyyyyy", "yyxxyyxx"])
prompts = st.builds(
    lambda base, n, end: base[:n] + end,
    bases,
    st.integers(1, 8),
    st.sampled_from(["", "x", "y", "xy"]),
)  # most share something with each other
sizes = st.integers(0, 120)  # bytes


@dataclass
class Known:
    """An entry as the list sees it."""

    namespace: str
    text: str  # the whole path
    entry: Entry

    @property
    def start(self) -> int:
        return self.entry.start

    @property
    def stop(self) -> int:
        return len(self.text)

    def n_shared(self, text: str) -> int:
        n = 0
        while n < min(len(text), self.stop) and text[n] == self.text[n]:
            n += 1
        return n


@dataclass
class Capture:
    """A reservation as the list sees it."""

    namespace: str
    text: str
    reservation: Reservation
    is_lost: bool = False


@dataclass(eq=False)
class Payload:
    """Bytes in host memory."""

    data: bytes


class CacheMachine(RuleBasedStateMachine):
    """One machine a kind of snapshot; see below."""

    kind: SnapshotKind
    captures = Bundle("captures")
    hits = Bundle("hits")

    @initialize()
    def start(self) -> None:
        self.cache = PrefixCache(
            self.kind, max_bytes=MAX_BYTES, max_entries=MAX_ENTRIES
        )
        self.known: list[Known] = []  # can be found
        self.doomed: list[Entry] = []  # dropped while pinned
        self.open: list[Capture] = []
        self.pins: list[Entry] = []  # one each pin
        self.loans: list[int] = []
        self.payloads: WeakSet[Payload] = WeakSet()  # those still in memory

    # Finding

    def best(self, namespace: str, text: str) -> int:
        """Tokens of *text* that can be restored, by looking at every entry."""
        mine = [k for k in self.known if k.namespace == namespace]
        if self.kind in (EXACT, CHAIN):
            return max((k.stop for k in mine if text.startswith(k.text)), default=0)
        if self.kind is STATE:
            return max((k.n_shared(text) for k in mine), default=0)
        n = 0
        while any(k.start <= n < k.n_shared(text) for k in mine):
            n += 1
        return n

    @rule(namespace=namespaces, text=prompts, n_less=st.integers(1, 4))
    def match(self, namespace: str, text: str, n_less: int) -> None:
        limit = max(0, len(text) - n_less)

        hit = self.cache.match(namespace, toks(text), limit)

        assert hit.n_tokens == self.best(namespace, text[:limit])
        self.check_spans(hit, namespace, text)
        self.check_junction(namespace, text)

    def check_spans(self, hit: Hit, namespace: str, text: str) -> None:
        at = 0
        for entry, start, stop in hit.spans:
            (known,) = [k for k in self.known if k.entry is entry]
            assert known.namespace == namespace
            assert known.text[:stop] == text[:stop]
            assert entry.start <= start == at < stop <= entry.stop
            assert self.kind not in (EXACT, CHAIN) or stop == entry.stop
            at = stop
        assert at == hit.n_tokens

    def check_junction(self, namespace: str, text: str) -> None:
        mine = [k for k in self.known if k.namespace == namespace]
        n = max((k.n_shared(text) for k in mine), default=0)
        parts = any(k.n_shared(text) == n < k.stop for k in mine)
        expected = n if 0 < n < len(text) and parts else None

        assert self.cache.junction(namespace, toks(text)) == expected

    @rule(target=hits, namespace=namespaces, text=prompts)
    def use(self, namespace: str, text: str):
        hit = self.cache.match(namespace, toks(text), len(text) - 1)
        self.cache.record(hit)
        if not hit.spans or len(self.pins) > 6:
            return multiple()
        self.cache.pin(hit)
        self.pins += hit.entries
        return hit

    @rule(hit=consumes(hits))
    def unpin(self, hit: Hit) -> None:
        self.cache.unpin(hit)
        for entry in hit.entries:
            self.pins.remove(entry)
        self.sync_doomed()

    @rule(hit=consumes(hits), at=st.integers(0, 3))
    def fail_restore(self, hit: Hit, at: int) -> None:
        entry = hit.entries[at % len(hit.entries)]
        falling = [k for k in self.known if self.falls_with(k, entry)]
        self.cache.drop(entry)
        self.leave(falling)
        for capture in self.open:
            ground = capture.reservation.plan.ground
            capture.is_lost |= any(k.entry in ground for k in falling)
        self.unpin(hit)

    def falls_with(self, known: Known, entry: Entry) -> bool:
        top = [k for k in self.known if k.entry is entry]
        if self.kind is CHAIN:
            return known.entry is entry or any(
                self.falls_with(k, entry)
                for k in self.known
                if (k.namespace, k.text) == (known.namespace, known.text[: known.start])
            )
        if known.entry is entry or self.kind is not RANGE:
            return known.entry is entry
        return any(
            known.namespace == k.namespace and known.n_shared(k.text) > k.start
            for k in top
        )

    # Capturing

    @rule(target=captures, namespace=namespaces, text=prompts, n=sizes)
    def capture(self, namespace: str, text: str, n: int):
        capture = self.reserve(namespace, text, n)
        return multiple() if capture is None else capture

    @rule(namespace=namespaces, texts=st.lists(prompts, max_size=4), n=sizes)
    def store(self, namespace: str, texts: list[str], n: int) -> None:
        for text in texts:
            if (capture := self.reserve(namespace, text, n)) is not None:
                self.commit(capture, 0)

    def reserve(self, namespace: str, text: str, n: int) -> Capture | None:
        plan = self.cache.plan_store(namespace, toks(text), len(text))
        assert (plan is None) == self.is_covered(namespace, text)
        if plan is None:
            return None
        in_tree = self.best(namespace, text) if self.kind.is_part else 0
        assert (plan.start, plan.stop) == (in_tree, len(text))
        n_charged = n + 4 * (plan.stop - plan.start)
        fixed = {*self.pins, *plan.ground, *self.grounds()}
        fits = self.n_fixed_bytes(fixed) + n_charged <= MAX_BYTES
        fits &= len(fixed) + len(self.open) < MAX_ENTRIES
        before = list(self.known)

        reservation = self.cache.reserve(plan, n)

        assert (reservation is not None) == fits
        if reservation is None:
            assert self.cache.take_released() == []
            return None
        self.open.append(Capture(namespace, text, reservation))
        self.check_evicted(before, text)
        return self.open[-1]

    def is_covered(self, namespace: str, text: str) -> bool:
        """Is all of it stored, or some of it being captured?"""
        others = [c.text for c in self.open if c.namespace == namespace]
        if self.kind in (EXACT, CHAIN):
            mine = [k.text for k in self.known if k.namespace == namespace]
            return text in mine + others
        n_best = self.best(namespace, text)
        if self.kind is STATE:
            return n_best == len(text) or any(o.startswith(text) for o in others)
        return n_best == len(text) or any(
            other.startswith(text[: n_best + 1]) for other in others
        )

    def check_evicted(self, before: list[Known], text: str) -> None:
        released = self.cache.take_released()
        gone = [k for k in before if k.entry.node is None]
        assert len(released) == len(gone)
        assert not {k.entry for k in gone} & {*self.pins, *self.grounds()}
        self.leave(gone)
        if self.kind.is_part:
            return
        replaced = [k for k in gone if self.kind is STATE and text.startswith(k.text)]
        kept = [k.entry for k in self.known if k.entry not in self.pins]
        for known in gone:
            if known not in replaced:
                last_used = known.entry.last_used
                assert all(last_used <= entry.last_used for entry in kept)

    @rule(capture=consumes(captures), spare=st.integers(0, 25))
    def finish(self, capture: Capture, spare: int) -> None:
        if spare > 20:
            self.abandon(capture)
        else:
            self.commit(capture, spare)

    def commit(self, capture: Capture, spare: int) -> None:
        reservation, text = capture.reservation, capture.text
        self.open.remove(capture)
        n_best = self.best(capture.namespace, text)
        overtaken = self.kind is STATE and n_best == len(text)
        n_bytes = max(0, reservation.n_bytes - spare)

        payload = Payload(bytes(n_bytes))
        self.payloads.add(payload)
        entry = self.cache.commit(reservation, payload, n_bytes)

        assert (entry is None) == (capture.is_lost or overtaken)
        released = self.cache.take_released()
        if entry is None:
            assert payload in released
            self.sync_doomed(released)
            return
        replaced = [
            k
            for k in self.known
            if self.kind is STATE
            and k.namespace == capture.namespace
            and text.startswith(k.text)
            and k.entry not in self.pins
        ]
        assert len(released) == len(replaced)
        self.leave(replaced)
        self.known.append(Known(capture.namespace, text, entry))

    def abandon(self, capture: Capture) -> None:
        self.open.remove(capture)
        self.cache.abandon(capture.reservation)
        self.sync_doomed()

    # Other host memory

    @rule(n=sizes)
    def lend(self, n: int) -> None:
        before = list(self.known)
        fits = self.n_fixed_bytes({*self.pins, *self.grounds()}) + n <= MAX_BYTES

        assert self.cache.lend(n) == fits

        self.check_evicted(before, "")
        self.loans += [n] * fits

    @precondition(lambda self: self.loans)
    @rule()
    def give_back(self) -> None:
        self.cache.give_back(self.loans.pop())

    @rule(namespace=st.none() | namespaces, dice=st.integers(0, 9))
    def clear(self, namespace: str | None, dice: int) -> None:
        if dice != 5:  # seldom, so that something is there to clear
            return
        n_before = self.cache.stats().n_bytes
        n_freed = self.cache.clear(namespace)
        assert n_freed == n_before - self.cache.stats().n_bytes
        self.leave([k for k in self.known if namespace in (None, k.namespace)])
        for capture in self.open:
            capture.is_lost |= namespace in (None, capture.namespace)

    # What is held

    def grounds(self) -> list[Entry]:
        return [e for c in self.open for e in c.reservation.plan.ground]

    def n_reserved_bytes(self) -> int:
        return sum(c.reservation.n_charged for c in self.open)

    def n_fixed_bytes(self, entries: set[Entry]) -> int:
        """What no eviction frees while *entries* are in use."""
        n_bytes = sum(entry.n_charged for entry in entries)
        return n_bytes + self.n_reserved_bytes() + sum(self.loans)

    def leave(self, gone: list[Known]) -> None:
        """Move *gone* out; those in use are doomed until they are let go."""
        self.known = [k for k in self.known if k not in gone]
        in_use = {*self.pins, *self.grounds()}
        self.doomed += [k.entry for k in gone if k.entry in in_use]

    def sync_doomed(self, released: list[object] | None = None) -> None:
        in_use = {*self.pins, *self.grounds()}
        let_go = [entry for entry in self.doomed if entry not in in_use]
        self.doomed = [entry for entry in self.doomed if entry in in_use]
        assert all(entry.payload is None for entry in let_go)

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        self.cache.take_released()
        stats = self.cache.stats()
        held = [k.entry for k in self.known] + self.doomed
        assert stats.n_entries == len(held)
        assert stats.n_bytes == sum(entry.n_charged for entry in held)
        assert stats.n_reserved_bytes == self.n_reserved_bytes()
        assert stats.n_lent_bytes == sum(self.loans)
        n_used = stats.n_bytes + stats.n_reserved_bytes + stats.n_lent_bytes
        assert n_used <= MAX_BYTES
        assert stats.n_pinned == len({*self.pins, *self.grounds()})
        assert all(entry.payload is not None for entry in held)
        n_tokens = sum(entry.n_tokens for entry in held)
        in_memory = sum(len(payload.data) for payload in self.payloads)
        assert stats.n_bytes == in_memory + 4 * n_tokens

    @invariant()
    def each_token_is_held_once(self) -> None:
        if not hasattr(self, "cache") or self.kind is not RANGE:
            return
        tokens = [
            (k.namespace, k.text[: n + 1])
            for k in self.known
            for n in range(k.start, k.stop)
        ]
        assert len(tokens) == len(set(tokens))


@pytest.mark.unwatched
@pytest.mark.chance
@pytest.mark.parametrize("kind", SnapshotKind)
def test_cache_agrees_with_a_list(kind):
    """
    No history of operations makes the cache find less, hold more or lose anything.
    """
    machine = type(f"{kind.name}Machine", (CacheMachine,), {"kind": kind})
    case = machine.TestCase
    case.settings = settings(max_examples=N_EXAMPLES, stateful_step_count=90)

    case("runTest").runTest()
