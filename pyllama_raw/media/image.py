"""An image of a prompt."""

from __future__ import annotations

from dataclasses import dataclass, fields
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

from pyllama_raw.errors import BadMedia, InvalidRequest, reading, shown
from pyllama_raw.media.pictures import read_header, read_pixels
from pyllama_raw.media.upload import Source, Stop, is_source, never, read_source

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PIXELS = "pixels"  # the format of what is decoded


class PilImage(Protocol):
    """The part of an image of Pillow that is used."""

    @property
    def size(self) -> tuple[int, int]: ...
    def convert(self, mode: str) -> Any: ...


_ALLOWED = "bytes, a Path, a uint8 array [height, width, 3] or Pillow's"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Image:
    """
    An image: the content of a file, or pixels. Pickles, and never changes.

    Args:
        source: a PNG, JPEG, GIF, BMP or WebP file as bytes or by its Path; an array of
            numpy, uint8 [height, width, 3]; or an image of Pillow.

    Raises:
        BadMedia: none of these, damaged at its beginning, or without a pixel.
        Unsupported: a file, but Pillow is not installed.
    """

    content: bytes
    format: str  # png, jpeg, gif, bmp, webp; pixels: red, green, blue, row by row
    width: int  # as it is shown
    height: int

    def __init__(self, source: Source | NDArray[np.uint8] | PilImage) -> None:
        if is_source(source):
            content = read_source(source)
            kind, width, height = read_header(content)
        else:
            kind = PIXELS
            content, width, height = _pixels(source)
        if width < 1 or height < 1:
            raise BadMedia(f"an image of {width} x {height} pixels")
        values = content, kind, width, height
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    @property
    def digest(self) -> bytes:
        """32 bytes that tell this image from all others."""
        head = f"image {self.format} {self.width} {self.height} ".encode()
        return sha256(head + self.content).digest()

    def pixels(self, stop: Stop = never) -> bytes:
        """Red, green and blue, row by row; raises as read_pixels()."""
        if self.format == PIXELS:
            return self.content
        return read_pixels(self.content, stop)

    def __repr__(self) -> str:
        return f"Image({self.format}, {self.width} x {self.height})"


def _pixels(source: Any) -> tuple[bytes, int, int]:
    with reading("image", source, _ALLOWED):
        content, width, height = _read_pixels(source)
        if type(content) is bytes and len(content) == 3 * width * height:
            return content, width, height
    raise InvalidRequest("image", source, _ALLOWED)


def _read_pixels(source: Any) -> tuple[Any, int, int]:
    if hasattr(source, "convert") and hasattr(source, "size"):
        width, height = source.size
        return _converted(source), width, height
    shape, kind = getattr(source, "shape", None), str(getattr(source, "dtype", ""))
    if shape is None or len(shape) != 3 or shape[2] != 3 or kind != "uint8":
        value = f"{type(source).__name__} {kind} {shape}" if shape else source
        raise InvalidRequest("image", value, _ALLOWED)
    return source.tobytes(), shape[1], shape[0]


def _converted(source: PilImage) -> Any:
    try:
        return source.convert("RGB").tobytes()
    except Exception as error:
        raise BadMedia(f"an image that cannot be converted: {shown(error)}") from error
