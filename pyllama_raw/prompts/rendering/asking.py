"""Questions to a chat template: it is rendered once for all engines."""

from __future__ import annotations

from contextlib import closing, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pyllama_raw.prompts.rendering.here import TemplateHere
from pyllama_raw.prompts.rendering.processes import (
    Exceeded,
    TemplateProcesses,
    TemplateRefused,
    Unreadable,
)

if TYPE_CHECKING:
    from pyllama_raw.replies.spec import ReplySpec

MAX_KNOWN = 64  # templates
BLIND = (
    "the chat template prints nothing of what the messages say, so all chats would have the "
    "same prompt"
)
SEEING = (  # what to do about it
    "print the `content` of each of `messages` in it, or give another template, such as "
    "'chatml', by chat_template= or ModelConfig.chat_template"
)
NO_TOKENS = {"bos_token": "", "eos_token": ""}


@lru_cache(MAX_KNOWN)
def prints_tools(source: str, is_apart: bool = True) -> bool:
    """
    Whether the template *source* prints tools; also where it does not let itself be asked.

    The first call takes a tenth of a second, and 1 s at most.

    Args:
        is_apart: whether it runs in a process of its own.

    Raises:
        Unreadable: the template cannot be compiled.
        OSError: no process can be started.
    """
    make = TemplateProcesses if is_apart else TemplateHere
    with closing(make(source, NO_TOKENS)) as runner:
        try:
            return runner.takes_tools()
        except Exceeded:
            return True


def are_printed(template: str | None, is_apart: bool = True) -> bool:
    """Whether tools are printed by *template*, which may be none, or not to be used."""
    try:
        return template is not None and prints_tools(template, is_apart)
    except (Unreadable, OSError):
        return False


@lru_cache(MAX_KNOWN)
def check_reads(source: str, is_apart: bool = True) -> None:
    """
    Check that the template *source* prints what a user says; takes a tenth of a second.

    Raises:
        Unreadable: it does not, or it cannot be compiled.
        OSError: no process can be started.
    """
    make = TemplateProcesses if is_apart else TemplateHere
    with closing(make(source, NO_TOKENS)) as runner:
        with suppress(Exceeded):
            runner.takes_tools()
        if not runner.reads_messages:
            raise Unreadable(f"{BLIND}: {SEEING}")


@lru_cache(MAX_KNOWN)
def reply_spec(source: str, is_apart: bool = True) -> ReplySpec | None:
    """
    Specification for replies of the model of the template *source*, found once.

    The first call may take a second, and some for a template that exceeds its limits.

    Args:
        is_apart: whether it runs in a process of its own.

    Returns:
        None if a reply is only content.

    Raises:
        Unreadable: the template cannot be compiled.
        OSError: no process can be started.
    """
    from pyllama_raw.replies.derive import spec_for  # a model loads without pydantic

    def render(
        messages: list[Any],
        tools: list[Any],
        *,
        add_generation_prompt: bool,
        **variables: Any,
    ) -> str | None:
        chat = {"tools": tools, "kwargs": variables, "asks": add_generation_prompt}
        try:
            return runner.render(messages, chat)[0]
        except (Exceeded, TemplateRefused):
            return None

    make = TemplateProcesses if is_apart else TemplateHere
    with closing(make(source, NO_TOKENS)) as runner:
        return spec_for(source, render)
