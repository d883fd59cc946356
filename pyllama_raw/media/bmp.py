"""BMP: two headers, then rows of pixels, each padded to 4 bytes."""

from __future__ import annotations

import struct

from pyllama_raw.errors import BadMedia

_OLD_HEADER = 12  # bytes of the first version of the second header


def size(content: bytes) -> tuple[int, int]:
    """Width and height. Raises BadMedia, also if rows are missing."""
    if len(content) < 30:
        raise BadMedia("a BMP without its header")
    begin, n_header = struct.unpack_from("<II", content, 10)
    form = "<HHHH" if n_header == _OLD_HEADER else "<iiHH"
    width, height, _, n_bits = struct.unpack_from(form, content, 18)
    height = abs(height)  # below 0: the rows go downwards
    if begin + -(-width * n_bits // 32) * 4 * height > len(content):
        raise BadMedia("the end of the BMP is missing")
    return width, height
