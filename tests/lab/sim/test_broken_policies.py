"""A simulation does not take the figures of `fcfs` for those of a policy that is broken."""

import logging
from dataclasses import replace

import pytest

from pyllama_raw import policy
from pyllama_raw.cli import main
from pyllama_raw.errors import PolicyFailed
from pyllama_raw.lab.sim import Machine, Workload, simulate, table
from pyllama_raw.policy import SchedulingPolicy

BUSY = Workload(n_requests=40, rate=20, seed=3)


def boom(*_):
    raise KeyError("weight")


def broken(hook, answer):
    """The name of a policy whose *hook* is *answer*."""
    kind = type("Broken", (SchedulingPolicy,), {"name": "broken", hook: answer})
    return policy.register(kind).name


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Nothing that a test registers stays."""
    monkeypatch.setattr(policy, "_registered", {})


@pytest.mark.parametrize(
    ("hook", "answer", "reason"),
    [
        ("order_key", lambda *_: "soon", "order_key returned 'soon': return a number"),
        ("order_key", boom, "order_key raised KeyError('weight')"),
        ("prefill_quota", lambda *_: 7, "prefill_quota returned 7: return a mapping"),
        ("on_arrival", boom, "on_arrival raised KeyError('weight')"),
        ("on_scheduled", boom, "on_scheduled raised KeyError('weight')"),
        ("on_finished", boom, "on_finished raised KeyError('weight')"),
    ],
)
def test_a_broken_hook_ends_a_simulation(hook, answer, reason):
    """
    The error names the policy, the hook and what that did; its cause is what was raised.
    """
    machine = Machine(policy=broken(hook, answer))

    with pytest.raises(PolicyFailed) as caught:
        simulate(BUSY, machine)

    error = caught.value
    assert str(error).startswith(f"policy broken: {reason}")
    assert ("test_broken_policies.py, line" in error.reason) == ("raised" in reason)
    assert (error.policy, error.hook) == ("broken", hook)
    assert error.__cause__ is not None


def test_one_that_goes_on_counts_the_faults(caplog):
    """
    All requests end as under fcfs; the figures and the log say that the policy failed.
    """
    machine = Machine(policy=broken("order_key", boom))

    with caplog.at_level(logging.ERROR):
        figures = simulate(BUSY, machine, keep_going=True)
    plain = simulate(BUSY, replace(machine, policy="fcfs"))

    assert figures.row()["faults"] == figures.n_faults > 0
    assert figures.row() | {"faults": 0} == plain.row()
    assert "policy broken: order_key failed 1 times" in caplog.messages[0]


def test_the_command_fails_unless_it_is_told_to_go_on(capsys):
    """
    An error of one line and no table; with --keep-going a table and status 1.
    """
    command = ["simulate", "--requests", "20", "--compare"]
    command.append(broken("order_key", lambda *_: None))

    assert main(command) == 1
    refused = capsys.readouterr()
    assert main([*command, "--keep-going"]) == 1
    heading, row, *_ = capsys.readouterr().out.splitlines()
    assert refused.out == ""
    assert refused.err.splitlines()[-1].startswith(
        "error: policy broken: order_key returned None: return a number"
    )
    assert heading.split()[-1] == "faults"
    assert int(row.split()[-1]) > 0


def test_a_policy_that_works_has_no_faults():
    """
    The column is there, and 0.
    """
    lines = table([simulate(BUSY, Machine(policy="sjf"))])

    assert (lines[0].split()[-1], lines[1].split()[-1]) == ("faults", "0")
