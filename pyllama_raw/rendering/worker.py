"""
A process that compiles one chat template and renders messages with it.

The system ends it when a template computes for too long, and refuses it memory: a single
operation in C can take hours or all of the machine, and no check in Python would run
meanwhile. It ends when whoever asks it is gone, because its input then ends.
"""

from __future__ import annotations

import resource
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pyllama_raw.rendering import frames
from pyllama_raw.rendering.limits import MAX_CHARACTERS, MAX_CPU_S, MAX_MEMORY_BYTES
from pyllama_raw.rendering.text import from_message, from_template, origins

if TYPE_CHECKING:
    from jinja2 import Template

# Templates print roles as part of their markers: "<|" + role + "|>".
ROLES = frozenset({
    "assistant", "developer", "function", "ipython", "model", "observation", "system",
    "tool", "user",
})  # fmt: skip
MAX_REASON = 500  # characters of an error message


def main() -> None:
    """Serve one template, then any number of chats, until the input ends."""
    _limit()
    source = sys.stdin.buffer
    with suppress(EOFError):
        setup = frames.read(source)
        template = _compile(setup["source"])
        tokens = {name: from_template(text) for name, text in setup["tokens"].items()}
        while template is not None:
            messages = frames.read(source)
            if not _render(template, tokens, messages):
                break


def _limit() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for limit, size in (
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):  # macOS has no limit on addresses
            resource.setrlimit(limit, (size, size))


def _compile(source: str) -> Template | None:
    _start_clock()
    try:
        from pyllama_raw.rendering.environment import TextEnvironment

        template: Template = TextEnvironment().from_string(source)
    except Exception as error:  # noqa: BLE001 - Jinja and Python raise many kinds
        _answer({"unreadable": _reason(error)})
        return None
    _answer({"compiled": True})
    return template


def _render(template: Template, tokens: dict[str, Any], messages: list[Any]) -> bool:
    """Answer; whether another chat may be rendered here."""
    is_too_large = False
    answer: dict[str, Any] = {}
    _start_clock()
    try:
        text = template.render(
            messages=[_lifted_message(message) for message in messages],
            add_generation_prompt=True,
            tools=None,
            documents=None,
            **tokens,
        )
        answer = {"text": text, "origins": origins(text)}
        is_too_large = len(text) > MAX_CHARACTERS
    except MemoryError:
        is_too_large = True
    except Exception as error:  # noqa: BLE001 - templates are programs of strangers
        answer = {"refused": _reason(error)}
    _answer({"too_large": True} if is_too_large else answer)
    return not is_too_large


def _start_clock() -> None:
    """From now on the process may compute for MAX_CPU_S."""
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)


def _answer(answer: dict[str, Any]) -> None:
    frames.write(sys.stdout.buffer, answer)
    signal.setitimer(signal.ITIMER_PROF, 0)


def _lifted_message(message: Any) -> Any:
    lifted = _lifted(message)
    if isinstance(message, dict) and message.get("role") in ROLES:
        lifted["role"] = from_template(message["role"])
    return lifted


def _lifted(value: Any) -> Any:
    """*value* with Text of a message in place of strings, keys included."""
    if isinstance(value, str):
        return from_message(value)
    if isinstance(value, dict):
        return {from_message(key): _lifted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_lifted(item) for item in value]
    return value


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:MAX_REASON]
