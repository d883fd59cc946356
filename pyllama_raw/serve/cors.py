"""Pages of other origins that may call the service from a browser; none by default."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.datastructures import Headers

RawHeaders = list[tuple[bytes, bytes]]
EXPOSED = b"x-request-id, x-cached-tokens, retry-after"
NAMES = re.compile(r"[\w\-, ]{1,1024}", re.ASCII)


class Origins:
    """The origins that are allowed; "*" allows all. Keys are never sent by browsers alone."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(allowed)

    def headers(self, given: Headers) -> RawHeaders:
        """Headers of an answer; none if the origin is not allowed."""
        origin = given.get("origin", "")
        if not self._allowed or not origin:
            return []
        if "*" in self._allowed:
            origin = "*"
        elif origin not in self._allowed:
            return [(b"vary", b"Origin")]
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", EXPOSED),
            (b"vary", b"Origin"),
        ]

    def answers(self, method: str, given: Headers) -> bool:
        """Whether this is a question of a browser that the gate answers itself."""
        asks = "access-control-request-method" in given and "origin" in given
        return bool(self._allowed) and method == "OPTIONS" and asks

    def preflight(self, given: Headers) -> dict[str, str]:
        """Further headers of that answer."""
        names = given.get("access-control-request-headers", "")
        if not NAMES.fullmatch(names):
            names = "authorization, content-type, x-api-key, x-request-id"
        return {
            "access-control-allow-methods": "GET, POST, DELETE",
            "access-control-allow-headers": names,
            "access-control-max-age": "600",
        }
