"""What the request log says of requests, and how it says which prompts are alike."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.core.request import CacheTier, Finished, FinishReason, Moments, Private
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.logs import (
    BLOCK,
    RequestLog,
    RequestRecord,
    block_ids,
    read_records,
    write_records,
)
from pyllama_raw.errors import SamplingFailed
from pyllama_raw.testing import FakeExecutor, fake_limits, fake_parts
from tests.core.support import make_request

KEY = b"a key"


def ended(request_id=1, **changes):
    timings = Moments(2.0, 3.0, 4.0, 9.0, (1.0, 4.0))
    plain = Finished(
        request_id, FinishReason.STOP, None, 20, 3, 16, CacheTier.HOST, 1, timings
    )
    return replace(plain, **changes)


def asked(request_id=1, **changes):
    return replace(make_request(request_id, n_prompt=20, max_tokens=7), **changes)


def record(request, end):
    log = RequestLog()
    log.ended(request, end)
    (found,) = log
    return found


def test_a_record_says_what_became_of_a_request():
    """
    What was asked for, when what happened, and the blocks of the prompt.
    """
    request = asked(
        priority=3, deadline=12.0, client="me", policy_data={"tier": "gold"}
    )

    found = record(request, ended())

    assert found == RequestRecord(
        request_id=1,
        submitted_s=2.0,
        admitted_s=3.0,
        first_token_s=4.0,
        finished_s=9.0,
        why="stop",
        n_prompt=20,
        n_output=3,
        n_cached=16,
        cache_tier="host",
        n_preempted=1,
        max_tokens=7,
        priority=3,
        deadline_s=10.0,
        client="me",
        policy_data={"tier": "gold"},
        block=BLOCK,
        hash_ids=found.hash_ids,
    )
    assert len(found.hash_ids) == 2


def test_an_error_is_told_by_its_code():
    """
    A request that failed has the word that clients get.
    """
    end = ended(reason=None, error=SamplingFailed("f", None, "as told"))

    assert record(asked(), end).why == "sampling_failed"


@given(st.integers(0, 70), st.lists(st.integers(1, 9), max_size=50), st.integers(1, 50))
def test_ids_are_equal_as_far_as_prompts_are(n_shared, rest, n_other):
    """
    A block counts as equal only if all before it is; another salt shares nothing.
    """
    shared = [100 + i for i in range(n_shared)]
    one = array("i", [*shared, 1, *rest])
    two = array("i", [*shared, 2] + [3] * n_other)
    (a, b), (other, nobody) = (
        [block_ids(asked(tokens=tokens), KEY) for tokens in (one, two)],
        [
            block_ids(asked(tokens=one, namespace=name), KEY)
            for name in ("salt", Private())
        ],
    )
    n_equal = n_shared // BLOCK

    assert (len(a), len(b)) == (-(-len(one) // BLOCK), -(-len(two) // BLOCK))
    assert a[:n_equal] == b[:n_equal]
    assert len({*a, *b, *other, *nobody}) == 3 * len(a) + len(b) - n_equal


def test_texts_cannot_be_guessed():
    """
    Two logs number the same prompt differently.
    """
    request = asked()
    one, other = (record(request, ended()).hash_ids for _ in range(2))

    assert one != other
    assert block_ids(request, KEY) == block_ids(request, b"a key")


def test_a_log_is_read_as_it_was_written(tmp_path):
    """
    JSON lines hold every field of every record.
    """
    records = [record(asked(policy_data={"a": 1.5}), ended()), record(asked(), ended())]
    write_records(tmp_path / "requests.jsonl", records)

    assert read_records(tmp_path / "requests.jsonl", RequestRecord) == records


def test_a_log_keeps_the_last_requests():
    """
    Beyond the limit the oldest record goes; every end has had one.
    """
    put = []
    log = RequestLog(2, put.append)
    executor = FakeExecutor(fake_limits())
    driver = Driver(
        fake_parts(executor).scheduler,
        executor,
        lambda: float(executor.n_steps),
        lambda *_: None,
        watchers=[log],
    )
    driver.add([make_request(i, max_tokens=1 + i) for i in range(3)], 0.0)
    while driver.step():
        pass

    assert [r.request_id for r in log] == [1, 2]
    assert [(r.request_id, r.n_output, r.finished_s) for r in put] == [
        (0, 1, 1.0),
        (1, 2, 2.0),
        (2, 3, 3.0),
    ]


@pytest.mark.parametrize("text", ['{"request_id": 1}', "[1]", "no JSON"])
def test_another_file_is_no_log(tmp_path, text):
    """
    The error names the line.
    """
    (tmp_path / "requests.jsonl").write_text(text)

    with pytest.raises(ValueError, match=r"requests.jsonl, line 1"):
        read_records(tmp_path / "requests.jsonl", RequestRecord)
