"""
The model's own chat template, rendered as its author tested it.

A template is the program of a stranger: it runs in a process of its own, bounded in time
and memory (`pyllama_raw/rendering`). It can refuse messages: that is an InvalidRequest.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import NamedTuple

from pyllama_raw.errors import InvalidRequest, Unsupported
from pyllama_raw.messages import Message, plain_messages
from pyllama_raw.rendering.processes import (
    Exceeded,
    Refused,
    TemplateProcesses,
    Unreadable,
)


class Rendered(NamedTuple):
    """The text of a prompt and where each of its characters came from."""

    text: str
    origins: str  # m: a message, t: the template, d: in doubt


class ChatTemplate:
    """One template, compiled by the first chat; any thread may call."""

    def __init__(self, source: str | None, *, bos_token: str, eos_token: str) -> None:
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._processes = None if source is None else TemplateProcesses(source, tokens)
        self._unreadable: str | None = None

    def render(self, messages: Sequence[Message]) -> Rendered:
        """
        The prompt that asks for the next assistant message; may take seconds.

        Raises:
            Unsupported: the model has no template, or one that Jinja cannot read.
            InvalidRequest: the template does not take these messages, or takes too
                much time or memory for them.
            ClosedError: close() was called, perhaps meanwhile.
        """
        plain = plain_messages(messages)
        if self._processes is None:
            raise Unsupported(
                "chat messages", "the model has no chat template: give a text prompt"
            )
        if self._unreadable is not None:
            raise _unreadable(self._unreadable)
        try:
            return Rendered(*self._processes.render(plain))
        except Refused as error:
            allowed = f"what the chat template takes ({error})"
            raise InvalidRequest("messages", _shown(plain), allowed) from error
        except Exceeded as error:
            allowed = f"messages with which the chat template is {error}"
            raise InvalidRequest("messages", _shown(plain), allowed) from error
        except Unreadable as error:
            self._unreadable = str(error)
            raise _unreadable(self._unreadable) from error
        except OSError as error:
            raise Unsupported(
                "chat messages",
                f"they need a process for the template, which cannot start: {error}",
            ) from error

    def close(self) -> None:
        """End what is being rendered; later calls raise ClosedError."""
        if self._processes is not None:
            self._processes.close()


def _unreadable(reason: str) -> Unsupported:
    return Unsupported(
        "chat messages", f"the model's chat template cannot be read: {reason}"
    )


def _shown(messages: list[object]) -> str:
    return reprlib.repr(messages)
