"""Origins whose pages may call the service from a browser."""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

LOCALHOST = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


class Origins(CORSMiddleware):
    """Says yes to a browser by headers, and no by leaving them out: 200 is either."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a browser's question."""
        answer = super().preflight_response(request_headers)
        answer.status_code = 200
        return answer


def pattern_of(origins: Iterable[str]) -> str:
    """A regular expression of the *origins*, for a full match."""
    return "|".join(f"(?:{_pattern(origin)})" for origin in origins)


def _pattern(origin: str) -> str:
    if origin == "localhost":
        return LOCALHOST
    if origin == "*":
        return ".*"
    return r"[^/]*".join(map(re.escape, origin.split("*")))
