"""llama-server of the pinned llama.cpp."""

from __future__ import annotations

import json
import urllib.request
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from . import HOST, Url, find, free_port, serving

TIMEOUT_S = 600.0  # of one completion


@contextmanager
def llama_server(
    model: Path,
    *,
    n_slots: int,
    n_ctx: int,
    threads: int,
    flags: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    poll_s: float = 0.1,
) -> Iterator[Url]:
    """
    Start it with one pool of cells for all slots, as our engine has it.

    Args:
        n_ctx: cells of all slots.
        flags: come last, so they overrule.
        env: variables beside those of this process.
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
    with serving(command, port, env=env, poll_s=poll_s) as url:
        yield url


def completed(url: str, body: Mapping[str, Any]) -> list[int]:
    """The tokens that /completion of the server at *url* answers with."""
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(  # noqa: S310
        f"{url}/completion", json.dumps(body).encode(), kind
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
        tokens: list[int] = json.load(answer)["tokens"]
    return tokens


def optional_server(
    options: Namespace, *, n_slots: int, n_ctx: int
) -> AbstractContextManager[Url | None]:
    """The address of one beside our engine; None with --no-peers."""
    if options.no_peers:
        return nullcontext()
    return llama_server(
        options.model, n_slots=n_slots, n_ctx=n_ctx, threads=options.threads
    )
