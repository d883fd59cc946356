"""JSON as answers have it."""

from __future__ import annotations

from typing import Any

from pydantic_core import to_json
from starlette.responses import Response


class JSON(Response):
    """A value that pydantic can write; lone surrogates are escaped."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return to_json(content)
