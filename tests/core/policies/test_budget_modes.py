"""How a step is divided between streams and prompts."""

from itertools import chain

import pytest

from pyllama_raw.core.request import Finished
from pyllama_raw.core.scheduling.packer import divide
from tests.core.support import make_request, make_scheduler, run_until_idle, step


@pytest.mark.parametrize(
    ("mode", "n_streams", "total", "expected"),
    [
        ("balanced", 8, 4, (3, 1)),
        ("balanced", 8, 1, (1, 0)),
        ("throughput_first", 8, 8, (2, 6)),
        ("throughput_first", 1, 8, (1, 7)),
        ("latency_first", 5, 8, (5, 3)),
        ("latency_first", 8, 5, (5, 0)),
        ("latency_first", 0, 8, (0, 8)),
    ],
)
def test_tokens_are_divided(mode, n_streams, total, expected):
    """
    Streams and prompts share the whole step, by the rules of the mode.
    """
    assert divide(mode, n_streams, total) == expected


def with_streams_and_a_prompt(mode, n_streams=8, budget=8, n_prompt=40, **options):
    """A scheduler with *n_streams* that decode, and a prompt that has just come."""
    scheduler = make_scheduler(
        n_slots=n_streams + 1, token_budget=budget, budget_mode=mode, **options
    )
    for request_id in range(n_streams):
        scheduler.add(make_request(request_id, n_prompt=2, max_tokens=60), 0.0)
    for _ in range(8):
        step(scheduler)
    scheduler.add(make_request(n_streams, n_prompt=n_prompt, max_tokens=2), 0.0)
    return scheduler


def shares(plan, n_streams=8):
    """Streams of *plan*, and tokens of its prompt."""
    streams = [work.request_id for work in plan.works if work.request_id < n_streams]
    return streams, plan.n_tokens - len(streams)


def test_balanced_keeps_all_streams_going_and_gives_prompts_some():
    """
    The default: every stream has its token, a prompt two where the budget is used up.
    """
    scheduler = with_streams_and_a_prompt("balanced", budget=16)

    assert [shares(step(scheduler)[0]) for _ in range(2)] == [
        (list(range(8)), 8),
        (list(range(8)), 8),
    ]


def test_throughput_first_gives_prompts_three_quarters():
    """
    Streams share a quarter of the step, in turn, while there is a prompt.
    """
    scheduler = with_streams_and_a_prompt("throughput_first")

    found = [shares(step(scheduler)[0]) for _ in range(4)]

    assert [n_prompt for _, n_prompt in found] == [6, 6, 6, 6]
    assert sorted(chain.from_iterable(streams for streams, _ in found)) == [*range(8)]


def test_latency_first_gives_prompts_what_streams_leave():
    """
    Where streams use up the budget a prompt waits, but for eight steps at most.
    """
    scheduler = with_streams_and_a_prompt("latency_first", n_prompt=4)

    found = [shares(step(scheduler)[0])[1] for _ in range(9)]

    assert found == [0] * 8 + [1]


@pytest.mark.parametrize("mode", ["balanced", "latency_first", "throughput_first"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_everything_ends_in_every_mode(mode, deterministic):
    """
    No mode keeps a stream or a prompt waiting for ever.
    """
    scheduler = make_scheduler(
        n_slots=6, token_budget=8, budget_mode=mode, deterministic=deterministic
    )
    for request_id in range(30):
        scheduler.add(
            make_request(request_id, n_prompt=1 + request_id, max_tokens=9), 0
        )

    _, events = run_until_idle(scheduler)

    assert sum(isinstance(event, Finished) for event in events) == 30
