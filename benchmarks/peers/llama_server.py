"""llama-server of the pinned llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import HOST, Url, find, free_port, serving


@contextmanager
def llama_server(
    model: Path,
    *,
    n_slots: int,
    n_ctx: int,
    threads: int,
    flags: tuple[str, ...] = (),
    poll_s: float = 0.1,
) -> Iterator[Url]:
    """
    Start it with one pool of cells for all slots, as our engine has it.

    Args:
        n_ctx: cells of all slots.
        flags: come last, so they overrule.
        poll_s: between two questions whether it is ready.
    """
    port = free_port()
    command = [
        find("llama-server"),
        *("--model", str(model)),
        *("--host", HOST, "--port", str(port)),
        *("--parallel", str(n_slots), "--ctx-size", str(n_ctx)),
        *("--threads", str(threads)),
        *("--kv-unified", "--no-ui", "--offline", "--fit", "off"),
        *flags,
    ]
    with serving(command, port, poll_s=poll_s) as url:
        yield url
