"""What the step log says of a step."""

from array import array

import pytest

from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.step import (
    Copy,
    Decode,
    DecodeStatus,
    Load,
    Piece,
    Prefill,
    Save,
    StepPlan,
)
from pyllama_raw.engine.records import write_records
from pyllama_raw.engine.step_log import (
    Size,
    StepLog,
    StepRecord,
    read_steps,
    size_of,
)
from tests.core.support import answer, make_request, make_scheduler, step


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


def test_a_log_keeps_the_last_steps():
    """
    The ring holds the newest records, with the state of the scheduler after each.
    """
    log, scheduler = StepLog(max_steps=2), make_scheduler(n_slots=1)
    for request_id in range(2):
        scheduler.add(make_request(request_id, n_prompt=4, max_tokens=3), 0.0)

    for now in range(3):
        plan, _ = step(scheduler, float(now))
        log.add(plan, scheduler, now, now + 0.5)

    assert [(r.at_s, r.seconds, r.n_prefill, r.n_decode) for r in log] == [
        (1, 0.5, 0, 1),
        (2, 0.5, 0, 1),
    ]
    assert [(r.n_running, r.n_waiting) for r in log] == [(1, 1), (0, 1)]


def test_a_record_says_who_was_computed():
    """
    Decodes and chunks by request and slot, the budget they shared, and how the step ended.
    """
    log, scheduler = StepLog(), make_scheduler(n_slots=2, token_budget=8)
    scheduler.add(make_request(7, n_prompt=4, max_tokens=3), 0.0)
    plan, _ = step(scheduler)
    log.add(plan, scheduler, 0.0, 0.5)
    scheduler.add(make_request(9, n_prompt=20, max_tokens=3), 0.0)
    plan = scheduler.schedule(1.0)
    times = {"decode_s": 0.25, "sample_s": 0.125, "restore_s": {0: 0.5, 1: 0.25}}
    result = answer(plan)._replace(**times)
    scheduler.apply(plan, result, 1.5)
    log.add(plan, scheduler, 1.0, 1.5, result=result, host_s=0.0625)

    assert list(log) == [
        StepRecord(
            *(0.0, 0.5, 4, 0, 4 + 3 + 2 + 1, 0, 0, 1, 0, 4),
            budget=8,
            chunks=((7, 0, 4),),
        ),
        StepRecord(
            *(1.0, 0.5, 7, 1, 5 + 7 * 8 // 2, 0, 0, 2, 0, 12),
            budget=8,
            host_s=0.0625,
            decode_s=0.25,
            sample_s=0.125,
            restore_s=0.75,
            decodes=((7, 0),),
            chunks=((9, 1, 7),),
        ),
    ]


def test_a_record_says_who_was_computed_when_these_are_the_same():
    """
    Steps of the same streams are measured by what differs: each record is that of its plan.
    """
    log, scheduler = StepLog(), make_scheduler(n_slots=2)
    for request_id, n_tokens in enumerate((4, 7, 3)):
        scheduler.add(make_request(request_id, n_prompt=4, max_tokens=n_tokens), 0.0)
    plans = []
    while scheduler.has_work:
        plan, _ = step(scheduler)
        log.add(plan, scheduler, 0.0, 0.5)
        plans.append(plan)

    assert [plan.same for plan in plans].count(True) > 2
    for plan, record in zip(plans, log, strict=True):
        decodes = [work for work in plan.works if type(work) is Decode]
        assert record.decodes == tuple((work[0], work[1]) for work in decodes)
        assert record[:7] == (0.0, 0.5, *size_of(plan._replace(same=False)))


def test_a_record_counts_the_preempted_of_its_step():
    """
    Not those of earlier steps.
    """
    log, scheduler = StepLog(), make_scheduler(n_slots=2)
    for request_id in range(2):
        scheduler.add(make_request(request_id, n_prompt=4, max_tokens=6), 0.0)
    for status in (DecodeStatus.OK, DecodeStatus.NO_SPACE, DecodeStatus.OK):
        plan = scheduler.schedule(0.0)
        result = answer(plan)._replace(status=status)
        scheduler.apply(plan, result, 0.5)
        log.add(plan, scheduler, 0.0, 0.5, result=result)

    assert [(record.n_preempted, record.status) for record in log] == [
        (0, "ok"),
        (1, "no space"),
        (0, "ok"),
    ]


def test_a_log_is_read_as_it_was_written(tmp_path):
    """
    JSON lines hold every field of every record.
    """
    log, scheduler = StepLog(), make_scheduler()
    scheduler.add(make_request(), 0.0)
    log.add(step(scheduler)[0], scheduler, 0.0, 0.25)
    write_records(tmp_path / "steps.jsonl", log)

    assert read_steps(tmp_path / "steps.jsonl") == list(log)


@pytest.mark.parametrize("text", ['{"at_s": 1}', "[1]", "no JSON"])
def test_another_file_is_no_log(tmp_path, text):
    """
    The error names the line.
    """
    (tmp_path / "steps.jsonl").write_text(text)

    with pytest.raises(ValueError, match=r"steps.jsonl, line 1"):
        read_steps(tmp_path / "steps.jsonl")
