"""
Pillow opens the files of images, and makes pixels of them.

Only these formats are tried. Size and orientation come from the header, so an image can be
refused before anything is unpacked. A decoder sees only what its pixels need (container.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from pyllama_raw.errors import BadMedia, PyllamaError, Unsupported
from pyllama_raw.media.container import needed, orientation
from pyllama_raw.media.upload import DecodeStopped, Stop, Upload, never

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

INSTALL = 'run `pip install "pyllama_raw[media]"`'
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP")
KINDS = "PNG, JPEG, GIF, BMP or WebP"
MAX_READS = 2**16


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
