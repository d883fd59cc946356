"""JPEG: segments, each a marker and a length, and packed pixels behind those named SOS."""

from __future__ import annotations

import struct

from pyllama_raw.errors import BadMedia

_SOF = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # they say the size
_SOS, _END = 0xDA, b"\xff\xd9"
_MAX_SCANS = 200  # each of which goes over all pixels


def size(content: bytes) -> tuple[int, int]:
    """Width and height. Raises BadMedia."""
    at, _ = _frame(content)
    height, width = struct.unpack_from(">HH", content, at + 5)
    return width, height


def check_whole(content: bytes) -> None:
    """Raise BadMedia if the end is missing, or there is no end of scans."""
    at, length = _frame(content)
    if content.find(_END, at + length) < 0:
        raise BadMedia("the end of the JPEG is missing")
    if content.count(bytes([0xFF, _SOS])) > _MAX_SCANS:
        raise BadMedia(f"a JPEG of more than {_MAX_SCANS} scans")


def _frame(content: bytes) -> tuple[int, int]:
    """Where the marker of the size stands, and the length of its segment."""
    at = 2
    while at + 9 <= len(content):
        first, marker, length = struct.unpack_from(">BBH", content, at)
        if first != 0xFF or (marker == _SOS):
            break
        if marker == 0xFF:  # before a marker there may be any number of these
            at += 1
        elif marker in _SOF:
            return at, length
        else:
            at += 2 + length
    raise BadMedia("a damaged JPEG: its size cannot be found")
