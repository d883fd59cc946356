"""
Connections to one service, and the bytes of its answers.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from anyio import CancelScope, move_on_after

from pyllama_raw.errors import ConfigError, PyllamaError
from pyllama_raw.runners.answer import error_of
from pyllama_raw.runners.retries import retry_after_s
from pyllama_raw.runners.sse import EventReader
from pyllama_raw.runners.timeouts import Timeouts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import httpx2

DONE = "[DONE]"
PATIENCE_S = 1.0  # for the end of an answer that has said that it is done
MANY_CHUNKS = 64  # that may wait in buffers


class Connection:
    """A client with one key, closed when it is retired and nothing uses it."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        timeouts: Timeouts,
        transport: httpx2.AsyncBaseTransport | None,
    ) -> None:
        try:
            import httpx2
        except ImportError as error:
            said = "a RemoteRunner needs httpx2: pip install 'pyllama_raw[runners]'"
            raise ConfigError(said) from error
        self._client = httpx2.AsyncClient(
            base_url=f"{url}/",
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx2.Timeout(None, connect=timeouts.connect_s),
            transport=transport,
        )
        self._n_uses, self._is_retired = 0, False

    @asynccontextmanager
    async def leased(self) -> AsyncIterator[httpx2.AsyncClient]:
        """A block in which the client is used."""
        self._n_uses += 1
        try:
            yield self._client
        finally:
            self._n_uses -= 1
            if self._is_retired:
                await self.retire()

    async def retire(self) -> None:
        """Close once nothing uses it."""
        self._is_retired = True
        if not self._n_uses:
            await self.aclose()

    async def aclose(self) -> None:
        """Close now."""
        with CancelScope(shield=True):
            await self._client.aclose()


async def refusal(response: httpx2.Response) -> PyllamaError:
    """The error that an answer without success tells."""
    text = (await response.aread()).decode(errors="replace")
    try:
        body = json.loads(text)
    except ValueError:
        body = text
    wait_s = retry_after_s(response.headers.get("retry-after"))
    return error_of(response.status_code, body, wait_s)


async def event_data(response: httpx2.Response) -> AsyncGenerator[str, None]:
    """The data of each event of *response*, until it is done or broken off."""
    reader, chunks = EventReader(), response.aiter_bytes()
    is_done = False
    try:
        async for received in chunks:
            for event in reader.feed(received):
                is_done = is_done or event.data == DONE
                if not is_done:
                    yield event.data
            if is_done:
                break
    finally:
        await _finish(chunks, PATIENCE_S if is_done else 0.0)


async def _finish(chunks: AsyncIterator[bytes], patience_s: float) -> None:
    """
    Read on for a moment, and cancel that.

    A connection that was read to its end is used again. A read that is cancelled ends the
    generators inside httpx2, which would otherwise be left to the garbage collector.
    """
    with move_on_after(patience_s, shield=True):
        for _ in range(MANY_CHUNKS):
            try:
                await anext(chunks)
            except Exception:  # noqa: BLE001 - it is over in any case
                return
