"""Traces and request logs as requests of a simulation, live or replayed."""

import json

import pytest

from pyllama_raw.engine.logs import RequestLog
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.arrivals import Arrival
from pyllama_raw.lab.sim import Lengths, Machine, Trace, Workload, simulate

MACHINE = Machine(n_slots=4, n_ctx_slot=512)


def write(tmp_path, rows, name="trace.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_equal_hash_ids_are_equal_tokens(tmp_path):
    """
    Prompts are equal as far as their blocks are, and nowhere else.
    """
    rows = [
        {
            "timestamp": 0,
            "input_length": 1100,
            "output_length": 5,
            "hash_ids": [7, 8, 9],
        },
        {"timestamp": 500, "input_length": 600, "output_length": 6, "hash_ids": [7, 3]},
    ]
    trace = Trace.read(write(tmp_path, rows), speed=2)
    (_, first), (at_s, second) = trace.requests(4096)

    assert (at_s, first.n_prompt, second.n_prompt) == (0.25, 1100, 600)
    assert (first.max_tokens, second.max_tokens) == (5, 6)
    assert first.tokens[:512] == second.tokens[:512]
    assert first.tokens[512] != second.tokens[512]


def test_prefixes_of_a_trace_are_cached(tmp_path):
    """
    A prompt that comes again is computed but for its last tokens.
    """
    row = {"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [7]}
    trace = Trace.read(write(tmp_path, [row, row | {"timestamp": 9000}]))

    assert simulate(trace, MACHINE).n_cached == 98


def test_a_long_prompt_is_cut_to_the_slot():
    """
    A request that is larger than a slot keeps an output, of half a slot at most.
    """
    ((_, request),) = Trace([Arrival(0.0, 5000, 900, (1,))]).requests(512)

    assert (request.n_prompt, request.max_tokens) == (256, 256)


@pytest.mark.parametrize("speed", [1.0, 4.0])
def test_a_request_log_is_replayed(tmp_path, speed):
    """
    The requests of a log come again: who, when, how long, and with which prefix.
    """
    workload = Workload(
        60, 4.0, 0.5, Lengths(20, "uniform"), n_groups=3, prefix_tokens=64, n_clients=2,
        deadline_s=Lengths(1000),
    )  # fmt: skip
    log = RequestLog()
    figures = simulate(workload, MACHINE, watchers=[log])
    in_memory = Trace.of_log(log)
    path = write(tmp_path, [record._asdict() for record in log])
    trace = Trace.read(path, speed=speed)
    again = [request for _, request in trace.requests(512)]
    recorded = [request for _, request in workload.requests(512)]
    times = [at_s for at_s, _ in workload.requests(512)]

    assert [at_s for at_s, _ in trace.requests(512)] == pytest.approx(
        [(at_s - times[0]) / speed for at_s in times]
    )
    assert [(r.n_prompt, r.max_tokens, r.client) for r in again] == [
        (r.n_prompt, r.max_tokens, r.client) for r in recorded
    ]
    assert all(r.deadline for r in again)
    assert in_memory.arrivals == Trace.read(path).arrivals
    assert simulate(trace, MACHINE).n_output == figures.n_output
    if speed == 1:
        assert simulate(trace, MACHINE).n_cached == pytest.approx(
            figures.n_cached, rel=0.02
        )


def test_a_log_is_replayed_without_what_warmed_up():
    """
    Whose policy_data says so.
    """
    log = RequestLog()
    simulate(Workload(3, 4.0), MACHINE, watchers=[log])
    first, *replayed = log
    warming = first._replace(policy_data={"warm_up": True})

    assert Trace.of_log([warming, *replayed]).n_requests == 2


def test_a_trace_of_texts_has_no_lengths(tmp_path):
    """
    Only a tokenizer knows how long a text is: a simulation asks for prompt_tokens.
    """
    with pytest.raises(ConfigError, match="prompt_tokens"):
        Trace.read(write(tmp_path, [{"prompt": "Hello", "max_tokens": 2}]))


def test_a_trace_goes_forward():
    """
    A speed of 0 is refused.
    """
    with pytest.raises(ConfigError, match="speed"):
        Trace([Arrival(0.0, 5, 5)], speed=0)
