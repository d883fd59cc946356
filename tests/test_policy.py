"""Policies by name: those of the package, of this process, and of other packages."""

import ast
import logging
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyllama_raw import ConfigError, SchedulerConfig, policy
from pyllama_raw.core.policy_runner import PolicyFault
from pyllama_raw.engine.watcher import PolicyLog
from pyllama_raw.policy import (
    SchedulerView,
    SchedulingPolicy,
    make_policy,
    policy_names,
    register,
)
from tests.core.policies.support import waiting

SHIPPED = ["edf", "fcfs", "hrrn", "lpm", "priority", "sjf", "spf", "vtc"]


class Last(SchedulingPolicy):
    name = "last"

    def order_key(self, request, view):
        return -request.submitted


class Old(Last):
    name = "old"
    api_version = 0


class Broken(Last):
    name = "broken"

    def __init__(self):
        raise KeyError("missing")


@pytest.fixture(autouse=True)
def offers(monkeypatch):
    """What packages on this machine offer; nothing is registered."""
    values = {"offered": "Last", "outdated": "Old", "gone": "Gone", "lost": "Broken"}
    monkeypatch.setitem(sys.modules, "offering", SimpleNamespace(**globals()))
    found = [EntryPoint(k, f"offering:{v}", policy.GROUP) for k, v in values.items()]
    monkeypatch.setattr(policy, "entry_points", lambda group: found)
    monkeypatch.setattr(policy, "_registered", {})


def test_shipped_policies_are_known():
    """
    Every shipped name makes a new instance of its class, also through the configuration.
    """
    made = [make_policy(name) for name in SHIPPED]

    assert [made.name for made in made] == SHIPPED
    assert make_policy("vtc") is not make_policy("vtc")
    assert [SchedulerConfig(policy=name).policy for name in SHIPPED] == SHIPPED


def test_a_shipped_policy_needs_no_other_packages(monkeypatch):
    """
    Nobody looks through the installed packages for it, because that takes long at the start.
    """
    looks = []
    monkeypatch.setattr(policy, "entry_points", lambda group: looks.append(group) or [])

    make_policy("fcfs")
    SchedulerConfig(policy="fcfs")

    assert looks == []


def test_a_registered_policy_has_a_name():
    """
    A class is found by its name; the same name again replaces it, as in a notebook.
    """

    class Later(Last):
        pass

    assert register(Last) is Last
    assert type(make_policy("last")) is Last
    register(Later)
    assert type(make_policy("last")) is Later
    assert SchedulerConfig(policy="last").policy == "last"


def test_a_hook_that_is_misspelt_is_named():
    """
    Nobody would call it, and figures of the policy would be those of `fcfs`.
    """

    class Slip(SchedulingPolicy):
        name = "slip"

        def orderkey(self, request, view):
            return -request.submitted

    class Helped(Last):
        name = "helped"

        def order_keys(self):
            return ()

    with pytest.raises(
        ConfigError, match=r"Slip\.orderkey is no hook.*did you mean order_key\?"
    ):
        register(Slip)
    assert register(Helped) is Helped


def test_packages_offer_policies():
    """
    An entry point is known by its name and is only imported when it is wanted.
    """
    assert type(make_policy("offered")) is Last
    assert policy_names() == sorted([*SHIPPED, "offered", "outdated", "gone", "lost"])


def test_a_class_is_found_where_it_is():
    """
    A module and a class need no registration; nothing is imported before it is wanted.
    """
    assert type(make_policy("offering:Last")) is Last
    assert SchedulerConfig(policy="nowhere:Last").policy == "nowhere:Last"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sfj", "policy 'sfj' is not known: give one of edf, fcfs, gone, hrrn"),
        ("outdated", "was written for version 0 of the policy API; this is version 1"),
        ("gone", "policy 'gone' cannot be made: AttributeError"),
        (
            "nowhere:Last",
            "policy 'nowhere:Last': No module named 'nowhere'. Commands look in the current folder",
        ),
        ("offering:logging", "is no subclass of SchedulingPolicy"),
        ("lost", "policy 'lost' cannot be made: KeyError"),
    ],
)
def test_a_policy_that_cannot_be_had_is_named(name, words):
    """
    The error says which policy, and why.
    """
    with pytest.raises(ConfigError, match=words):
        make_policy(name)


def test_the_configuration_refuses_unknown_names():
    """
    The error names the option and lists what there is.
    """
    with pytest.raises(
        ConfigError, match=r"SchedulerConfig.policy='sfj': give one of edf"
    ):
        SchedulerConfig(policy="sfj")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "fcfs"}, "is a policy of this package"),
        ({"name": ""}, "name='': give a text"),
        ({"name": 3}, "name=3: give a text"),
        ({"name": "x", "api_version": 2}, "for version 2 of the policy API"),
        ({"name": "x", "keys": "always"}, "keys='always': give fixed, changing or"),
    ],
)
def test_a_class_that_does_not_fit_is_refused(fields, words):
    """
    The error says what is wrong with the class.
    """
    with pytest.raises(ConfigError, match=words):
        register(type("Wrong", (SchedulingPolicy,), fields))


@pytest.mark.parametrize("thing", [object, Last(), 3])
def test_only_policies_are_registered(thing):
    """
    A class that is no SchedulingPolicy, or an instance of one, is refused.
    """
    with pytest.raises(ConfigError, match="is no subclass of SchedulingPolicy"):
        register(thing)


def test_the_tutorial_needs_twenty_lines_and_one_import():
    """
    The policy of the example runs with nothing but what pyllama_raw.policy offers.
    """
    source = (Path(__file__).parents[1] / "examples" / "policy.py").read_text()
    tree = ast.parse(source)
    (node,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    lines = source.splitlines()[node.decorator_list[0].lineno - 1 : node.end_lineno]
    code = "\n".join(["from pyllama_raw.policy import *", *lines])

    exec(code, found := {})  # noqa: S102 - it is ours
    view = waiting(0, 5.0, n_prompt=100)
    key = found["ShortPrompts"]().order_key(view, SchedulerView())

    assert len(code.splitlines()) <= 20
    assert (key, policy_names()[-1]) == (11.0, "vtc")
    assert type(make_policy("short_prompts")) is found["ShortPrompts"]


def test_faults_are_logged_once_and_then_now_and_then(caplog):
    """
    The log names the policy and the hook, with the traceback, at a bounded rate.
    """
    log = PolicyLog()
    with caplog.at_level(logging.ERROR):
        for _ in range(1500):
            log(PolicyFault("mine", "order_key", ValueError("boom")))
        log(PolicyFault("mine", "victim_key", ValueError("boom")))

    said = "policy mine: {} failed {} times; the scheduler goes on without its answer"
    assert [record.getMessage() for record in caplog.records] == [
        said.format("order_key", 1),
        said.format("order_key", 1001),
        said.format("victim_key", 1),
    ]
    assert all(record.exc_info for record in caplog.records)
