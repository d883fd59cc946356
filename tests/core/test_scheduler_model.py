"""Random histories of the scheduler against a model of the context's memory."""

import os
from array import array
from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.memory.tiers import SnapshotCost, Tier
from pyllama_raw.core.policy_runner import KEYS
from pyllama_raw.core.request import (
    TOKENS,
    CacheTier,
    Lot,
    NewTokens,
    Request,
    Scoring,
    Span,
)
from pyllama_raw.core.step import (
    Copy,
    Decode,
    DecodeStatus,
    Load,
    Lost,
    PartlyComputed,
    Release,
    RowFailed,
    Sampled,
    Save,
    ScoredPrefill,
    Shift,
    StepResult,
    Trim,
    Verify,
)
from pyllama_raw.errors import (
    BadMedia,
    DecodeFailed,
    InvalidBatch,
    PromptTooLong,
    SamplingFailed,
)
from pyllama_raw.testing.executor import (
    HEAD_BYTES,
    TOKEN_BYTES,
    FakeMemory,
    assert_one_kind,
    assert_one_lot,
    row_position,
)
from tests.core.support import STOP_TOKEN, finished, make_scheduler, output, score

N_SLOTS, N_PARKED, N_CTX_SLOT, N_BATCH, N_CELLS = 3, 2, 24, 16, 40
MAX_BYTES, MAX_ENTRIES = 900, 6
MAX_DISK_BYTES = 700
COST = SnapshotCost(HEAD_BYTES, TOKEN_BYTES)
LOTS = (TOKENS, TOKENS, Lot("other"), Lot("alone", is_single=True))
# token, rows, positions, causal
IMAGES = ((-1, 5, 2, True), (-2, 3, 3, False), (-3, 7, 1, True), (-4, 1, 1, True))


class SchedulerModel(RuleBasedStateMachine):
    """Each request ends exactly once; each plan is what the memory can take."""

    @initialize(
        unified=st.booleans(),
        deterministic=st.booleans(),
        n_swa=st.sampled_from([0, 0, 5]),
        budget=st.sampled_from([None, 1, 5, 16]),
        shift=st.booleans(),
        quantum=st.integers(1, 8),
        kind=st.sampled_from(SnapshotKind),
        mode=st.sampled_from(["off", "live", "snapshots", "snapshots"]),
        interval=st.sampled_from([0, 3, 8]),
        disk=st.booleans(),
        n_outputs=st.integers(N_SLOTS, N_BATCH),
        refuses=st.sampled_from([False, False, False, True]),
        has_images=st.booleans(),
        preempt=st.sampled_from(["memory", "priority"]),
        victim=st.sampled_from(list(KEYS)),
        speculates=st.booleans(),
    )
    def start(
        self,
        *,
        unified,
        deterministic,
        n_swa,
        budget,
        shift,
        quantum,
        kind,
        mode,
        interval,
        disk,
        n_outputs,
        refuses=False,
        has_images=False,
        preempt="memory",
        victim="latest",
        speculates=False,
    ):
        self.unified = unified
        self.refuses = refuses  # whether cuts may be refused
        self.has_images = has_images
        self.alone = Counter()  # failures alone, by id
        self.n_outputs = n_outputs
        self.max_bytes = MAX_BYTES if mode == "snapshots" else 0
        cache = PrefixCache(kind, max_bytes=self.max_bytes, max_entries=MAX_ENTRIES)
        self.scheduler = make_scheduler(
            N_SLOTS,
            N_CTX_SLOT,
            N_BATCH,
            N_CELLS if unified else N_SLOTS * N_CTX_SLOT,
            unified=unified,
            deterministic=deterministic,
            n_parked=N_PARKED,
            kind=kind,
            n_swa=0 if kind.can_cut else n_swa,
            n_outputs=n_outputs,
            token_budget=budget,
            prefill_quantum=quantum,
            context_full="shift" if shift else "stop",
            n_keep=1,
            max_overtakes=2,
            preempt=preempt,
            victim=victim,
            cache=None if mode == "off" else cache,
            disk=make_disk(kind) if disk and mode != "off" else None,
            snapshot_cost=COST,
            snapshot_interval_tokens=interval,
            speculates=speculates,
        )
        self.scheduler.memory.min_wait = 2
        self.scheduler.memory.load_tokens = 4
        self.now = 0.0
        self.memory = FakeMemory(self.scheduler.limits, self.fails)
        self.data = None
        self.scored = {}  # log-probabilities each request should have, by id
        self.texts = {}  # tokens each request should have in its slot, by id
        self.requests = {}  # by id
        self.events = []
        self.plan = None
        self.decoded = None  # all that the last plan did, if it worked

    @rule(
        prefix=st.sampled_from([(), (10,) * 6, (10,) * 6 + (11,) * 8, (12,) * 20]),
        tail=st.lists(st.integers(20, 22), max_size=8),
        max_tokens=st.integers(1, 40),
        priority=st.integers(-1, 1),
        patience=st.none() | st.integers(0, 30),
        namespace=st.sampled_from([None, None, None, "salt"]),
        points=st.lists(st.integers(0, 30), max_size=2),
        scored=st.sampled_from([None, None, 1, 1, 3, 7]),
        n_top=st.integers(0, 1),
        lot=st.sampled_from(LOTS),
        images=st.lists(st.sampled_from(IMAGES), max_size=2),
    )
    def add(
        self,
        *,
        prefix,
        tail,
        max_tokens,
        priority,
        patience,
        namespace,
        points,
        scored,
        n_top=0,
        lot=TOKENS,
        images=(),
    ):
        tokens, spans = array("i", prefix), []
        for token, n_rows, n_pos, is_causal in images if self.has_images else ():
            stop = len(tokens) + n_rows
            key = b"" if token == -1 else bytes([-token]) * 32
            spans.append(Span(len(tokens), stop, n_pos, is_causal, key))
            tokens.extend([token] * n_rows)
        tokens.extend(tail or [10])
        scored = None if spans or scored is None else min(scored, len(tokens))
        scoring = None if scored is None else Scoring(scored, n_top)
        request = Request(
            len(self.texts),
            tokens,
            max_tokens,
            stop_token_ids=frozenset({STOP_TOKEN}),
            priority=priority,
            deadline=None if patience is None else self.now + patience,
            namespace=namespace,
            cache_points=tuple(points),
            scoring=scoring,
            lot=lot,
            spans=tuple(spans),
        )
        try:
            self.scheduler.add(request, self.now)
        except PromptTooLong:
            return
        self.texts[request.request_id] = list(tokens)
        self.requests[request.request_id] = request
        self.scored[request.request_id] = (
            () if scored is None else score(scored, tokens[scored:])
        )

    def unrepeatable(self):
        """Who runs and must not be preempted: shifted, where cells are never short."""
        limits, running = self.scheduler.limits, self.scheduler.memory.slots.running
        return {
            request_id
            for request_id, each in running.items()
            if limits.deterministic and not self.unified and each.sequence.is_shifted
        }

    @precondition(lambda self: self.scheduler._roster.alive)
    @rule(data=st.data())
    def end_by_error(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.scheduler._roster.alive)))

        assert self.scheduler.fail(request_id, BadMedia("as told"), self.now)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def cancel(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.texts)))
        self.events += self.scheduler.take_events()
        ended = request_id in finished(self.events)

        assert self.scheduler.cancel(request_id, self.now) is not ended

    @rule(namespace=st.sampled_from([None, "salt"]))
    def clear(self, namespace):
        self.scheduler.clear_cache(namespace)

    @precondition(lambda self: self.memory.writing)
    @rule(fails=st.booleans())
    def end_write(self, *, fails):
        self.scheduler.take_report(self.memory.end_write(fails=fails))

    @precondition(lambda self: self.memory.reading)
    @rule(fails=st.booleans())
    def end_fetch(self, *, fails):
        self.scheduler.take_report(self.memory.end_fetch(fails=fails))

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self):
        self.now += 1.0
        stays = self.unrepeatable()
        self.plan = self.scheduler.schedule(self.now)
        assert stays & set(self.scheduler._roster.alive) <= self.unrepeatable()
        self.events += self.scheduler.take_events()
        assert self.plan.n_tokens <= N_BATCH
        assert sum(map(n_rows, self.plan.works)) <= self.n_outputs
        slots = [work.slot for work in self.plan.works]
        assert len(set(slots)) == len(slots)
        requests = [self.requests[work.request_id] for work in self.plan.works]
        assert len({request.lot for request in requests}) <= 1
        assert_one_lot(self.plan, self.requests, self.scheduler.limits)
        if self.scheduler.alive and not self.scheduler.stats().waiting:
            assert self.plan or self.memory.reading

    def prepare(self, data):
        """Run the operations; returns the works that can be computed."""
        self.data = data
        self.check_moves()
        saved, lost = self.memory.run(self.plan.moves)
        works = [work for work in self.plan.works if work.slot not in lost]
        for work in works:
            request = self.requests[work.request_id]
            n_held = len(self.memory.tokens(work.slot))
            assert work.pos == row_position(request, n_held)
            assert_one_kind(request, n_held, work)
            if work.slot not in self.memory.shifted:
                text = self.texts[work.request_id]
                chunk = work.tokens[:1] if isinstance(work, Verify) else work.tokens
                held = self.memory.tokens(work.slot) + list(chunk)
                assert self.is_shifted(work) or held == text[: len(held)]
        return works, saved, lost

    def check_moves(self):
        """A window goes where sums over its cells stay the same."""
        for operation in () if self.has_images else self.plan.moves:
            n_tokens = None
            if isinstance(operation, Copy):
                n_tokens = operation.n_pos
            elif isinstance(operation, Load):
                n_tokens = operation.pieces[-1].stop
            if n_tokens is not None:
                assert self.scheduler.limits.n_movable(n_tokens) == n_tokens

    def fails(self, operation):
        if isinstance(operation, Trim) and not self.refuses:
            return False
        return self.data.draw(st.integers(0, 7)) == 0

    def is_shifted(self, work):
        """Whether a shift made the text of the request another one."""
        sequence = self.scheduler._roster.alive.get(work.request_id)
        return sequence is None or sequence.is_shifted

    def write(self, works, n_tokens=10**9):
        """Compute so many tokens; how many of each slot's work, without its drafts."""
        written = {}
        if self.unified and n_tokens > N_BATCH:
            assert self.memory.n_used + sum(len(w.tokens) for w in works) <= N_CELLS
        for work in works:
            tokens = work.tokens[:n_tokens]
            if isinstance(work, Verify):  # of an aborted one nothing is left
                tokens = tokens[: int(n_tokens > N_BATCH)]
            self.memory.write(work.slot, tokens, work.pos)
            written[work.slot] = len(tokens)
            n_tokens -= len(tokens)
        if self.unified:
            assert self.memory.n_used <= N_CELLS
        return written

    def finish_step(self, **fields):
        plan, self.plan = self.plan, None
        self.now += 0.5
        refuses_cuts = self.memory.refuses_cuts
        result = StepResult(**fields, refuses_cuts=refuses_cuts)
        events = self.scheduler.apply(plan, result, self.now)
        if result.status is not DecodeStatus.OK:
            self.decoded = None
        for event in events:
            if isinstance(event, NewTokens):
                self.texts[event.request_id] += event.tokens
                self.alone[event.request_id] = 0
            elif isinstance(event.error, DecodeFailed | InvalidBatch):
                assert self.alone[event.request_id] >= 2, "only who fails alone, twice"
        self.events += events
        assert not self.unified or (
            self.scheduler.stats().n_cells_used == self.memory.n_used
            or any(isinstance(e, Release | Trim | Shift) for e in self.pending())
        )

    def output(self, work, token, lost):
        """One token or several; the slot has room for all but the last."""
        if isinstance(work, Verify):
            return self.verified(work, token, lost)
        tokens = [token]
        n_more = self.data.draw(st.integers(0, 7)) - 5
        while len(tokens) <= n_more and work.samples and work.slot not in lost:
            is_full = len(self.memory.tokens(work.slot)) >= N_CTX_SLOT - 1
            if is_full or (self.unified and self.memory.n_used >= N_CELLS):
                break
            self.memory.write(work.slot, [token])
            tokens.append(token)
        return output(work, *tokens, lost=lost)

    def verified(self, work, token, lost):
        """Some drafts are right, and the token after these is another one."""
        drafts = list(work.tokens[1:])
        n_right = min(self.data.draw(st.integers(0, 7)), len(drafts))
        if work.slot not in lost:
            self.memory.write(work.slot, drafts[:n_right])
        return output(work, *drafts[:n_right], token, lost=lost)

    def pending(self):
        return self.scheduler.memory.slots._moves

    @precondition(lambda self: self.plan is not None)
    @rule(token=st.sampled_from([21, 22, 97, STOP_TOKEN]), data=st.data())
    def succeed(self, token, data):
        works, saved, lost = self.prepare(data)
        self.write(works)
        self.finish_step(
            outputs=tuple(self.output(w, token, lost) for w in self.plan.works),
            saved=saved,
            not_restored=lost,
        )

    @precondition(lambda self: self.plan)
    @rule(data=st.data())
    def fail_one_row(self, data):
        works, saved, lost = self.prepare(data)
        self.write(works)
        outputs = [output(work, 97, lost=lost) for work in self.plan.works]
        rows = [i for i, o in enumerate(outputs) if isinstance(o, Sampled)]
        if rows:
            error = SamplingFailed("llama_sampler_sample", None, "injected")
            outputs[data.draw(st.sampled_from(rows))] = RowFailed(error)
        self.finish_step(outputs=tuple(outputs), saved=saved, not_restored=lost)

    @precondition(lambda self: self.plan and self.plan.works)
    @rule(data=st.data())
    def find_no_space(self, data):
        _, saved, lost = self.prepare(data)
        if len(self.plan.works) == 1:  # it may have been alone in the memory, too
            self.alone[self.plan.works[0].request_id] += 1
        self.finish_step(status=DecodeStatus.NO_SPACE, saved=saved, not_restored=lost)

    @precondition(lambda self: self.plan and self.plan.works)
    @rule(data=st.data())
    def abort(self, data):
        works, saved, lost = self.prepare(data)
        held = self.write(works, data.draw(st.integers(0, self.plan.n_tokens)))
        if not self.scheduler.limits.kind.can_cut or self.memory.refuses_cuts:
            for work in works:
                self.memory.empty(work.slot)
            held = {}
        outputs = (
            PartlyComputed(held[work.slot]) if work.slot in held else Lost()
            for work in self.plan.works
        )
        self.finish_step(
            status=DecodeStatus.ABORTED,
            outputs=tuple(outputs),
            saved=saved,
            not_restored=lost,
        )

    @precondition(lambda self: self.plan and self.plan.works)
    @rule(fatal=st.booleans(), data=st.data())
    def fail(self, fatal, data):
        _, saved, lost = self.prepare(data)
        status = DecodeStatus.INVALID
        error = InvalidBatch("llama_decode", -1, "injected")
        if fatal:
            self.memory.clear()
            status, error = (
                DecodeStatus.FAILED,
                DecodeFailed("llama_decode", -3, "injected"),
            )
        if len(self.plan.works) == 1:
            self.alone[self.plan.works[0].request_id] += 1
        self.finish_step(status=status, error=error, saved=saved, not_restored=lost)

    @invariant()
    def laws_hold(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert set(finished(self.events)) <= set(self.texts)
            assert self.scheduler.cache_stats().n_bytes <= self.max_bytes
            writing = [file for _, file in self.memory.writing if file]
            files = [*self.memory.files, *writing]
            assert sum(file.n_bytes for file in files) <= MAX_DISK_BYTES

    def teardown(self):
        """Left alone, everything that was added comes to its end."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            if self.plan is not None:
                self.succeed(97, NoFailure())
            while self.memory.reading:
                self.end_fetch(fails=False)
            if not self.scheduler.alive:
                break
            self.schedule()
        self.check_events()

    def check_events(self):
        """Each request has ended, and was told all that it got; no swap is left."""
        if not self.memory.reading and not self.memory.writing:
            assert self.scheduler.cache_stats().n_pinned == 0
        self.events += self.scheduler.take_events()
        ends = finished(self.events)
        assert set(ends) == set(self.texts)
        counts = dict.fromkeys(self.texts, 0)
        for event in self.events:
            if isinstance(event, NewTokens):
                counts[event.request_id] += len(event.tokens)
        assert counts == {i: end.n_output for i, end in ends.items()}
        for request_id, end in ends.items():
            whole = self.scored[request_id]
            assert end.prompt_logprobs == whole[: len(end.prompt_logprobs)]
            assert end.prompt_logprobs == whole or not end.n_output


def decoded(works):
    """Whose tokens a plan decodes, and where; None if it does anything else."""
    if {type(work) for work in works} != {Decode}:
        return None
    return [(work.request_id, work.slot) for work in works]


def n_rows(work):
    if isinstance(work, ScoredPrefill):
        return len(work.tokens) - work.n_plain
    return len(work.tokens) if isinstance(work, Verify) else work.samples


def make_disk(kind):
    """A disk tier that keeps and reads the shortest of prefixes."""
    cache = PrefixCache(kind.whole, max_bytes=MAX_DISK_BYTES, max_entries=5)
    tier = Tier(CacheTier.DISK, cache, COST.bound)
    tier.min_gain = 1
    return tier


class NoFailure:
    """Stands for st.data() where nothing may fail any more."""

    def draw(self, strategy):
        return 5


SchedulerModel.TestCase.settings = settings(
    max_examples=int(os.environ.get("PYLLAMA_RAW_TEST_EXAMPLES", "60")),
    stateful_step_count=40,
)
SchedulerModel.TestCase.pytestmark = [pytest.mark.unwatched]
TestSchedulerModel = SchedulerModel.TestCase


class Dice:
    """Stands for st.data(): one operation in eight fails."""

    def __init__(self, rng):
        self.rng = rng

    def draw(self, strategy):
        return self.rng.randrange(8)


PREFIXES = ((10,) * 6, (10,) * 6 + (11,) * 8, (12,) * 18, (13,) * 12)


def play(seed):
    """A long history of a few prompts; returns how often each operation was done."""
    rng = Random(seed)  # noqa: S311
    counts = Counter()
    model = SchedulerModel()
    model.start(
        unified=rng.random() < 0.5,
        deterministic=rng.random() >= 0.5,
        n_swa=rng.choice([0, 5]),
        budget=16,
        shift=False,
        quantum=8,
        kind=rng.choice(list(SnapshotKind)),
        mode=rng.choice(["live", "snapshots"]),
        interval=rng.choice([0, 3]),
        disk=True,
        n_outputs=N_SLOTS,
        has_images=rng.random() < 0.5,
        preempt=rng.choice(["memory", "priority"]),
        victim=rng.choice(list(KEYS)),
    )
    for _ in range(150):
        model.add(
            prefix=rng.choice(PREFIXES),
            tail=[rng.randrange(20, 22) for _ in range(rng.randrange(3))],
            max_tokens=rng.randrange(1, 5),
            priority=rng.choice([0, 0, 1]),
            patience=None,
            namespace=rng.choice([None, None, "salt"]),
            points=[],
            scored=None,
            lot=rng.choice(LOTS),
            images=rng.choices(IMAGES[:2], k=rng.choice([0, 0, 0, 1])),
        )
        for _ in range(rng.randrange(4)):
            model.schedule()
            counts.update(map(kind_of, model.plan.moves))
            model.succeed(97, Dice(rng))
            model.laws_hold()
        if model.memory.reading and rng.random() < 0.5:
            model.end_fetch(fails=rng.random() < 0.1)
        if model.memory.writing and rng.random() < 0.5:
            model.end_write(fails=rng.random() < 0.1)
        if rng.random() < 0.02:
            model.clear(namespace=None)
    model.teardown()
    return counts


def kind_of(move):
    """The type of *move*; of a save also the tier, and whether it is of a snapshot."""
    if isinstance(move, Save):
        return f"{move.tier} {type(move.source).__name__}"
    return type(move).__name__


@pytest.mark.unwatched
@pytest.mark.parametrize("n", [16, pytest.param(96, marks=pytest.mark.nightly)])
def test_long_histories_go_through_all_tiers(n):
    """
    What a slot holds is what its sequence says, after any copies, restores and reads.
    """
    counts = sum((play(seed) for seed in range(n)), Counter())

    names = ("host int", "disk int", "disk Snapshot", "Load", "Fetch", "Delete")
    assert min(counts[name] for name in names) >= n / 2
