"""What can be known of a model file before libllama opens it: cheap and well worded."""

from __future__ import annotations

import struct
from pathlib import Path

from pyllama_raw.errors import ModelLoadFailed

# magic, version, number of tensors, number of metadata pairs
_HEADER = struct.Struct("<4sIqq")
_MIN_PAIR_BYTES = 8 + 4 + 1  # key length, type, smallest value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # name length, dimensions, one size, type, offset


def check_gguf(path: str) -> None:
    """Raise ModelLoadFailed unless *path* is a file that starts as a GGUF file does."""
    if "\0" in path:
        raise ModelLoadFailed(path.replace("\0", "\\0"), "the path contains a NUL")
    file = Path(path)
    try:
        size = file.stat().st_size
        if file.is_dir():
            raise ModelLoadFailed(path, "this is a directory")
        with file.open("rb") as stream:
            head = stream.read(_HEADER.size)
    except OSError as error:
        raise ModelLoadFailed(path, error.strerror or str(error)) from error
    problem = _problem(head, size)
    if problem is not None:
        raise ModelLoadFailed(path, problem)


def _problem(head: bytes, size: int) -> str | None:
    if not head:
        return "the file is empty"
    if head[:4] != b"GGUF":
        return f"not a GGUF file, it starts with {head[:4]!r}"
    if len(head) < _HEADER.size:
        return f"the header is cut off after {len(head)} bytes"
    _, version, n_tensors, n_pairs = _HEADER.unpack(head)
    if version == 0 or version > 0xFFFF:
        return f"GGUF version {version} cannot be read here"
    least = n_tensors * _MIN_TENSOR_BYTES + n_pairs * _MIN_PAIR_BYTES
    if min(n_tensors, n_pairs) < 0 or least > size:
        return (
            f"damaged header: {n_tensors} tensors and {n_pairs} metadata entries "
            f"do not fit {size} bytes"
        )
    return None
