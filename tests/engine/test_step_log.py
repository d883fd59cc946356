"""What the step log says of a step."""

from array import array

import pytest

from pyllama_raw.core.request import DRAFTS, CacheTier
from pyllama_raw.core.stats import Occupancy
from pyllama_raw.core.step import (
    Copy,
    Decode,
    DecodeStatus,
    Load,
    Piece,
    Prefill,
    Propose,
    Proposed,
    RowFailed,
    Sampled,
    Save,
    StepPlan,
    StepResult,
    Verify,
)
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.logs import (
    Size,
    StepLog,
    StepRecord,
    read_records,
    size_of,
    step_fields,
    write_records,
)
from pyllama_raw.errors import SamplingFailed
from pyllama_raw.testing import FakeExecutor, fake_limits, fake_parts
from tests.core.support import make_request


def tokens(n):
    return array("i", range(n))


def test_the_size_of_a_plan():
    """
    A token looks at itself and all before it; a save, a load and a copy move tokens.
    """
    plan = StepPlan(
        moves=(
            Save(0, CacheTier.HOST, 2, 10, 25, 1000),
            Load(3, (Piece(None, 0, 4), Piece(None, 4, 9)), 8),
            Copy(0, 1, 7),
        ),
        works=(
            Decode(0, 0, 30, tokens(1)),
            Prefill(1, 1, 7, tokens(3), False),
        ),
    )

    assert size_of(plan) == Size(3, 1, 31 + (8 + 9 + 10), 15, 9 + 7)


class Steps:
    """A driver on the fake executor with a step log; a step takes half a second."""

    def __init__(self, *requests, max_steps=100, failing=None, **options):
        self.log = StepLog(max_steps)
        limits = fake_limits(n_slots=2, n_batch=16)
        executor = FakeExecutor(limits, failures=failing)
        self.scheduler = fake_parts(executor, **options).scheduler
        self.driver = Driver(
            self.scheduler,
            executor,
            lambda: 0.5 * executor.n_steps,
            lambda *_: None,
            watchers=[self.log],
        )
        self.driver.add(requests, 0.0)

    def run(self):
        while self.driver.step():
            pass
        return list(self.log)


def test_a_log_keeps_the_last_steps():
    """
    The ring holds the newest records, with the state of the scheduler after each.
    """
    requests = [make_request(number, n_prompt=4, max_tokens=3) for number in range(3)]

    records = Steps(*requests, max_steps=2).run()

    assert [(r.at_s, r.seconds, r.n_prefill, r.n_decode) for r in records] == [
        (2.5, 0.5, 0, 1),
        (3.0, 0.5, 0, 0),
    ]
    assert [(r.n_running, r.n_waiting) for r in records] == [(0, 0), (0, 0)]


def test_a_record_says_what_was_computed():
    """
    Decodes and chunks by request and slot, and the budget that they shared.
    """
    steps = Steps(make_request(7, n_prompt=4, max_tokens=3), token_budget=8)
    steps.driver.step()
    steps.driver.add([make_request(9, n_prompt=20, max_tokens=3)], 0.5)
    steps.driver.step()

    assert list(steps.log) == [
        StepRecord(
            *(0.0, 0.5, 4, 0, 4 + 3 + 2 + 1, 0, 0, 1, 0, 4),
            budget=8,
            chunks=((7, 0, 4),),
        ),
        StepRecord(
            *(0.5, 0.5, 7, 1, 5 + 7 * 8 // 2, 0, 0, 2, 0, 12),
            budget=8,
            decodes=((7, 0),),
            chunks=((9, 1, 7),),
        ),
    ]


def test_a_record_counts_drafts_and_those_that_were_right():
    """
    A stream with drafts goes on as one, and its drafts look at all that is before them.
    """
    plan = StepPlan(
        works=(
            Decode(1, 0, 9, tokens(1)),
            Verify(2, 1, 4, tokens(4)),
            Verify(3, 2, 4, tokens(2)),
        )
    )
    error = SamplingFailed("fake", None, "as told")
    result = StepResult(outputs=(Sampled((5,)), Sampled((1, 2, 7)), RowFailed(error)))

    fields = step_fields(plan, result, Occupancy(3, 0, 20))

    assert size_of(plan) == Size(0, 3, 10 + (5 + 6 + 7 + 8) + (5 + 6), 0, 0, 4)
    assert [fields[n] for n in ("n_decode", "n_drafted", "n_accepted")] == [3, 4, 2]
    assert (fields["decodes"], fields["chunks"]) == (((1, 0), (2, 1), (3, 2)), ())


def test_a_record_counts_what_a_draft_model_computed():
    """
    In a step of its own, in which the model does nothing.
    """
    works = (Propose(1, 0, 4, tokens(3), 4), Propose(2, 1, 0, tokens(2), 4))
    proposed = Proposed((1, 2, 3, 4), (0.5,) * 4)
    result = StepResult(outputs=(proposed, proposed))

    fields = step_fields(StepPlan((), works, DRAFTS), result, Occupancy(2, 0, 20))

    assert size_of(StepPlan((), works, DRAFTS)) == Size(0, 0, 0, 0, 0, 0, 5 + 3 + 3)
    assert (fields["decodes"], fields["chunks"], fields["n_accepted"]) == ((), (), 0)


def test_a_record_has_the_seconds_of_a_result():
    """
    Decoding and choosing tokens, and what filling all slots took.
    """
    result = StepResult(decode_s=0.25, sample_s=0.125, restore_s={0: 0.5, 1: 0.25})

    fields = step_fields(StepPlan(), result, Occupancy(1, 2, 3, 4, 5, 6))

    assert StepRecord(at_s=1.0, seconds=0.5, **fields) == StepRecord(
        *(1.0, 0.5, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 0, 6),
        decode_s=0.25,
        sample_s=0.125,
        restore_s=0.75,
    )


def test_a_record_counts_the_preempted_of_its_step():
    """
    Not those of earlier steps, also for a log that is told late.
    """
    requests = [make_request(number, n_prompt=4, max_tokens=6) for number in range(2)]
    steps = Steps(*requests, failing={1: DecodeStatus.NO_SPACE})
    late = StepLog()
    steps.driver.step()
    steps.driver.step()
    steps.driver.watchers.add(late)
    steps.driver.step()

    assert [(r.n_preempted, r.status) for r in steps.log] == [
        (0, "ok"),
        (1, "no space"),
        (0, "ok"),
    ]
    assert [r.n_preempted for r in late] == [0]


def test_a_log_is_read_as_it_was_written(tmp_path):
    """
    JSON lines hold every field of every record.
    """
    records = Steps(make_request()).run()
    write_records(tmp_path / "steps.jsonl", records)

    assert read_records(tmp_path / "steps.jsonl", StepRecord) == records


@pytest.mark.parametrize("text", ['{"at_s": 1}', "[1]", "no JSON"])
def test_another_file_is_no_log(tmp_path, text):
    """
    The error names the line.
    """
    (tmp_path / "steps.jsonl").write_text(text)

    with pytest.raises(ValueError, match=r"steps.jsonl, line 1"):
        read_records(tmp_path / "steps.jsonl", StepRecord)


def test_steps_that_warm_up_are_marked():
    """
    Steps with a request that warms the engine up are marked, its last one included.
    """
    data = {"warm_up": True}
    steps = Steps(make_request(1, max_tokens=2, policy_data=data), max_steps=10)
    steps.run()
    steps.driver.add([make_request(2, max_tokens=2)], 9.0)

    computed = [record for record in steps.run() if record.decodes or record.chunks]
    assert [record.warms_up for record in computed] == [True, True, False, False]
