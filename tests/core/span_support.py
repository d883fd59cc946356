"""Requests with an image, on the fake executor."""

from array import array

from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.memory.tiers import SnapshotCost, Tier
from pyllama_raw.core.request import (
    CacheTier,
    Request,
    Span,
)
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.core.step import (
    DecodeStatus,
)
from pyllama_raw.engine.driver import Driver
from pyllama_raw.testing import FakeExecutor, fake_limits
from pyllama_raw.testing.executor import HEAD_BYTES, TOKEN_BYTES
from tests.core.support import Pieces, finished

IMAGE = [-1] * 16  # 4 x 4 rows that take 4 positions
WORDS = list(range(100, 106))
ASKED = [*WORDS, *IMAGE, *range(110, 114)]  # 6 + 16 + 4 rows


class Engine:
    """A driver on the fake executor, which checks each position."""

    def __init__(
        self,
        kind=SnapshotKind.RANGE,
        interval=0,
        max_bytes=0,
        has_files=False,
        **limits,
    ):
        abort = dict.fromkeys(limits.pop("aborts", ()), DecodeStatus.ABORTED)
        options = {
            name: limits.pop(name)
            for name in ("context_full", "token_budget", "prefill_quantum")
            if name in limits
        }
        limits = fake_limits(kind=kind, **limits)
        self.executor = FakeExecutor(limits, failures=abort)
        disk = None
        if has_files:
            files = PrefixCache(SnapshotKind.STATE, max_bytes=10**6, max_entries=9)
            disk = Tier(
                CacheTier.DISK, files, SnapshotCost(HEAD_BYTES, TOKEN_BYTES).bound
            )
            disk.min_gain = 8
        self.scheduler = Scheduler(
            limits,
            Pieces(),
            cache=PrefixCache(kind, max_bytes=max_bytes, max_entries=9),
            snapshot_cost=SnapshotCost(HEAD_BYTES, TOKEN_BYTES),
            snapshot_interval_tokens=interval,
            disk=disk,
            **options,
        )
        self.events = []
        self.driver = Driver(self.scheduler, self.executor, lambda: 0.0, self._take)
        self._n_added = 0

    def add(self, tokens, max_tokens=3, n_pos=4, **fields):
        """*tokens* in which IMAGE takes *n_pos* positions."""
        kind = {
            "is_causal": fields.pop("is_causal", True),
            "key": fields.pop("key", b""),
        }
        runs = [i for i in range(len(tokens)) if tokens[i : i + 16] == IMAGE]
        spans = tuple(Span(i, i + 16, n_pos, **kind) for i in runs)
        number = self._n_added
        request = Request(number, array("i", tokens), max_tokens, spans=spans, **fields)
        self.driver.add([request], 0.0)
        self._n_added += 1
        return number

    def run(self):
        """Until there is nothing to do; the ends of all requests."""
        for _ in range(1000):
            if not self.driver.step():
                return finished(self.events)
            self.scheduler.check_integrity()
        raise AssertionError("not idle")

    def write_all(self):
        while self.executor.memory.writing:
            self.scheduler.take_report(self.executor.memory.end_write())

    def read_all(self):
        while self.executor.memory.reading:
            self.scheduler.take_report(self.executor.memory.end_fetch())

    def _take(self, events):
        self.events += events

    @property
    def works(self) -> list[tuple[int, int]]:
        """Position and number of tokens of each."""
        plans = self.executor.plans
        return [(work.pos, len(work.tokens)) for p in plans for work in p.works]

    def of(self, kind) -> list:
        return [
            move
            for p in self.executor.plans
            for move in p.moves
            if isinstance(move, kind)
        ]
