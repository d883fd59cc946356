"""Requests that change their lot within the prompt: what is computed where, and shared."""

import os
from array import array
from random import Random

import pytest

from pyllama_raw.core.memory.snapshot_kind import SnapshotKind
from pyllama_raw.core.request import TOKENS, Delta, Lot, Request
from pyllama_raw.core.spans import Span, border, position, span_at
from tests.core.span_support import Engine
from tests.core.support import finished

N_HISTORIES = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "200"))
X, Y = (Lot(name, adapters=((number, 1.0),)) for number, name in enumerate("xy"))
PROMPT = list(range(100, 112))


class Turning(Engine):
    """Takes requests that change their lot."""

    def ask(self, tokens, start=0, lot=TOKENS, max_tokens=2) -> int:
        """The rows before *start* are of TOKENS, those behind of *lot*."""
        number, tokens, fields = self._n_added, array("i", tokens), {}
        if start:
            first = max(start - 2, 0)
            text = tuple(tokens[first:start])
            key = repr((lot.name, text)).encode()
            tokens[first:start] = array("i", [-1 - hash(key) % 2**30]) * len(text)
            span = Span(first, start, len(text), key=key, text=text)
            fields = {"spans": (span,), "first_lot": TOKENS}
        request = Request(number, tokens, max_tokens, lot=lot, **fields)
        self.driver.add([request], 0.0)
        self._n_added += 1
        return number

    def outputs(self) -> dict[int, list[int]]:
        """Tokens of each request."""
        found = {number: [] for number in range(self._n_added)}
        for event in self.events:
            if isinstance(event, Delta):
                found[event.request_id] += event.tokens
        return found


def test_rows_before_the_change_are_of_the_first_lot():
    """
    A chunk ends there. Its last tokens are computed as text, whatever stands for them.
    """
    engine = Turning()
    engine.ask(PROMPT, 7, X)
    engine.run()

    found = [
        (plan.lot, [*work.tokens])
        for plan in engine.executor.plans
        for work in plan.works
    ]
    assert found[:2] == [(TOKENS, PROMPT[:7]), (X, PROMPT[7:])]
    assert [lot for lot, _ in found[2:]] == [X]


def test_a_span_of_text_counts_as_text():
    """
    But for its ends: a chunk ends with it, and not before it.
    """
    spans = (Span(4, 6, 2, text=(1, 2)),)

    assert [position(spans, i) for i in range(8)] == [*range(8)]
    assert {span_at(spans, i) for i in range(8)} == {None}
    assert [border(spans, i) for i in (0, 4, 5, 6)] == [6, 6, 6, None]


@pytest.mark.parametrize("kind", [SnapshotKind.RANGE, SnapshotKind.STATE])
def test_rows_before_the_change_are_those_of_everybody(kind):
    """
    All but the last two, in either direction; rows behind are of equal changes only.
    """
    engine = Turning(kind, n_slots=6, unified=kind is SnapshotKind.RANGE)
    cached = []
    for start, lot in ((0, TOKENS), (7, X), (7, X), (7, Y), (8, X), (0, TOKENS)):
        number = engine.ask(PROMPT, start, lot)
        cached.append(engine.run()[number].n_cached)

    assert cached == [0, 5, 10, 5, 6, 10]


def test_who_changes_at_the_last_token_goes_on_with_it():
    """
    It is sampled from in the new lot.
    """
    engine = Turning()
    engine.ask(PROMPT, 11, X)
    engine.run()

    found = [
        (plan.lot, len(work.tokens))
        for plan in engine.executor.plans
        for work in plan.works
    ]
    assert found == [(TOKENS, 11), (X, 1), (X, 1)]


def random_engine(rng: Random) -> Turning:
    kind = rng.choice(list(SnapshotKind))
    n_steps = 0 if kind is SnapshotKind.EXACT else 60  # an abort would cut it
    return Turning(
        kind,
        interval=rng.choice([0, 4]),
        max_bytes=rng.choice([0, 10**6]),
        has_files=kind is not SnapshotKind.EXACT and rng.random() < 0.3,
        n_slots=rng.choice([1, 3]),
        n_ctx_slot=32,
        n_batch=rng.choice([4, 16]),
        unified=kind is SnapshotKind.RANGE,
        deterministic=rng.random() < 0.3,
        aborts=[n for n in range(n_steps) if rng.random() < 0.1],
    )


@pytest.mark.parametrize("first", range(0, N_HISTORIES, 100))
def test_outputs_are_those_of_requests_alone(first):
    """
    Whatever is shared, aborted or preempted; the executor checks lots and positions.
    """
    for seed in range(first, first + 100):
        rng = Random(seed)  # noqa: S311
        engine, asked = random_engine(rng), []
        while len(asked) < 10:
            prompt = PROMPT[: rng.randrange(3, 12)] + [
                rng.choice([5, 6])
            ] * rng.randrange(1, 4)
            lot = rng.choice([TOKENS, X, Y])
            start = 0 if lot is TOKENS else rng.randrange(1, len(prompt))
            asked.append((prompt, start, lot, rng.randrange(1, 9)))
            engine.ask(*asked[-1])
            for _ in range(rng.randrange(8)):
                engine.driver.step()
                engine.scheduler.check_integrity()
            engine.write_all()
            engine.read_all()
        while len(finished(engine.events)) < len(asked):
            engine.run()
            engine.write_all()
            engine.read_all()

        for number, output in engine.outputs().items():
            alone = Turning()
            alone.ask(*asked[number])
            alone.run()
            assert output == alone.outputs()[0]
