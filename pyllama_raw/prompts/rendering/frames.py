"""
Messages between our process and that of a template: JSON after its length.

The other process runs a stranger's program. JSON is read because it can only make values.
"""

from __future__ import annotations

import json
from typing import Any, BinaryIO

MAX_FRAME_BYTES = 2**28
N_LENGTH_BYTES = 4


def write(file: BinaryIO, value: Any) -> None:
    """
    Send *value*.

    Raises:
        ValueError: it is larger than a frame, or no JSON.
    """
    data = _text(value).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"{len(data)} bytes are more than {MAX_FRAME_BYTES}")
    file.write(len(data).to_bytes(N_LENGTH_BYTES) + data)
    file.flush()


def _text(value: Any) -> str:
    """JSON in parts, because no other thread runs while dumps() makes one."""
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, dict):
        items = (f"{json.dumps(key)}:{_text(item)}" for key, item in value.items())
        return f"{{{','.join(items)}}}"
    return json.dumps(value)


def read(file: BinaryIO) -> Any:
    """
    The next value.

    Raises:
        EOFError: the other side has ended.
    """
    n_bytes = int.from_bytes(_exactly(file, N_LENGTH_BYTES))
    if n_bytes > MAX_FRAME_BYTES:
        raise EOFError
    return json.loads(_exactly(file, n_bytes))


def _exactly(file: BinaryIO, n_bytes: int) -> bytes:
    data = file.read(n_bytes)
    if len(data) < n_bytes:
        raise EOFError
    return data
