"""
A chat template that runs in this process, for those whose author the caller trusts.

It is for programs that cannot start a Python, as frozen applications. Time and the length of the
prompt are limited; memory is not, and one long operation in C is not ended.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from time import thread_time
from types import FrameType
from typing import TYPE_CHECKING, Any

from pyllama_raw.errors import ClosedError
from pyllama_raw.prompts.rendering.limits import MAX_CHARACTERS, MAX_CPU_S
from pyllama_raw.prompts.rendering.processes import (
    Exceeded,
    TemplateRefused,
    Unreadable,
)

if TYPE_CHECKING:
    from pyllama_raw.prompts.rendering.template import CompiledTemplate


class _OutOfTime(BaseException):
    """The template has computed for too long; no handler of errors in it sees this."""


class TemplateHere:
    """As TemplateProcesses, without a process; any thread may call, one at a time renders."""

    def __init__(
        self, source: str, tokens: dict[str, str], max_cpu_s: float = MAX_CPU_S
    ) -> None:
        self._source, self._tokens, self._max_cpu_s = source, tokens, max_cpu_s
        self._template: CompiledTemplate | None = None
        self._lock = Lock()
        self._closed = False
        self.n_mended = 0
        self.reads_messages = True  # whether its prompts say anything of a chat

    def render(
        self, messages: list[Any], chat: dict[str, Any] | None = None
    ) -> tuple[str, str]:
        """The text and its origins; raises as TemplateProcesses.render()."""
        with self._running() as template:
            try:
                text, origins = template.render(messages, **(chat or {}))
            except Exception as error:
                reason = str(error) or type(error).__name__
                raise TemplateRefused(reason) from error
            self.n_mended += bool(template.mended)
        if len(text) > MAX_CHARACTERS:
            allowed = f"a prompt of at most {MAX_CHARACTERS} characters"
            raise Exceeded(f"done with {allowed}")
        return text, origins

    def takes_tools(self) -> bool:
        """Whether the template prints tools; raises as render()."""
        with self._running() as template:
            return template.takes.tools

    def close(self) -> None:
        """render() raises ClosedError from then on; what is being rendered goes on."""
        self._closed = True

    @contextmanager
    def _running(self) -> Iterator[CompiledTemplate]:
        """The template, while time is limited."""
        with self._lock:
            if self._closed:
                raise ClosedError("the engine is closed")
            try:
                with _limited(self._max_cpu_s):
                    yield self._template or self._compiled()
            except _OutOfTime:
                text = f"done within {self._max_cpu_s:g} s of CPU time"
                raise Exceeded(text) from None

    def _compiled(self) -> CompiledTemplate:
        try:
            from pyllama_raw.prompts.rendering.template import CompiledTemplate

            self._template = CompiledTemplate(self._source, self._tokens)
            self.reads_messages = self._template.reads_messages
        except Exception as error:
            raise Unreadable(str(error) or type(error).__name__) from error
        return self._template


@contextmanager
def _limited(max_cpu_s: float) -> Iterator[None]:
    """Raise _OutOfTime in this thread at a line of Python behind *max_cpu_s* of its time."""
    until = thread_time() + max_cpu_s

    def trace(_frame: FrameType, _event: str, _arg: object) -> Any:
        if thread_time() > until:
            raise _OutOfTime
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(earlier)
