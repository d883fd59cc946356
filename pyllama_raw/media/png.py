"""PNG: a signature, then chunks; the pixels are packed by zlib in chunks named IDAT."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from pyllama_raw.errors import BadMedia

_HEAD = struct.Struct(
    ">IIBBBBB"
)  # width, height, depth, colour, packing, filter, order
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PASSES = (  # of an interlaced image: first column and row, steps between them
    (0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2),
    (0, 1, 1, 2),
)  # fmt: skip
_AT_ONCE = 2**20


def size(content: bytes) -> tuple[int, int]:
    """Width and height. Raises BadMedia."""
    width, height, *_ = _header(content)
    return width, height


def check_whole(content: bytes) -> None:
    """Raise BadMedia unless there are as many packed bytes as the size asks for."""
    width, height, depth, colour, _, _, order = _header(content)
    if colour not in _CHANNELS or depth not in (1, 2, 4, 8, 16):
        raise BadMedia(f"a PNG of the colour type {colour} with {depth} bits")
    bits = depth * _CHANNELS[colour]
    wanted = sum(
        n_rows * (1 + -(-n_columns * bits // 8))
        for n_columns, n_rows in _parts(width, height, order)
        if n_columns
    )
    found = _n_unpacked(content, wanted)
    if found != wanted:
        more = "more" if found > wanted else f"{found}"
        raise BadMedia(f"the pixels of the PNG take {wanted} bytes, it has {more}")


def _header(content: bytes) -> tuple[int, ...]:
    if content[8:16] != b"\0\0\0\rIHDR" or len(content) < 33:
        raise BadMedia("a PNG without its header")
    return _HEAD.unpack_from(content, 16)


def _parts(width: int, height: int, order: int) -> Iterator[tuple[int, int]]:
    """Columns and rows of the images that follow each other."""
    if not order:
        yield width, height
        return
    for column, row, step_x, step_y in _PASSES:
        yield -(-(width - column) // step_x), max(-(-(height - row) // step_y), 0)


def _n_unpacked(content: bytes, limit: int) -> int:
    """Bytes that the chunks unpack to; counting ends behind *limit*."""
    unpacker, count = zlib.decompressobj(), 0
    try:
        for part in _packed(content):
            left = part
            while left and count <= limit:
                count += len(unpacker.decompress(left, _AT_ONCE))
                left = unpacker.unconsumed_tail
    except zlib.error as error:
        raise BadMedia(f"a damaged PNG: {error}") from None
    if count <= limit and not unpacker.eof:
        raise BadMedia("the end of the PNG is missing")
    return count


def _packed(content: bytes) -> Iterator[bytes]:
    """The content of the chunks named IDAT."""
    at = 8
    while at + 12 <= len(content):
        length, name = struct.unpack_from(">I4s", content, at)
        if name == b"acTL":
            raise BadMedia("a PNG of several frames: give one of them")
        if name == b"IEND":
            return
        data = content[at + 8 : at + 8 + length]
        if len(data) < length:
            break
        if name == b"IDAT":
            yield data
        at += 12 + length
    raise BadMedia("the end of the PNG is missing")
