"""Runs prompts with images and sounds on a real engine without its thread."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyllama_raw.core.request import Finished, NewTokens, Request, Span
from pyllama_raw.core.step import (
    DecodeStatus,
    Fetched,
    PrefillSpan,
    StepPlan,
    StepResult,
    Written,
)
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.media_desk import MediaReader
from pyllama_raw.engine.opening import build
from pyllama_raw.media.content import Audio, Image, Media
from pyllama_raw.native.context import Context
from pyllama_raw.native.projector import Cut, Projector, RowRun, Run
from tests.media.files import pixels, tone
from tests.native.media_support import AFTER, BEFORE, helper_logits, text_tokens
from tests.support.player import GREEDY, make_config
from tests.support.tiny import tiny_projector

ENCODED: dict[tuple[str, bytes], array[float]] = {}


@dataclass(frozen=True)
class Rows:
    """The rows of one run, encoded."""

    run: RowRun
    rows: array[float]


@dataclass(frozen=True)
class Prompt:
    """Text, an image or a sound, and text."""

    tokens: array[int]
    spans: tuple[Span, ...]
    payloads: tuple[Rows, ...]
    part: Media


class MediaPlayer:
    """One engine and its projector."""

    def __init__(self, parts: Any, projector: Projector) -> None:
        self.parts, self.projector = parts, projector
        self.context: Context = parts.executor.context
        self.reader = MediaReader(projector, b"a projector")
        self.keys = parts.span_keys
        self.works: list[tuple[type, int]] = []  # types and numbers of rows computed
        self.logits: dict[int, list[NDArray[np.float32]]] = {}  # one a token
        self.ends: dict[int, Finished] = {}
        self.tokens: dict[int, list[int]] = {}
        self.goes_ahead = self.aborts_in_span = False
        self._reports: list[Written | Fetched] = []
        if parts.files is not None:
            parts.files.report = self._reports.append
        self._ids = count()
        self.driver = Driver(parts.scheduler, self, lambda: 0.0, self._take)

    def sample(self, seed: int = 0) -> Media:
        """An image of 100 x 60 pixels, or a second of sound."""
        if self.projector.sees:
            return Image(pixels(100, 60, seed))
        return Audio(tone(16000) / (1 + seed), 16000)

    def prompt(self, seed: int = 0, *, after: str = AFTER) -> Prompt:
        part, vocab = self.sample(seed), self.context.model
        tokens = text_tokens(vocab, BEFORE, add_special=True)
        spans, payloads = [], []
        with self.reader.read(part) as cut:
            for index, run, key in self._runs(part):
                if not isinstance(run, RowRun):
                    tokens += run.tokens
                    continue
                start, number = len(tokens), self.keys.number(key)
                tokens += array("i", [number]) * run.n_cells
                spans.append(Span(start, len(tokens), run.n_pos, run.is_causal, key))
                payloads.append(Rows(run, self._encode(cut, index, key)))
        tokens += text_tokens(vocab, after)
        return Prompt(tokens, tuple(spans), tuple(payloads), part)

    def _encode(self, cut: Cut, index: int, key: bytes) -> array[float]:
        """Each run once in all tests, because sounds take long."""
        key_of_rows = self.projector.path, key
        if key_of_rows not in ENCODED:
            rows = self.projector.encode(cut, index)
            assert rows is not None
            ENCODED[key_of_rows] = rows
        return ENCODED[key_of_rows]

    def _runs(self, part: Media) -> Iterator[tuple[int, Run, bytes]]:
        layout = self.reader.layout(part)
        for index, (run, key) in enumerate(zip(layout.runs, layout.keys, strict=True)):
            yield index, run, key or b""

    def add(self, prompt: Prompt, max_tokens: int = 4, **fields: Any) -> int:
        """Its rows are there."""
        number = next(self._ids)
        request = Request(
            number,
            prompt.tokens,
            max_tokens,
            spans=prompt.spans,
            payloads=prompt.payloads,
            **{"sampling": GREEDY, **fields},
        )
        self.tokens[number], self.logits[number] = [], []
        self.driver.add([request], 0.0)
        return number

    def play(self, prompt: Prompt, max_tokens: int = 4, **fields: Any) -> int:
        number = self.add(prompt, max_tokens, **fields)
        self.run()
        return number

    def play_text(self, n_tokens: int) -> int:
        tokens = array("i", [3 + i * 7 % 150 for i in range(n_tokens)])
        return self.play(Prompt(tokens, (), (), self.sample()))

    def set_min_gain(self, n_tokens: int) -> None:
        """The fewest tokens that a file is written or read for."""
        self.parts.scheduler.memory.tiers.disk.min_gain = n_tokens

    def run(self) -> None:
        while self.step():
            pass

    def step(self) -> bool:
        worked = self.driver.step()
        self.parts.scheduler.check_integrity()
        return worked

    def expected(self, prompt: Prompt, n_batch: int = 512) -> NDArray[np.float32]:
        """By mtmd's own helper, in an empty context; the engine cannot go on after this."""
        self.context.clear()
        with self.reader.decode(prompt.part) as bitmap:
            logits = helper_logits(
                self.context, self.projector, bitmap, n_batch=n_batch
            )
        logits[list(self.context.model.vocab.eog_tokens)] = 0
        return logits

    # -- as the executor of its driver ----------------------------------------------

    def open(self, request: Request) -> None:
        self.parts.executor.open(request)

    def close(self, request_id: int) -> Any:
        return self.parts.executor.close(request_id)

    def stop(self, request_id: int | None = None) -> None: ...

    def execute(self, plan: StepPlan) -> StepResult:
        if not self.goes_ahead:  # a step begun ahead would replace the logits
            plan = plan._replace(steady=False)
        executor = self.parts.executor
        if self.aborts_in_span and plan.works and type(plan.works[-1]) is PrefillSpan:
            self.aborts_in_span = False
            result = self._half(plan)
        else:
            result = executor.execute(plan)
        self.context = self.parts.executor.context
        if result.status is DecodeStatus.OK:
            self.works += [(type(work), len(work.tokens)) for work in plan.works]
            self._note_logits(plan)
        self._end_files()
        return result

    def _half(self, plan: StepPlan) -> StepResult:
        """Let libllama compute half of the rows of *plan*, then have it aborted."""
        executor, works = self.parts.executor, plan.works
        moved = executor.execute(StepPlan(plan.moves))
        half = [
            work._replace(tokens=work.tokens[: len(work.tokens) // 2]) for work in works
        ]
        half = tuple(work for work in half if work.tokens)
        if half and not plan.lot.is_whole:
            executor._rows.compute_spans(half, self.context)
        return executor._failed(works, 2)._replace(saved=moved.saved)

    def _note_logits(self, plan: StepPlan) -> None:
        row = -1
        for work in plan.works:
            row += len(work.tokens)
            number = work.request_id
            if work.samples and not plan.steady:
                logits = np.asarray(
                    self.context.logits(row)
                )  # a sampler has ruled out some tokens
                self.logits[number].append(np.where(np.isinf(logits), 0, logits))

    def _end_files(self) -> None:
        if self.parts.files is not None:
            self.parts.files.drain()
            for report in self._reports:
                self.parts.scheduler.take_report(report)
            self._reports.clear()

    def _take(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, Finished):
                self.ends[event.request_id] = event
            elif isinstance(event, NewTokens):
                self.tokens[event.request_id] += event.tokens

    def n_computed_rows(self) -> int:
        """Rows of spans that were computed since the last call."""
        works, self.works = self.works, []
        return sum(n for kind, n in works if kind is PrefillSpan)


@contextmanager
def playing_media(name: str, **options: Any) -> Iterator[MediaPlayer]:
    """A player of the tiny projector *name* on its text model."""
    path, model_path = tiny_projector(name)
    options = {"n_ctx": 4096} | options
    parts = build(model_path, make_config(**options))
    try:
        model = parts.executor.context.model
        with Projector.load(path, model, use_gpu=False) as projector:
            yield MediaPlayer(parts, projector)
    finally:
        parts.release()
