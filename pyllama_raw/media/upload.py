"""The bytes of an upload as its decoder reads them: within bounds, and until it is stopped."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

from pyllama_raw.errors import BadMedia

Stop = Callable[[], bool]


class DecodeStopped(Exception):
    """Nobody wants what is decoded any more."""


def never() -> bool:
    """Decode to the end."""
    return False


class Upload(BytesIO):
    """
    A file in memory.

    Args:
        max_reads: calls that read or seek; what is in millions of tiny parts takes a
            decoder seconds, and is no image or sound of anybody.
        stop: whether to end soon.

    Raises, from read():
        BadMedia: it takes more reads.
        DecodeStopped: *stop* says so.
    """

    def __init__(self, content: bytes, max_reads: int, stop: Stop = never) -> None:
        super().__init__(content)
        self._n_left, self._stop = max_reads, stop

    def read(self, size: int | None = -1, /) -> bytes:
        if self._stop():
            raise DecodeStopped
        if not self._spend():
            raise BadMedia("it has too many parts: save it anew")
        return super().read(size)

    def readinto(self, buffer: Any, /) -> int:
        """Read as read() does, but end where read() raises, because C calls it."""
        return super().readinto(buffer) if self._spend() else 0

    def _spend(self) -> bool:
        self._n_left -= 1
        return self._n_left >= 0
