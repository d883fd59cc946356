"""
Parts of a PNG or a JPEG that a decoder needs: its pixels, and how to show them.

Everything else is left out before a decoder sees the file. Texts, profiles and previews
are of no use for pixels, and unpack to more than the image.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from pyllama_raw.errors import BadMedia

PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
MAX_PARTS = 2**13
MAX_SCANS = 40  # of a JPEG; each scan passes over all pixels
_PIXELS = {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"}
_SCAN, _PADDING, _EXIF, _ADOBE, _COMMENT = 0xFFDA, 0xFFFF, 0xFFE1, 0xFFEE, 0xFFFE
_NOTES = {*range(_EXIF, 0xFFF0), _COMMENT} - {_ADOBE}  # Adobe's names the colours
_ORIENTATION = 0x0112
_EXIF_NAME = b"Exif\0\0"


class FilePart(NamedTuple):
    """A piece of a file; empty if no decoder needs it."""

    content: bytes = b""
    is_exif: bool = False


def needed(content: bytes) -> tuple[bytes, bytes]:
    """
    The file without what is no pixels, and its EXIF data.

    Raises:
        BadMedia: it is damaged, its end is missing, or it has too many parts.
    """
    if content.startswith(PNG):
        parts = _chunks(content)
    elif content.startswith(JPEG):
        parts = _segments(content)
    else:
        return content, b""
    contents, exif = [], b""
    try:
        for count, part in enumerate(parts):
            if count > MAX_PARTS:
                raise BadMedia(f"more than {MAX_PARTS} parts: save it anew")
            if not part.is_exif:
                contents.append(part.content)
            elif not exif:
                exif = part.content
    except struct.error:
        raise BadMedia("the end of the file is missing, or it is damaged") from None
    return b"".join(contents), exif


def orientation(exif: bytes) -> int:
    """1 to 8: how an image is turned to be shown, as EXIF counts; 1: as it is."""
    exif = exif.removeprefix(_EXIF_NAME)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, start)
        for at in range(start + 2, start + 2 + 12 * count, 12):
            tag, _, _, value = struct.unpack_from(f"{order}HHIH", exif, at)
            if tag == _ORIENTATION:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass  # it is damaged, which the pixels need not be
    return 1


def _chunks(content: bytes) -> Iterator[FilePart]:
    """Chunks of a PNG, up to its end: length, name, data, checksum."""
    yield FilePart(PNG)
    at, name = len(PNG), b""
    while name != b"IEND":
        length, name = struct.unpack_from(">I4s", content, at)
        end = at + 12 + length
        if end > len(content):
            raise struct.error
        if name == b"eXIf":
            yield FilePart(content[at + 8 : end - 4], is_exif=True)
        else:
            yield FilePart(content[at:end] if name in _PIXELS else b"")
        at = end


def _segments(content: bytes) -> Iterator[FilePart]:
    """Segments of a JPEG, marker, length and data; then the first scan and the rest."""
    if content.count(b"\xff\xda") > MAX_SCANS:
        raise BadMedia(f"a JPEG of more than {MAX_SCANS} scans: save it anew")
    yield FilePart(content[:2])
    at, marker = 2, 0
    while marker != _SCAN:
        marker, length = struct.unpack_from(">HH", content, at)
        if marker == _PADDING:  # any number of bytes before a marker
            at += 1
            yield FilePart()
            continue
        if marker < 0xFF00:
            raise struct.error
        segment = content[at : at + 2 + length]
        if marker == _EXIF and segment.startswith(_EXIF_NAME, 4):
            yield FilePart(segment[4:], is_exif=True)
        elif marker in _NOTES:
            yield FilePart()
        else:
            yield FilePart(segment)
        at += 2 + length
    yield FilePart(content[at:])
