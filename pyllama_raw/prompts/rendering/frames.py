"""
Messages between our process and that of a template: a line of JSON each.

The other process runs a stranger's program. JSON is read because it can only make values.
"""

from __future__ import annotations

import json
from typing import Any, BinaryIO

MAX_FRAME_BYTES = 2**28


def write(file: BinaryIO, value: Any) -> None:
    """
    Send *value*.

    Raises:
        ValueError: it is larger than a frame, or no JSON.
    """
    # In parts, because no other thread runs while dumps() makes one.
    data = "".join(json.JSONEncoder().iterencode(value)).encode()
    if len(data) >= MAX_FRAME_BYTES:
        raise ValueError(f"{len(data)} bytes are more than {MAX_FRAME_BYTES}")
    file.write(data + b"\n")
    file.flush()


def read(file: BinaryIO) -> Any:
    """
    The next value.

    Raises:
        EOFError: the other side has ended.
    """
    line = file.readline(MAX_FRAME_BYTES)
    if not line.endswith(b"\n"):
        raise EOFError
    return json.loads(line)
