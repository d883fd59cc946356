"""Bodies, read before the application sees them: within a time, and counted on the way."""

from __future__ import annotations

from collections.abc import Mapping

from anyio import move_on_after
from starlette.types import Message, Receive

from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import Failure

CLOSE = {"connection": "close"}  # what is left of the body is not read
SMALL = 2**14  # bytes
LINGER_S, LINGER_BYTES = 1.0, 2**23  # for the rest of a body that is refused
MANY = 4  # times the largest body: that all may have which are being read


class Bodies:
    """The bodies that are being read."""

    def __init__(self, config: ServeConfig) -> None:
        self._most, self._limit_s = config.max_body_bytes, config.body_s
        self._n_bytes = 0  # of all

    def check(self, length: str) -> None:
        """Raise Failure if a body of the *length* that its header tells is too large."""
        if length.isdecimal() and int(length) > self._most:
            raise self._too_large(f"has {length} bytes")

    async def read(self, receive: Receive) -> bytes | None:
        """
        The whole body; None: the client left.

        Raises:
            Failure: it is too large or too slow, or others fill the memory.
        """
        parts: list[bytes] = []
        n_bytes = 0
        try:
            with move_on_after(self._limit_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    n_bytes += len(parts[-1])
                    self._n_bytes += len(parts[-1])
                    if n_bytes > self._most:
                        raise self._too_large("has more")
                    if not message.get("more_body", False):
                        return b"".join(parts)
                    if self._n_bytes > MANY * self._most:
                        told = "other bodies take all the memory for them: try again"
                        raise Failure(503, "server_is_overloaded", told, headers=CLOSE)
        finally:
            self._n_bytes -= n_bytes
        told = f"the body did not come within {self._limit_s:g} s"
        raise Failure(408, "body_timeout", told, headers=CLOSE)

    def _too_large(self, size: str) -> Failure:
        message = f"the body {size}: at most {self._most} bytes are allowed"
        return Failure(413, "body_too_large", message, headers=CLOSE)


def is_small(given: Mapping[str, str]) -> bool:
    """Whether a body comes with the head of its request, as far as the head tells."""
    length = given.get("content-length", "")
    chunked = "transfer-encoding" in given
    return not chunked and (not length or (length.isdecimal() and int(length) <= SMALL))


async def let_go(receive: Receive) -> None:
    """
    Pass over a body that nobody reads, for a while.

    A connection that is closed while its client still sends is reset, and an answer that is
    on its way may be lost.
    """
    n_bytes = 0
    with move_on_after(LINGER_S):
        while n_bytes < LINGER_BYTES:
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if not message.get("more_body", False):
                return


def replayed(body: bytes, receive: Receive) -> Receive:
    """As *receive*, whose body was read: it comes again, in one piece."""
    is_read = False

    async def again() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
