"""Whether a chat template prints tools, found out once for all engines."""

from __future__ import annotations

from functools import lru_cache

from pyllama_raw.prompts.rendering.processes import (
    Exceeded,
    TemplateProcesses,
    Unreadable,
)

MAX_KNOWN = 64  # templates


@lru_cache(MAX_KNOWN)
def prints_tools(source: str) -> bool:
    """
    Whether the template *source* prints tools; also where it does not let itself be asked.

    The first call takes a tenth of a second, and 1 s at most.

    Raises:
        Unreadable: the template cannot be compiled.
        OSError: no process can be started.
    """
    processes = TemplateProcesses(source, {"bos_token": "", "eos_token": ""})
    try:
        return processes.takes_tools()
    except Exceeded:
        return True
    finally:
        processes.close()


def are_printed(template: str | None) -> bool:
    """Whether tools are printed by *template*, which may be none, or no template."""
    try:
        return template is not None and prints_tools(template)
    except Unreadable:
        return False
