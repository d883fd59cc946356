"""
A process that compiles one chat template and renders messages with it.

Rules:
1. The system ends the process when a template computes for too long, and limits its memory. A
   single operation in C can take hours or all of the machine, and no check in Python would run
   meanwhile.
2. The process ends with the one that asks it, because its input then ends.
3. Both sides send a line of JSON for each message. The process runs a stranger's program, and
   JSON can only make values.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO

from pyllama_raw.prompts.messages import MAX_CHARACTERS

if TYPE_CHECKING:
    from pyllama_raw.prompts.rendering.template import CompiledTemplate

MAX_CPU_S = 1.0  # others wait for as long: most chats take milliseconds
MAX_MEMORY_BYTES = 2**29
MAX_FRAME_BYTES = 2**28
MAX_REASON = 500  # characters of an error message


def main() -> None:
    """
    Serve one template, then any number of chats, until the input ends.

    A chat is a list: options of render() and messages, or None to hear of tools.
    """
    _limit()
    source = sys.stdin.buffer
    with suppress(EOFError):
        setup = read_frame(source)
        max_cpu_s = setup.pop("max_cpu_s")
        _start_clock(max_cpu_s)
        template = _compile(**setup)
        if template is not None:
            _start_clock(max_cpu_s)
            _answer({"compiled": True, "reads_messages": template.reads_messages})
        while template is not None:
            chat, *messages = read_frame(source)
            _start_clock(max_cpu_s)
            if chat is None:
                _answer({"takes_tools": template.takes.tools})
            elif not _render(template, messages, chat):
                break


def _limit() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for limit, size in (
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):  # macOS has no limit on addresses
            resource.setrlimit(limit, (size, size))


def _compile(source: str, tokens: dict[str, str]) -> CompiledTemplate | None:
    try:
        from pyllama_raw.prompts.rendering.template import CompiledTemplate

        return CompiledTemplate(source, tokens)
    except Exception as error:  # noqa: BLE001 - Jinja and Python raise many kinds
        _answer({"unreadable": _reason(error)})
        return None


def _render(
    template: CompiledTemplate, messages: list[Any], chat: dict[str, Any]
) -> bool:
    """Answer; whether another chat may be rendered here."""
    try:
        text, origins = template.render(messages, **chat)
    except MemoryError:
        _answer({"too_large": True})
    except Exception as error:  # noqa: BLE001 - templates are programs of strangers
        _answer({"refused": _reason(error)})
        return True
    else:
        if len(text) <= MAX_CHARACTERS:
            answer = {"text": text, "origins": origins}
            _answer(answer | ({"mended": template.mended} if template.mended else {}))
            return True
        _answer({"too_large": True})
    return False


def _start_clock(max_cpu_s: float) -> None:
    """Let the process compute for *max_cpu_s* from now until it answers."""
    signal.setitimer(signal.ITIMER_PROF, max_cpu_s)


def _answer(answer: dict[str, Any]) -> None:
    write_frame(sys.stdout.buffer, answer)
    signal.setitimer(signal.ITIMER_PROF, 0)


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:MAX_REASON]


# -- messages between both processes -----------------------------------------------------


def write_frame(file: BinaryIO, value: Any) -> None:
    """
    Send *value*.

    Raises:
        ValueError: it is larger than a frame, or no JSON.
    """
    # In parts, because no other thread runs while dumps() makes one.
    data = "".join(json.JSONEncoder().iterencode(value)).encode()
    if len(data) >= MAX_FRAME_BYTES:
        raise ValueError(f"{len(data)} bytes are more than {MAX_FRAME_BYTES}")
    file.write(data + b"\n")
    file.flush()


def read_frame(file: BinaryIO) -> Any:
    """
    The next value.

    Raises:
        EOFError: the other side has ended.
    """
    line = file.readline(MAX_FRAME_BYTES)
    if not line.endswith(b"\n"):
        raise EOFError
    return json.loads(line)
