"""
The servers among the peers as targets of pyllama_raw.lab, each started when opened.

Settings are the best that is fair: the same file, threads and cells, one pool of cells
for all slots, steps of 2,048 tokens, flash attention where the model allows it; all else
as each has it by default, its prompt cache included.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio

from pyllama_raw import EngineConfig
from pyllama_raw.lab.targets import Opener, ReadyTarget
from pyllama_raw.native.model import Model

from . import Url
from .llama_cpp_sequence import llama_cpp_sequence
from .llama_cpp_server import llama_cpp_server
from .llama_server import llama_server
from .ours import pyllama_raw_server
from .raw_client import http_target
from .xllamacpp_server import xllamacpp_server

Start = Callable[..., AbstractContextManager[Any]]


class Peer(NamedTuple):
    """How a peer is started and spoken to."""

    start: Start
    protocol: str
    knows_ignore_eos: bool = True  # else the tokens that end are forbidden by name


PEERS = {
    "llama-server": Peer(llama_server, "llama-server"),
    "xllamacpp": Peer(xllamacpp_server, "llama-server"),
    "llama-cpp-python server": Peer(llama_cpp_server, "openai", False),
    "llama-cpp-python in sequence": Peer(llama_cpp_sequence, "openai", False),
}
SERVERS = [name for name in PEERS if name != "llama-cpp-python in sequence"]


def peer_opener(
    name: str,
    model: Path,
    *,
    n_slots: int,
    n_ctx: int,
    threads: int,
    protocol: str | None = None,
    **options: Any,
) -> Opener:
    """
    What starts *name*, opens a client of it, and stops it at the end.

    Args:
        protocol: spoken instead of the peer's own.
        options: what the function that starts it takes beside these.
    """
    start = partial(
        PEERS[name].start,
        model,
        n_slots=n_slots,
        n_ctx=n_ctx,
        threads=threads,
        **options,
    )
    forbidden = () if PEERS[name].knows_ignore_eos else eog_tokens(model)
    return partial(_open, start, protocol or PEERS[name].protocol, forbidden)


def served_opener(model: Path, config: EngineConfig) -> Opener:
    """Our own server; it is none of the peers."""
    return partial(_open, partial(pyllama_raw_server, model, config), "openai", ())


def eog_tokens(model: Path) -> tuple[int, ...]:
    """Tokens of *model* that end a generation."""
    with Model.load(model, vocab_only=True) as loaded:
        return tuple(loaded.vocab.eog_tokens)


@asynccontextmanager
async def _open(
    start: Start, protocol: str, forbidden: tuple[int, ...]
) -> AsyncIterator[ReadyTarget]:
    async with running(start()) as url, http_target(url, protocol, forbidden) as target:
        yield ReadyTarget(target, url.pid)


@asynccontextmanager
async def running(server: AbstractContextManager[Url]) -> AsyncIterator[Url]:
    """Start and stop *server* beside the event loop."""
    url = await anyio.to_thread.run_sync(server.__enter__)
    try:
        yield url
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(server.__exit__, None, None, None)
