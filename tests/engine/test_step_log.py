"""What the step log says of a step."""

from array import array

import pytest

from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.step import Copy, Decode, Load, Piece, Prefill, Save, StepPlan
from pyllama_raw.engine.step_log import (
    Size,
    StepLog,
    read_steps,
    size_of,
    write_records,
)
from tests.core.support import make_request, make_scheduler, step


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
