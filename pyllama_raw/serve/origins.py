"""Origins whose pages may call the service from a browser."""

from __future__ import annotations

import re
from collections.abc import Iterable

LOCALHOST = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


def pattern_of(origins: Iterable[str]) -> str:
    """A regular expression of the *origins*, for a full match."""
    return "|".join(f"(?:{_pattern(origin)})" for origin in origins)


def _pattern(origin: str) -> str:
    if origin == "localhost":
        return LOCALHOST
    if origin == "*":
        return ".*"
    return r"[^/]*".join(map(re.escape, origin.split("*")))
