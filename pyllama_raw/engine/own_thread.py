"""
The threads that engines run in, which must not wait for an engine.

Hooks of policies, watchers and step logs run there. What they wait for comes when they have
returned, or when another such thread has.
"""

from __future__ import annotations

from threading import Thread, current_thread

from pyllama_raw.errors import WrongUse


class OwnThread(Thread):
    """Runs an engine."""


def check_may_wait() -> None:
    """Raise WrongUse in the thread of an engine."""
    if isinstance(current_thread(), OwnThread):
        raise WrongUse(
            "a hook, a watcher or a step log called an engine, which would wait for its "
            "return for ever: let another thread call"
        )
