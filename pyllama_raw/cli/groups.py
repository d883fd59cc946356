"""Commands that run on an event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from pyllama_raw.errors import first_of

T = TypeVar("T")


def run(main: Callable[[], Awaitable[T]], *, use_uvloop: bool = False) -> T:
    """Run *main*; of a group of errors the first is raised: what a person is told."""
    try:
        return anyio.run(main, backend_options={"use_uvloop": use_uvloop})
    except BaseExceptionGroup as group:
        raise first_of(group) from None
