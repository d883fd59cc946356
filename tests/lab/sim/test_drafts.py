"""Drafts of simulated outputs: those of recorded tokens, and of outputs that repeat themselves."""

import json
from array import array
from dataclasses import replace

import pytest

from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.request import NewTokens, Request
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.logs import RequestLog, StepLog, size_of
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.arrivals import Arrival, RecordedText
from pyllama_raw.lab.sim import CostModel, Machine, Trace, Workload, simulate
from pyllama_raw.testing import FakeExecutor
from tests.core.support import make_scheduler

MACHINE = Machine(n_slots=2, n_ctx_slot=256, n_batch=256, speculation="lookup")
COST = CostModel(1.0, 0.01, 0.1, 0.0, 0.0, 0.0)


def say(history):
    """A model that tells a story again and again, with a word that changes."""
    place = len(history) % 14
    return 60 + place if place else 80 + len(history) % 5


class Live:
    """A driver of a model, which takes what COST says, with its logs and outputs."""

    def __init__(self):
        self.now, self.outputs = 0.0, {}
        self.steps, self.requests = StepLog(), RequestLog()
        cache = PrefixCache(SnapshotKind.RANGE, max_bytes=0, max_entries=0)
        scheduler = make_scheduler(
            2,
            n_ctx_slot=256,
            n_batch=256,
            n_cells=512,
            n_outputs=32,
            cache=cache,
            speculates=True,
        )
        executor = FakeExecutor(scheduler.limits, next_token=say, on_step=self.wait)
        logs = [self.steps, self.requests]
        self.driver = Driver(
            scheduler, executor, lambda: self.now, self.take, watchers=logs
        )

    def wait(self, _, plan):
        self.now += COST.seconds(size_of(plan))

    def take(self, events):
        for event in events:
            if isinstance(event, NewTokens):
                self.outputs.setdefault(event.request_id, []).extend(event.tokens)

    def run(self, *requests):
        self.driver.add(requests, self.now)
        while self.driver.step():
            pass


def drafts(log):
    """Rows of each step: streams, drafts and those that were right."""
    return [(r.n_prefill, r.n_decode, r.n_drafted, r.n_accepted) for r in log]


def test_recorded_tokens_have_the_drafts_that_they_had():
    """
    Step by step, also where a text of an earlier request is looked at.
    """
    live = Live()
    prompts = [array("i", range(20 + n, 30 + n)) for n in range(3)]
    live.run(*[Request(n, prompts[n], 60) for n in range(2)])
    live.run(Request(2, prompts[2], 60))

    texts = {
        n: RecordedText(tuple(prompts[n]), tuple(live.outputs[n])) for n in range(3)
    }
    steps = StepLog()
    trace = Trace.of_log(live.requests, texts=texts)
    simulate(trace, replace(MACHINE, cost=COST), log=steps)
    assert drafts(steps) == drafts(live.steps)
    assert sum(record.n_accepted for record in steps) > 60


def test_without_speculation_recorded_tokens_come_one_by_one():
    """
    As of an engine that does not speculate.
    """
    steps, arrival = StepLog(), Arrival(0.0, 3, 20, prompt=(1, 2, 3), output=(5,) * 20)
    simulate(Trace([arrival]), replace(MACHINE, speculation="off"), log=steps)

    assert drafts(steps) == [(3, 0, 0, 0), *[(0, 1, 0, 0)] * 19]


def test_an_output_goes_on_where_fewer_tokens_were_recorded():
    """
    A log tells how many tokens came, and a caller may not have the last ones.
    """
    steps, arrival = StepLog(), Arrival(0.0, 3, 20, prompt=(1, 2, 3), output=(5,) * 4)
    figures = simulate(Trace([arrival]), replace(MACHINE, speculation="off"), log=steps)

    assert (figures.n_output, len(list(steps))) == (20, 20)


def test_a_trace_has_ids_of_prompts_and_outputs(tmp_path):
    """
    A request gets as many tokens as were recorded, and allows as many as it did.
    """
    row = {"at_s": 1, "prompt": [0, 1, 7], "max_tokens": 9, "output": [0, 1, 5]}
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(row))
    ((at_s, request),) = Trace.read(path).requests(64)

    answer = request.sampling
    assert (at_s, request.n_prompt, request.max_tokens, answer.n_output) == (0, 3, 9, 3)
    shift = request.tokens[0]
    assert [token - shift for token in request.tokens] == [0, 1, 7]
    assert [token - shift for token in answer.tokens] == [0, 1, 5]
    assert request.stop_token_ids.isdisjoint(answer.tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [-1]}, {"prompt": [2**31]}, {"prompt": {"a": 1}}, {"output": "abc"},
        {"output": [True]}, {"output": [1, 2, 3]},
    ],
)  # fmt: skip
def test_what_is_no_list_of_tokens_is_refused(tmp_path, fields):
    """
    The error names the line.
    """
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"prompt": [1], "max_tokens": 2, **fields}))

    with pytest.raises(ConfigError, match="line 1"):
        Trace.read(path)


def test_outputs_that_repeat_themselves_have_drafts():
    """
    An engine that speculates takes fewer steps for the same tokens, the fewer the more repeats.
    """
    workload, results = Workload(n_requests=20, rate=0.5, seed=3), {}
    machine = Machine(n_slots=4, n_ctx_slot=512)
    for mode, repetition in (("off", 0.95), ("lookup", 0.0), ("lookup", 0.95)):
        steps = StepLog(100_000)
        drafting = replace(machine, speculation=mode, repetition=repetition)
        figures = simulate(workload, drafting, log=steps)
        records = list(steps)
        drafted = sum(record.n_drafted for record in records)
        accepted = sum(record.n_accepted for record in records)
        results[mode, repetition] = figures.n_output, len(records), drafted, accepted

    n_output, n_steps, *none = results["off", 0.95]
    _, n_fewer, drafted, accepted = results["lookup", 0.95]
    assert none == [0, 0]
    assert {row[0] for row in results.values()} == {n_output}
    assert n_fewer < 0.8 * n_steps
    assert drafted > accepted > n_output / 4
