"""One request and its answer, as logs and metrics tell of them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, time
from typing import Any
from weakref import finalize

from pydantic_core import to_json
from starlette.types import Scope

from pyllama_raw.errors import ConfigError
from pyllama_raw.serve.keys import Key

LEFT = 499  # the status of a client that left before it had one


@dataclass(slots=True, eq=False)
class Exchange:
    """What became of a request so far."""

    request_id: str
    method: str = ""
    path: str = ""
    key: Key | None = None
    status: int = LEFT
    n_bytes: int = 0  # of the answer
    is_whole: bool = False  # all of it was sent
    refused: str | None = None  # the code of the error, if there was no room for it
    model: str | None = None
    n_prompt: int = 0
    n_cached: int = 0
    n_output: int = 0
    began: float = field(default_factory=monotonic)

    @classmethod
    def of(cls, scope: Scope) -> Exchange:
        """That of a request which came through the gate; else a new one."""
        state: dict[str, Any] = scope.setdefault("state", {})
        known = state.get("exchange") or cls("")
        assert isinstance(known, cls)
        return known

    @property
    def client(self) -> str:
        """The owner of the key; "" without keys."""
        return "" if self.key is None else self.key.name

    @property
    def n_tokens(self) -> int:
        """Tokens of the prompt and the output."""
        return self.n_prompt + self.n_output

    def line(self) -> dict[str, Any]:
        """The line of the access log; no text of a request is in it."""
        return {
            "time": round(time(), 3),
            "id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(monotonic() - self.began, 6),
            "bytes": self.n_bytes,
            "left": not self.is_whole,
            "model": self.model,
            "prompt_tokens": self.n_prompt,
            "cached_tokens": self.n_cached,
            "output_tokens": self.n_output,
            "client": self.client or None,
        }


class AccessLog:
    """A line of JSON for each request; "-" is the standard output."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError if it cannot be written."""
        file = Path("/dev/stdout" if path == "-" else path)
        try:
            self._file = file.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"access_log {path!r}: {error}") from error
        finalize(self, self._file.close)  # an application may be dropped at any time

    def write(self, exchange: Exchange) -> None:
        """Write one line at once; a disk that is full loses lines and no requests."""
        with suppress(OSError):
            self._file.write(to_json(exchange.line()) + b"\n")
