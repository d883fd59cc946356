"""
The interface for scheduling policies of your own.

    from pyllama_raw.policy import SchedulingPolicy, register

    @register
    class LastComeFirst(SchedulingPolicy):
        name = "lcfs"

        def order_key(self, request, view):
            return -request.submitted

    config = EngineConfig(scheduler=SchedulerConfig(policy="lcfs"))

A package offers policies as entry points of the group `pyllama_raw.policies`, by name. A
class that can be imported need not be registered: `policy="my_module:LastComeFirst"`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from pyllama_raw.core.policies import (
    API_VERSION,
    SHIPPED,
    Key,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
)
from pyllama_raw.errors import ConfigError, shown

__all__ = [
    "API_VERSION",
    "GROUP",
    "Key",
    "RequestView",
    "SchedulerView",
    "SchedulingPolicy",
    "make_policy",
    "policy_names",
    "register",
]

GROUP = "pyllama_raw.policies"
HOOKS = {name for name, value in vars(SchedulingPolicy).items() if callable(value)}
MODULE_AND_CLASS = re.compile(r"[\w.]+:[\w.]+")

P = TypeVar("P", bound=type[SchedulingPolicy])

_registered: dict[str, type[SchedulingPolicy]] = {}


def register(policy: P) -> P:
    """
    Make *policy* known by its name; a later class of that name takes its place.

    Raises:
        ConfigError: it is no policy, its name or API version does not fit, or a hook is misspelt.
    """
    name = _checked(policy).name
    if name in SHIPPED:
        raise ConfigError(f"{name!r} is a policy of this package: give another name")
    _registered[name] = policy
    return policy


def policy_names() -> list[str]:
    """The names that `policy=` understands here."""
    return sorted({*SHIPPED, *_registered, *_offered()})


def make_policy(name: str) -> SchedulingPolicy:
    """
    A new instance of the policy with that name.

    Raises:
        ConfigError: there is none, or it cannot be made.
    """
    if not is_known(name):
        text = f"policy {shown(name)} is not known: give {allowed_names()}"
        raise ConfigError(text)
    try:
        return (_made_here(name) or _checked(_entry(name).load()))()
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        text = (
            f"policy {name!r}: {error}. Commands look in the current folder, too; name "
            "others in the variable PYTHONPATH"
        )
        raise ConfigError(text) from error
    except Exception as error:
        raise ConfigError(f"policy {name!r} cannot be made: {error!r}") from error


def is_known(name: str) -> bool:
    """Whether make_policy() understands *name*, without an import of what it names."""
    return bool(
        _made_here(name) or MODULE_AND_CLASS.fullmatch(name) or name in _offered()
    )


def allowed_names() -> str:
    """Values that `policy=` may have, in words."""
    return f"one of {', '.join(policy_names())}, or module:Class"


def _made_here(name: str) -> type[SchedulingPolicy] | None:
    return SHIPPED.get(name) or _registered.get(name)


def _entry(name: str) -> EntryPoint:
    return _offered().get(name) or EntryPoint(name, name, GROUP)


def _offered() -> dict[str, EntryPoint]:
    """By name; looking through the installed packages takes longer than all else here."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _checked(policy: P) -> P:
    thing: object = policy  # whatever the caller says it is
    if not (isinstance(thing, type) and issubclass(thing, SchedulingPolicy)):
        raise ConfigError(f"{shown(policy)} is no subclass of SchedulingPolicy")
    name = getattr(policy, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{policy.__name__}.name={shown(name)}: give a text, which names it in tables and logs"
        )
    if policy.api_version != API_VERSION:
        raise ConfigError(
            f"policy {name!r} was written for version {shown(policy.api_version)} of the "
            f"policy API; this is version {API_VERSION}"
        )
    if policy.keys not in ("fixed", "changing", "by_client"):
        raise ConfigError(
            f"{policy.__name__}.keys={shown(policy.keys)}: give fixed, changing or by_client"
        )
    for method, hook in _misspelt(policy):
        raise ConfigError(
            f"{policy.__name__}.{method} is no hook, so nobody would call it; did you mean {hook}? "
            f"A method for yourself has another name, as _{method}"
        )
    return policy


def _misspelt(policy: type[SchedulingPolicy]) -> Iterator[tuple[str, str]]:
    """Methods that are nearly a hook which *policy* does not have: it would be `fcfs` without a word."""
    base = SchedulingPolicy
    missing = [hook for hook in HOOKS if getattr(policy, hook) is getattr(base, hook)]
    for name, value in vars(policy).items():
        if callable(value) and not name.startswith("_") and name not in HOOKS:
            for hook in get_close_matches(name, missing, n=1, cutoff=0.8):
                yield name, hook
