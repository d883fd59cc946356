"""Policies that see guesses of outputs, as live, and not outputs."""

from math import log
from statistics import fmean, pstdev

import pytest

from pyllama_raw.cli import main
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.arrivals import Arrival
from pyllama_raw.lab.sim import Guessed, Lengths, Machine, Trace, Workload, simulate

LOAD = Workload(n_requests=150, rate=8, seed=1)
MACHINE = Machine(n_slots=4, n_ctx_slot=512)


def seen(requests):
    """What a policy reads of each: the most output, and the caller's guess."""
    return [
        (r.max_tokens, dict(r.policy_data or {})) for _, r in requests.requests(512)
    ]


def test_without_guesses_the_limit_is_the_output():
    """
    So a policy knows the truth, as docs say.
    """
    pairs = list(LOAD.requests(512))

    assert all(r.max_tokens == r.sampling.n_output for _, r in pairs)


def test_a_policy_sees_the_guess_alone():
    """
    All requests allow equally much, and the guess is not the output.
    """
    limits, data = zip(*seen(Guessed(LOAD, 1.0)), strict=True)
    outputs = [r.sampling.n_output for _, r in LOAD.requests(512)]
    guesses = [values["n_output"] for values in data]

    assert set(limits) == {256}
    assert sum(a == b for a, b in zip(guesses, outputs, strict=True)) < 15


def test_guesses_are_off_by_a_factor_of_sigma():
    """
    Its logarithm has the mean 0 and that deviation; 0 guesses right.
    """
    long = Workload(n_requests=4000, output=Lengths(200))
    offs = [log(data["n_output"] / 200) for _, data in seen(Guessed(long, 0.5))]

    assert (fmean(offs), pstdev(offs)) == pytest.approx((0, 0.5), abs=0.03)
    assert {data["n_output"] for _, data in seen(Guessed(long, 0.0))} == {200}


def test_guesses_change_no_request():
    """
    Who comes when with which prompt and output is the same; guesses depend on their seed.
    """
    plain = [(at_s, r.tokens, r.sampling) for at_s, r in LOAD.requests(512)]
    first, second = Guessed(LOAD, 1.0), Guessed(LOAD, 1.0, seed=2)
    requests = [(at_s, r.tokens, r.sampling) for at_s, r in first.requests(512)]

    assert requests == plain
    assert seen(first) == seen(Guessed(LOAD, 1.0)) != seen(second)
    assert simulate(first, MACHINE).n_output == simulate(LOAD, MACHINE).n_output


def test_a_limit_ends_longer_outputs():
    """
    As live: nobody gets more than max_tokens.
    """
    ends = []
    simulate(Guessed(LOAD, None, 7), MACHINE, on_end=lambda _, end: ends.append(end))
    outputs = [r.sampling.n_output for _, r in LOAD.requests(512)]

    assert sum(e.n_output for e in ends) == sum(min(n, 7) for n in outputs)


def test_recorded_requests_are_guessed_too():
    """
    What else a policy was told of them stays.
    """
    arrivals = [
        Arrival(
            0.0, 20, 30, max_tokens=99, fields_of_call={"policy_data": {"tier": "gold"}}
        )
    ]

    assert seen(Guessed(Trace(arrivals), 0.0)) == [
        (256, {"tier": "gold", "n_output": 30})
    ]


def test_sjf_gains_less_by_guesses():
    """
    What is known wins over a guess, which wins over nothing.
    """
    by_truth, by_guess, by_nothing, fcfs = (
        simulate(load, Machine(policy=policy, n_slots=4, n_ctx_slot=512)).row()[
            "e2e p50"
        ]
        for policy, load in (
            ("sjf", LOAD),
            ("sjf", Guessed(LOAD, 1.5)),
            ("sjf", Guessed(LOAD)),
            ("fcfs", LOAD),
        )
    )

    assert by_truth < by_guess < by_nothing < fcfs


def test_the_command_takes_guesses(capsys):
    """
    Equal seeds guess alike; a guess changes what sjf does, and nothing of fcfs.
    """
    few = ["simulate", "--requests", "80", "--rate", "20", "--compare"]
    rows = []
    for flags in (["sjf"], ["sjf", "--guess", "1.5"], ["sjf", "--guess", "1.5"]):
        assert main([*few, *flags]) == 0
        rows.append(capsys.readouterr().out.splitlines()[1])

    assert rows[0] != rows[1] == rows[2]


@pytest.mark.parametrize("fields", [{"sigma": -1}, {"sigma": "1"}, {"max_tokens": 0}])
def test_what_is_no_guess_is_refused(fields):
    """
    The error names the field.
    """
    (name,) = fields

    with pytest.raises(ConfigError, match=f"Guessed.{name}="):
        Guessed(LOAD, **fields)
