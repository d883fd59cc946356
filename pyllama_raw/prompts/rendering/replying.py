"""The specification of replies by a chat template, which is rendered where none is bundled."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pyllama_raw.prompts.rendering.processes import (
    Exceeded,
    TemplateProcesses,
    TemplateRefused,
)
from pyllama_raw.replies.derive import spec_for
from pyllama_raw.replies.spec import ReplySpec

MAX_KNOWN = 64  # templates


@lru_cache(MAX_KNOWN)
def reply_spec(source: str) -> ReplySpec | None:
    """
    Specification for replies of the model of the template *source*, found once.

    The first call may take a second, and some for a template that exceeds its limits.

    Returns:
        None if a reply is only content.

    Raises:
        Unreadable: the template cannot be compiled.
        OSError: no process can be started.
    """
    processes = TemplateProcesses(source, {"bos_token": "", "eos_token": ""})

    def render(
        messages: list[Any],
        tools: list[Any],
        *,
        add_generation_prompt: bool,
        **variables: Any,
    ) -> str | None:
        chat = {"tools": tools, "kwargs": variables, "asks": add_generation_prompt}
        try:
            return processes.render(messages, chat)[0]
        except (Exceeded, TemplateRefused):
            return None

    try:
        return spec_for(source, render)
    finally:
        processes.close()
