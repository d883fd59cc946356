"""
Runs requests on a real engine without its thread, and remembers how all came about.

For each output row the logits are kept, and for each position the chunk that computed
it, through copies, captures and restores. So a cold run can compute the same chunks.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from pyllama_raw import EngineConfig, SamplingParams
from pyllama_raw.core.request import CacheTier, Finished, Request
from pyllama_raw.core.step import (
    Copy,
    DecodeStatus,
    Fetch,
    Fetched,
    Load,
    Move,
    Release,
    Save,
    Snapshot,
    StepPlan,
    StepResult,
    Trim,
    Work,
    Written,
)
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.opening import build
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.options.config import (
    CacheConfig,
    ContextConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from tests.support.experts import Routers, Scores, listening
from tests.support.held import check_held
from tests.support.prices import capture_all

GREEDY = SamplingParams(temperature=0, seed=0, ignore_eos=True)

CONTEXT_FIELDS = set(ContextConfig.model_fields)
SCHEDULER_FIELDS = set(SchedulerConfig.model_fields)


def make_config(
    *, deterministic: bool = True, kv_overrides: Any = None, **options: Any
) -> EngineConfig:
    """Each option goes to the part of the configuration that has a field for it."""
    context = {"n_ctx": 1024, "n_threads": 1, "n_batch": 512, "n_ubatch": 512}
    scheduler: dict[str, Any] = {"n_slots": 2, "token_budget": 512}
    cache = {}
    for name, value in options.items():
        if name in CONTEXT_FIELDS:
            context[name] = value
        elif name in SCHEDULER_FIELDS:
            scheduler[name] = value
        else:
            cache[name] = value
    return EngineConfig(
        model=ModelConfig(kv_overrides=kv_overrides or {}),
        context=ContextConfig(**context),
        scheduler=SchedulerConfig(**scheduler),
        cache=CacheConfig(**cache),
        # Logits are read after each step, so a step has one token.
        speculation=SpeculationConfig(mode="off"),
        deterministic=deterministic,
    )


@contextmanager
def playing(path: Path, *, hears_routers: bool = False, **options: Any):
    """A `Player` of the model at *path*."""
    with listening() if hears_routers else nullcontext() as routers:
        parts = build(path, make_config(**options))
    try:
        yield Player(parts, routers)
    finally:
        parts.release()


@dataclass(eq=False)
class Played:
    """What came of one request."""

    prompt: array
    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)  # one a token
    history: list[Work] = field(default_factory=list)  # what computed each position
    end: Finished | None = None

    @property
    def text(self) -> array:
        """Prompt and output."""
        return self.prompt + array("i", self.tokens)


class Player:
    """One engine; requests are run to their end, or cancelled after some steps."""

    def __init__(self, parts: Any, routers: Routers | None = None) -> None:
        self.parts = parts
        capture_all(parts)
        self._driver = Driver(parts.scheduler, self, lambda: 0.0, self._take)
        self._routers = routers
        self._scores: dict[int, tuple[Work, Scores]] = {}  # by id of the work
        self.slots: dict[int, list[Work]] = {}
        self._payloads: dict[int, list[Work]] = {}  # by id; what each holds
        self._arrays: list[weakref.ref] = []
        self.peak_bytes = 0  # of captured arrays, right after a step captured more
        self._ids = count()
        self._reports: list[Written | Fetched] = []
        self._writes: dict[int, list[Work]] = {}
        self._fetches: dict[int, list[Work]] = {}
        if parts.files is not None:
            parts.files.report = self._reports.append
        self._alive: dict[int, Played] = {}
        self.n_steps = 0

    @property
    def stats(self):
        return self.parts.scheduler.stats()

    def host_bytes(self) -> int:
        """Of captured arrays that are still in memory."""
        self._arrays = [ref for ref in self._arrays if ref() is not None]
        return sum(ref().nbytes for ref in self._arrays)

    def play(self, tokens: Iterable[int], max_tokens: int = 8, **fields: Any) -> Played:
        """Run one request alone."""
        [played] = self.play_all([tokens], max_tokens, **fields)
        return played

    def play_all(
        self,
        prompts: Iterable[Iterable[int]],
        max_tokens: int = 8,
        cancel_after: Mapping[int, int] | None = None,
        **fields: Any,
    ) -> list[Played]:
        """Run all at once; *cancel_after* has steps by index of the prompt."""
        first = self.n_steps
        ids = [self.add(tokens, max_tokens, **fields) for tokens in prompts]
        played = [self._alive[i] for i in ids]
        waits = {ids[i]: first + n for i, n in (cancel_after or {}).items()}
        while self.step():
            for request_id, n_steps in list(waits.items()):
                if self.n_steps >= n_steps:
                    del waits[request_id]
                    self.cancel(request_id)
        return played

    def add(self, tokens: Iterable[int], max_tokens: int = 8, **fields: Any) -> int:
        request_id = next(self._ids)
        prompt = array("i", tokens)
        request = Request(request_id, prompt, max_tokens, sampling=GREEDY, **fields)
        self._driver.add([request], 0.0)
        self._alive[request_id] = Played(prompt)
        return request_id

    def cancel(self, request_id: int) -> None:
        self._driver.cancel(request_id)

    def played(self, request_id: int) -> Played:
        return self._alive[request_id]

    def step(self) -> bool:
        """One step; False if there was nothing to do."""
        worked = self._driver.step()
        self.parts.scheduler.check_integrity()
        check_held(self.parts)
        return worked

    def open(self, request: Request) -> None:
        self.parts.executor.open(request)

    def close(self, request_id: int) -> Any:
        return self.parts.executor.close(request_id)

    def stop(self, request_id: int | None = None) -> None:
        """Nobody stops a player."""

    def execute(self, plan: StepPlan) -> StepResult:
        """As the executor of its driver: follows what is done."""
        self.n_steps += 1
        # A step begun ahead would replace the logits.
        result = self.parts.executor.execute(plan._replace(steady=False))
        saved = {
            save_id: state._replace(seconds=0.0)
            for save_id, state in result.saved.items()
        }
        result = result._replace(saved=saved, restore_s={}, moves_s=0.0)
        self._follow(plan, result)
        self._end_files()
        return result

    def _take(self, events: list[Any]) -> None:
        for event in events:
            played = self._alive[event.request_id]
            if isinstance(event, Finished):
                played.end = event
            else:
                played.tokens += event.tokens

    def _follow(self, plan: StepPlan, result: StepResult) -> None:
        captures = {}
        for move in plan.moves:
            self._do(move, captures)
        for capture_id, captured in result.saved.items():
            self._payloads[id(captured.payload)] = captures[capture_id]
            self._arrays.append(weakref.ref(captured.payload))
        self.peak_bytes = max(self.peak_bytes, self.host_bytes())
        for slot in result.not_restored:
            self.slots[slot] = []
        if result.status is not DecodeStatus.OK:
            return
        row = -1
        works = [w for w in plan.works if w.slot not in result.not_restored]
        if self._routers is not None and works:
            self._hear(self._routers, works)
        for work in works:
            row += len(work.tokens)
            rows = self.slots.setdefault(work.slot, [])
            assert len(rows) == work.pos
            rows += [work] * len(work.tokens)
            if work.samples:
                played = self._alive[work.request_id]
                played.logits.append(
                    np.asarray(self.parts.executor.context.logits(row))
                )
                played.history = list(rows)

    def _hear(self, routers: Routers, works: list[Work]) -> None:
        ends = np.cumsum([len(work.tokens) for work in works])
        has_logits = np.zeros(ends[-1], bool)
        has_logits[ends - 1] = [work.samples for work in works]
        scores = np.split(routers.take(has_logits), ends[:-1])
        for work, own in zip(works, scores, strict=True):
            self._scores[id(work)] = work, own

    def scores(self, played: Played) -> Scores:
        """What the routers said of each token of *played*, whoever computed it."""
        history = enumerate(played.history)
        return np.stack([self._scores[id(c)][1][pos - c.pos] for pos, c in history])

    def _end_files(self) -> None:
        if self.parts.files is None:
            return
        self.parts.files.drain()
        for report in self._reports:
            if isinstance(report, Fetched):
                works = self._fetches.pop(report.fetch_id)
                self._payloads[id(report.payload)] = works
                self._arrays.append(weakref.ref(report.payload))
            elif report.saved is not None:
                works = self._writes.pop(report.save_id)
                self._payloads[id(report.saved.payload)] = works
            self.parts.scheduler.take_report(report)
        self._reports.clear()

    def _held(self, save: Save) -> list[Work]:
        if isinstance(save.source, Snapshot):
            return self._payloads[id(save.source.payload)]
        rows = self.slots[save.source][save.start : save.stop]
        return [None] * save.start + rows

    def _do(self, move: Move, captures: dict[int, list[Work]]) -> None:
        slots = self.slots
        match move:
            case Release(slot):
                slots[slot] = []
            case Trim(slot, n_pos):
                del slots.setdefault(slot, [])[n_pos:]
            case Copy(src, dst, n_pos):
                slots[dst] = slots[src][:n_pos]
            case Save(save_id, CacheTier.HOST):
                captures[save_id] = self._held(move)
            case Save(save_id):
                self._writes[save_id] = self._held(move)
            case Fetch(fetch_id, payload):
                self._fetches[fetch_id] = self._payloads[id(payload)]
            case Load(slot, pieces):
                slots[slot] = [
                    work
                    for payload, start, stop in pieces
                    for work in self._payloads[id(payload)][start:stop]
                ]

    def replay(self, history: list[Work]) -> dict[int, np.ndarray]:
        """
        Compute the same chunks in an empty context; the logits after each, by position.

        The engine cannot go on after this.
        """
        context: Context = self.parts.executor.context
        context.clear()
        batch = Batch(context.max_tokens)
        logits = {}
        pos = 0
        while pos < len(history):
            chunk = history[pos]
            tokens = chunk.tokens[pos - chunk.pos :]
            n_kept = sum(1 for other in history[pos:] if other is chunk)
            batch.clear()
            batch.add(tokens, pos, 0, True)
            context.decode(batch)
            if n_kept < len(tokens):
                assert context.seq_rm(0, pos + n_kept, -1)
            pos += n_kept
            logits[pos - 1] = np.asarray(context.logits(len(tokens) - 1))
        return logits


def differences(
    played: Played, other: Played, n_outputs: int | None = None
) -> tuple[float, float]:
    """
    Largest difference of logits before the tokens part, and the margin of *other* there.

    The margin is 0 if they never part, or later than after *n_outputs*.
    """
    worst = 0.0
    pairs = zip(played.tokens, other.tokens, strict=False)
    for index, (token, expected) in enumerate(islice(pairs, n_outputs)):
        mine, theirs = played.logits[index], other.logits[index]
        worst = max(worst, distance(mine, theirs))
        if token != expected:
            return worst, float(theirs[expected] - theirs[token])
    return worst, 0.0


def distance_to_replay(player: Player, played: Played) -> float:
    """Largest difference of the logits of *played* from a cold run's, chunks the same."""
    cold = player.replay(played.history)
    first = len(played.prompt) - 1
    return max(
        (distance(row, cold[first + i]) for i, row in enumerate(played.logits)),
        default=0.0,
    )


def distance(logits: np.ndarray, reference: np.ndarray) -> float:
    """Largest difference; tokens that a sampler has ruled out do not count."""
    is_finite = np.isfinite(logits) & np.isfinite(reference)
    return float(np.abs(logits[is_finite] - reference[is_finite]).max())
