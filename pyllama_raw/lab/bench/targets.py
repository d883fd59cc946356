"""Targets as people name them: engine, openai=URL, llama-server=URL."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from pyllama_raw.api.engine import AsyncEngine
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.bench.engine_target import EngineTarget
from pyllama_raw.lab.bench.http_target import http_target
from pyllama_raw.lab.bench.rounds import Opener, ReadyTarget
from pyllama_raw.options.config import EngineConfig

PROTOCOLS = ("openai", "llama-server")


def opener(spec: str, model: Path, config: EngineConfig) -> Opener:
    """
    Raises:
        ConfigError: *spec* names no target.
    """
    if spec == "engine":
        return partial(open_engine, model, config)
    protocol, _, url = spec.partition("=")
    if protocol not in PROTOCOLS or not url.startswith(("http://", "https://")):
        raise ConfigError(f"target={spec!r}: give engine, openai=URL, llama-server=URL")
    return partial(open_server, url, protocol)


@asynccontextmanager
async def open_engine(model: Path, config: EngineConfig) -> AsyncIterator[ReadyTarget]:
    """Our engine in this process."""
    async with AsyncEngine.open(model, config) as engine:
        yield ReadyTarget(EngineTarget(engine), os.getpid())


@asynccontextmanager
async def open_server(url: str, protocol: str) -> AsyncIterator[ReadyTarget]:
    """A server that runs already; see http_target."""
    async with http_target(url.rstrip("/"), protocol) as target:
        yield ReadyTarget(target)
