"""
Roles that may speak in a chat.

Templates drop messages of roles that they do not know, or give them to a model that was
never trained for them. Both would be silent, so only known roles pass.
"""

from __future__ import annotations

import re
from typing import Any

from pyllama_raw.errors import InvalidRequest

STANDARD = ("system", "developer", "user", "assistant", "tool")


def check_roles(messages: list[Any], template: str) -> None:
    """Raise InvalidRequest if a role is not standard, and *template* does not name it."""
    others = [m["role"] for m in messages if m["role"] not in STANDARD]
    named = quoted_words(template) if others else ()
    for role in others:
        if role not in named:
            allowed = f"{', '.join(STANDARD)}, or a role that the chat template names"
            raise InvalidRequest("role", role, allowed)


def quoted_words(template: str) -> set[str]:
    """Words that the source *template* has in quotes; a marker such as "</s>" is none."""
    return {word for _, word in re.findall(r"(['\"])(\w+)\1", template)}
