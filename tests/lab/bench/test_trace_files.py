"""Traces in six formats become calls."""

import json

import pytest

from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.arrivals import Arrival, read
from pyllama_raw.lab.workloads import calls_of
from tests.lab.bench.support import make_writer

MOONCAKE = """
{"timestamp": 2000, "input_length": 1030, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 2500, "input_length": 600, "output_length": 6, "hash_ids": [7, 3]}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9305900,396,109
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,10,2
2024-05-10 00:00:01.009930+00:00,20,3
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
VIDUR = """arrived_at,num_prefill_tokens,num_decode_tokens
1.5,374,44
2.75,396.0,109.0
"""
OURS = [
    {"at_s": 1.5, "prompt": "Hello", "max_tokens": 2, "kind": "chat"},
    {"at_s": 2.0, "prompt": " again", "max_tokens": 3, "after": 0},
    {"prompt_tokens": 4, "max_tokens": 1, "leave_after": 1},
]


def write(tmp_path, text, name="trace.jsonl"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_mooncake_blocks_are_equal_where_their_ids_are(tmp_path):
    """
    Two prompts with one first block share exactly that; lengths are as recorded.
    """
    arrivals = read(write(tmp_path, MOONCAKE))

    first, second = calls_of(arrivals, make_writer(), 1)

    assert [call.at_s for call in (first, second)] == [0.0, 0.5]
    assert [len(call.prompt) for call in (first, second)] == [1030, 600]
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:600] != second.prompt[512:600]
    assert [call.max_tokens for call in (first, second)] == [5, 6]


def test_another_seed_has_other_blocks(tmp_path):
    """
    A round finds nothing of the one before in a cache.
    """
    arrivals = read(write(tmp_path, MOONCAKE))

    prompts = [calls_of(arrivals, make_writer(), seed)[0].prompt for seed in (1, 2)]

    assert prompts[0][:512] != prompts[1][:512]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AZURE, [Arrival(0.0, 374, 44), Arrival(4.25, 396, 109)]),
        (AZURE_2024, [Arrival(0.0, 10, 2), Arrival(1.0, 20, 3)]),
        (BURSTGPT, [Arrival(0.0, 472, 18), Arrival(113.0, 417, 276)]),
    ],
)
def test_csv_traces(tmp_path, text, expected):
    """
    Times count from the first request; what failed when it was recorded is left out.
    """
    arrivals = read(write(tmp_path, text, "trace.csv"))

    assert [(a.n_prompt, a.n_output) for a in arrivals] == [
        (a.n_prompt, a.n_output) for a in expected
    ]
    assert [a.at_s for a in arrivals] == pytest.approx([a.at_s for a in expected])


def test_our_own_trace_has_prompts_turns_and_leavers(tmp_path):
    """
    Every field of a call can be given; a number of tokens stands for a prompt.
    """
    lines = "\n".join(map(json.dumps, OURS))

    calls = calls_of(read(write(tmp_path, lines)), make_writer(), 1)

    assert [call.prompt for call in calls[:2]] == ["Hello", " again"]
    assert [call.at_s for call in calls] == [0.0, 0.5, 0.0]
    assert (calls[0].kind, calls[1].after, calls[2].leave_after) == ("chat", 0, 1)
    assert len(calls[2].prompt) == 4


def test_a_trace_can_be_shortened_and_sped_up(tmp_path):
    """
    Blocks shrink with prompts, so that what is shared stays shared.
    """
    arrivals = read(write(tmp_path, MOONCAKE))

    first, second = calls_of(
        arrivals, make_writer(), 1, speed=10.0, length_scale=1 / 64
    )

    assert second.at_s == 0.05
    assert (len(first.prompt), len(second.prompt)) == (16, 9)
    assert first.prompt[:8] == second.prompt[:8]


def test_a_trace_can_be_cut(tmp_path):
    """
    Only so many requests are read.
    """
    assert len(read(write(tmp_path, MOONCAKE), limit=1)) == 1


ASKED = {
    "priority": 2, "deadline_s": 5.0, "client": "a", "policy_data": {"n_output": 7},
}  # fmt: skip
LOGGED = {
    "submitted_s": 1.0, "n_prompt": 20, "n_output": 3, "hash_ids": [7, 9], "block": 16,
    "max_tokens": 9, "priority": 0, "deadline_s": None, "client": None,
    "policy_data": None,
}  # fmt: skip


@pytest.mark.parametrize("row", [LOGGED, {"prompt_tokens": 4, "max_tokens": 3}])
def test_calls_ask_for_what_was_recorded(tmp_path, row):
    """
    Priority, deadline, client and policy_data, of a request log and of our own trace; what
    was not asked for is no option.
    """
    rows = "\n".join(json.dumps(fields) for fields in (row | ASKED, row))
    arrivals = read(write(tmp_path, rows))
    call, plain = calls_of(arrivals, make_writer(), 1, length_scale=2.0)

    assert (call.options, plain.options) == (ASKED, {})
    assert [arrival.fields_of_call.get("client") for arrival in arrivals] == ["a", None]


def test_requests_that_warmed_up_are_left_out(tmp_path):
    """
    They are no load that came.
    """
    rows = [LOGGED | {"policy_data": {"warm_up": True}}, LOGGED | {"client": "b"}]
    path = write(tmp_path, "\n".join(map(json.dumps, rows)))

    assert [arrival.fields_of_call.get("client") for arrival in read(path)] == ["b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a", "max_tokens": 1, "client": 5}', "line 1: .*client=5"),
        ('{"prompt": "a", "max_tokens": 1, "priority": "x"}', "line 1: .*priority='x'"),
        ("", "no requests"),
        ("[1]", "line 1: columns"),
        ("{", "line 1"),
        ('{"x": 1}', "no known format"),
        ('{"prompt": "a", "max_tokens": 1, "top_k": 1}', "unknown keys"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens=0"),
        ('{"prompt": "a", "max_tokens": 1, "after": 0}', "0 requests came before"),
        (MOONCAKE + '{"timestamp": 1}', "line 4: KeyError"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path, text, message):
    """
    The error names file and line.
    """
    with pytest.raises(ConfigError, match=message):
        read(write(tmp_path, text))


def test_vidur_has_lengths(tmp_path):
    """
    Counts may be written as floats; times count from the first request.
    """
    arrivals = read(write(tmp_path, VIDUR, "trace.csv"))

    assert arrivals == [Arrival(0.0, 374, 44), Arrival(1.25, 396, 109)]


def test_a_request_log_is_sent_again_in_the_order_of_arrival(tmp_path):
    """
    A log is by ends. Equal ids are equal blocks; what failed is left out.
    """
    common = {
        "block": 16, "priority": 1, "deadline_s": 5.0, "client": "a",
        "policy_data": None, "max_tokens": 9,
    }  # fmt: skip
    rows = [
        {"submitted_s": 12.5, "n_prompt": 20, "n_output": 3, "hash_ids": [7, 9]},
        {"submitted_s": 11.0, "n_prompt": 8, "n_output": 0, "hash_ids": [5]},
        {"submitted_s": 10.5, "n_prompt": 32, "n_output": 4, "hash_ids": [7, 8]},
    ]
    path = write(tmp_path, "\n".join(json.dumps(row | common) for row in rows))
    first, second = calls_of(read(path), make_writer(), 1, speed=4)

    assert [call.at_s for call in (first, second)] == [0.0, 0.5]
    assert [len(call.prompt) for call in (first, second)] == [32, 20]
    assert [call.max_tokens for call in (first, second)] == [4, 3]
    assert first.prompt[:16] == second.prompt[:16]
    assert first.prompt[16:20] != second.prompt[16:20]
    assert [arrival.n_prompt for arrival in read(path, 1)] == [32]
