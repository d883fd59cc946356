"""The access log: a line of JSON for each request, without text and without keys."""

from __future__ import annotations

from pathlib import Path

from pydantic_core import to_json

from pyllama_raw.errors import ConfigError
from pyllama_raw.serve.exchange import Exchange


class AccessLog:
    """Appends to a file, or writes to the standard output."""

    def __init__(self, path: str) -> None:
        """
        Args:
            path: of the file; "-" is the standard output.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            file = "/dev/stdout" if path == "-" else path
            self._file = Path(file).open("ab", buffering=0)  # noqa: SIM115 - it stays open
        except OSError as error:
            raise ConfigError(f"the access log cannot be written: {error}") from error

    def write(self, exchange: Exchange) -> None:
        """Write one line at once; a disk that is full loses lines and no requests."""
        try:
            self._file.write(to_json(exchange.line()) + b"\n")
        except OSError:
            return
