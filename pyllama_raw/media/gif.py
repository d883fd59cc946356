"""GIF: a screen, then blocks; an image begins with a comma."""

from __future__ import annotations

import struct

from pyllama_raw.errors import BadMedia

_EXTENSION, _IMAGE, _END = b"!", b",", b";"


def size(content: bytes) -> tuple[int, int]:
    """Width and height of the screen. Raises BadMedia."""
    if content[:6] not in (b"GIF87a", b"GIF89a") or len(content) < 13:
        raise BadMedia("a GIF without its header")
    width, height = struct.unpack_from("<HH", content, 6)
    return width, height


def check_whole(content: bytes) -> None:
    """Raise BadMedia unless there is one image, and the end."""
    at, n_images = 13 + _n_colours(content, 10), 0
    while (kind := content[at : at + 1]) != _END:
        if kind == _IMAGE:
            n_images += 1
            at = _behind(content, at + 11 + _n_colours(content, at + 9))
        elif kind == _EXTENSION:
            at = _behind(content, at + 2)
        else:
            raise BadMedia("the end of the GIF is missing")
    if n_images != 1:
        raise BadMedia(f"a GIF of {n_images} images: give one of them")


def _n_colours(content: bytes, at: int) -> int:
    """Bytes of the table of colours that the flags at *at* announce."""
    flags = content[at] if at < len(content) else 0
    return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0


def _behind(content: bytes, at: int) -> int:
    """Where the pieces that begin at *at* end: each has its length in front."""
    while at < len(content) and content[at]:
        at += 1 + content[at]
    return at + 1
