"""
Pillow opens the files of images, and makes pixels of them.

Only these formats are tried. Size and orientation come from the header, so an image can be
refused before anything is unpacked.

A decoder sees only what its pixels need: the parts of a PNG or a JPEG that have pixels, and how to
show them. Everything else is left out before a decoder sees the file. Texts, profiles and previews
are of no use for pixels, and unpack to more than the image.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from pyllama_raw.errors import BadMedia, PyllamaError, Unsupported
from pyllama_raw.media.upload import DecodeStopped, Stop, Upload, never

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

INSTALL = 'run `pip install "pyllama_raw[media]"`'
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP")
KINDS = "PNG, JPEG, GIF, BMP or WebP"
MAX_READS = 2**16
PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
MAX_PARTS = 2**13
MAX_SCANS = 40  # of a JPEG; each scan passes over all pixels
_PIXELS = {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"}
_SCAN, _PADDING, _EXIF, _ADOBE, _COMMENT = 0xFFDA, 0xFFFF, 0xFFE1, 0xFFEE, 0xFFFE
_NOTES = {*range(_EXIF, 0xFFF0), _COMMENT} - {_ADOBE}  # Adobe's names the colours
_ORIENTATION = 0x0112
_EXIF_NAME = b"Exif\0\0"


class PictureHeader(NamedTuple):
    """Facts that are known of an image before it is decoded."""

    format: str  # png, jpeg, gif, bmp, webp
    width: int  # as it is shown
    height: int


def read_header(content: bytes) -> PictureHeader:
    """
    Raises:
        BadMedia: it is no image, or damaged at its beginning.
        Unsupported: Pillow is not installed.
    """
    with _opened(content, never) as (picture, turn):
        width, height = picture.size
        if turn >= 5:  # on its side
            width, height = height, width
        return PictureHeader(str(picture.format).lower(), width, height)


def read_pixels(content: bytes, stop: Stop = never) -> bytes:
    """
    Red, green and blue of each pixel, row by row; of several frames the first one's.

    Alpha is left out, as it stands in the file: the colours below it are not mixed with
    another one. Of 16 bits the upper eight count.

    Raises:
        BadMedia: it is damaged, or its end is missing.
        DecodeStopped: *stop* says so.
    """
    with _opened(content, stop) as (picture, turn):
        picture.load()
        if picture.mode == "P" and picture.palette is None:
            raise BadMedia("its palette is missing")
        picture.info.pop("transparency", None)
        is_deep = picture.mode.startswith("I")
        upright = _upper_bits(picture) if is_deep else picture
        if turn > 1:
            upright = upright.transpose(_turns()[turn - 2])
        return upright.convert("RGB").tobytes()


@contextmanager
def _opened(content: bytes, stop: Stop) -> Iterator[tuple[Picture, int]]:
    """An image, of which its header is read, and its orientation."""
    pillow = _pillow()
    file, exif = needed(content)
    try:
        with pillow.open(Upload(file, MAX_READS, stop), formats=FORMATS) as picture:
            yield picture, orientation(exif or picture.info.get("exif", b""))
    except (PyllamaError, DecodeStopped):
        raise
    except pillow.UnidentifiedImageError:
        begin = content[:8]
        raise BadMedia(f"no {KINDS} file, or a damaged one: {begin!r}...") from None
    except Exception as error:  # noqa: BLE001 - Pillow raises what its plugins raise
        raise BadMedia(f"it cannot be decoded: {error}") from None


def _pillow() -> Any:
    try:
        import PIL.Image
        import PIL.WebPImagePlugin  # else all formats are loaded to find it
    except ImportError as error:
        raise Unsupported("files of images", INSTALL) from error
    return PIL.Image


def _turns() -> tuple[Any, ...]:
    """Transpositions that undo the orientations 2 to 8."""
    ways = _pillow().Transpose
    return (
        ways.FLIP_LEFT_RIGHT, ways.ROTATE_180, ways.FLIP_TOP_BOTTOM, ways.TRANSPOSE,
        ways.ROTATE_270, ways.TRANSVERSE, ways.ROTATE_90,
    )  # fmt: skip


def _upper_bits(picture: Picture) -> Picture:
    """A grey image of 16 bits in 8."""
    import numpy as np

    grey = (np.asarray(picture) >> 8).astype(np.uint8)
    return _pillow().fromarray(grey)  # type: ignore[no-any-return]


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
