"""What an image is, as Pillow reads its header, and its pixels."""

import io
import pickle
import struct
import zlib

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageOps

from pyllama_raw.errors import BadMedia, InvalidRequest
from pyllama_raw.media import Audio, Image
from tests.media.files import deep_png, image_file, moving, pixels, png_of
from tests.support.hostile import Unreadable

FILES = {
    "png": image_file("PNG"),
    "png flat": image_file("PNG", 41, 3),
    "png of 16 bits": deep_png(40, 30),
    "png of 1 bit": image_file("PNG", mode="1"),
    "png with a palette": image_file("PNG", mode="P"),
    "jpeg": image_file("JPEG"),
    "jpeg progressive": image_file("JPEG", progressive=True),
    "jpeg CMYK": image_file("JPEG", mode="CMYK"),
    "gif": image_file("GIF"),
    "bmp": image_file("BMP"),
    "webp": image_file("WEBP"),
    "png one pixel": image_file("PNG", 1, 1),
}


def refusal(content: bytes) -> str:
    """Why *content* is refused, as it is made or when it is decoded."""
    with pytest.raises(BadMedia) as caught:
        Image(content).pixels()
    return caught.value.reason


@pytest.mark.parametrize("name", FILES)
def test_format_and_size_are_those_of_the_file(name):
    """
    An image knows its format and size without being decoded, and has that many pixels.
    """
    sizes = {"png flat": (41, 3), "png one pixel": (1, 1)}
    width, height = sizes.get(name, (40, 30))

    image = Image(FILES[name])

    expected = (name.split()[0], width, height)
    assert (image.format, image.width, image.height) == expected
    assert len(image.pixels()) == 3 * width * height


def test_pixels_of_numpy_and_pillow_are_the_same():
    """
    An array and an image of Pillow give equal images; an RGBA image loses its alpha.
    """
    array = pixels(7, 5)
    pillow = Pillow.fromarray(array)

    images = [Image(array), Image(pillow), Image(pillow.convert("RGBA"))]

    assert images == [images[0]] * 3
    assert (images[0].pixels(), images[0].width, images[0].height) == (
        array.tobytes(),
        7,
        5,
    )


def test_an_image_of_pillow_that_is_cut_off_is_refused():
    """
    Pillow reads a file when pixels are asked for, and raises what it likes.
    """
    with Pillow.open(io.BytesIO(FILES["png"][:-400])) as cut:
        with pytest.raises(BadMedia, match="cannot be converted"):
            Image(cut)


def test_an_image_travels():
    """
    An image is plain data: it pickles, and its digest tells it from others.
    """
    image = Image(FILES["png"])

    copy = pickle.loads(pickle.dumps(image))  # noqa: S301 -- our own

    assert (copy, copy.digest) == (image, image.digest)
    assert len({Image(content).digest for content in FILES.values()}) == len(FILES)
    turned = Image(pixels(2, 6)), Image(pixels(2, 6).reshape(2, 6, 3))
    assert turned[0].digest != turned[1].digest


def test_a_path_is_read(tmp_path):
    """
    A Path names a file; a folder, a missing file and a text are refused.
    """
    path = tmp_path / "image.png"
    path.write_bytes(FILES["png"])

    assert Image(path) == Image(FILES["png"])
    for wrong in (tmp_path, tmp_path / "missing.png", tmp_path / "a\0b"):
        with pytest.raises(BadMedia):
            Image(wrong)
    with pytest.raises(InvalidRequest):
        Image(str(path))


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_off_is_refused(name):
    """
    However much of the pixels is missing, the image is refused: never half of it is shown.
    """
    content = FILES[name]
    cuts = range(0, len(content) - 12, 7)

    reasons = [refusal(content[:n_bytes]) for n_bytes in cuts]

    assert all(reasons)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello, world",
        b"%PDF-1.7\n" + bytes(100),
        b"%!PS-Adobe-3.0 EPSF-3.0\n" + bytes(100),
        b"P6 2 2 255 " + bytes(12),
        b"RIFF\x20\0\0\0WEBPVP8 " + bytes(100),
        b"\x89PNG\r\n\x1a\n" + bytes(100),
        b"\xff\xd8\xff" + bytes(100),
        b"GIF89b" + bytes(100),
        b"BM" + b"\xff" * 100,
        png_of(0, 4, zlib.compress(b"")),
        png_of(2, 2, zlib.compress(bytes(6)), colour=3),
        png_of(2**31 - 1, 2**31 - 1, zlib.compress(bytes(6))),
        b"BM" + struct.pack("<IIIIiiHHI", 70, 0, 54, 40, 2, 2, 1, 24, 3) + bytes(36),
    ],
    ids=range(14),
)
@pytest.mark.filterwarnings("default::PIL.Image.DecompressionBombWarning")
def test_what_is_no_image_is_refused(content):
    """
    Other files, formats that Pillow has and we do not, and files that only begin like an
    image, are refused.
    """
    reason = refusal(content)

    assert reason


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_of_a_moving_image_the_first_frame_is_shown(kind):
    """
    Files of several frames are images, too.
    """
    content = moving(kind)
    with Pillow.open(io.BytesIO(content)) as file:
        first = file.convert("RGB").tobytes()

    image = Image(content)

    assert (image.pixels(), image.width) == (first, 20)


@pytest.mark.parametrize("number", range(1, 10))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_an_image_is_upright(kind, number):
    """
    A camera notes in EXIF how it was held: size and pixels are those of the turned image,
    as Pillow turns it. An unknown number turns nothing.
    """
    exif = Pillow.Exif()
    exif[0x0112] = number
    content = image_file(kind, 40, 30, exif=exif.tobytes())
    with Pillow.open(io.BytesIO(content)) as file:
        upright = ImageOps.exif_transpose(file).convert("RGB")

    image = Image(content)

    assert ((image.width, image.height), image.pixels()) == (
        upright.size,
        upright.tobytes(),
    )


@pytest.mark.parametrize("exif", [b"II*\0", b"MM\0*" + b"\xff" * 99, b"?" * 40])
def test_exif_data_that_is_damaged_turns_nothing(exif):
    """
    The pixels need not be damaged.
    """
    image = Image(image_file("JPEG", exif=exif))

    assert (image.width, image.height) == (40, 30)


@pytest.mark.parametrize(
    "array",
    [
        pixels(4, 4).astype(np.float32),
        pixels(4, 4)[:, :, 0],
        np.zeros((4, 4, 4), np.uint8),
        [[0, 0, 0]],
        7,
        None,
    ],
)
def test_an_array_of_another_kind_is_refused(array):
    """
    Only uint8 [height, width, 3] is an image.
    """
    with pytest.raises(InvalidRequest):
        Image(array)


def test_an_image_without_a_pixel_is_refused():
    """
    A side of 0 is no image.
    """
    with pytest.raises(BadMedia, match="0 x 4"):
        Image(np.zeros((4, 0, 3), np.uint8))


class LikePillow:
    """An image of 2 x 2 pixels, as far as its attributes tell."""

    size = (2, 2)

    def __init__(self, pixels: object) -> None:
        self._pixels = pixels

    def convert(self, mode):
        if isinstance(self._pixels, Exception):
            raise self._pixels
        return self

    def tobytes(self):
        return self._pixels


def test_an_image_that_cannot_be_converted_is_bad_media():
    """
    The error has the words of what Pillow, or its like, raised.
    """
    with pytest.raises(BadMedia, match=r"cannot be converted: OSError.*is truncated"):
        Image(LikePillow(OSError("image file is truncated")))


@pytest.mark.parametrize("pixels", [b"\0" * 11, b"\0" * 13, 5, None, "\0" * 12])
def test_an_image_has_as_many_bytes_as_its_size_says(pixels):
    """
    A decoder that is told more than there are would read what is not its own.
    """
    with pytest.raises(InvalidRequest, match="or Pillow's"):
        Image(LikePillow(pixels))


def test_an_object_that_raises_is_no_image():
    """
    Whatever is asked of it.
    """
    strange = LikePillow(b"\0" * 12)
    strange.size = Unreadable()

    with pytest.raises(InvalidRequest, match="or Pillow's"):
        Image(strange)


@pytest.mark.parametrize("kind", [Image, Audio])
def test_a_path_that_raises_names_no_file(kind):
    """
    The error has what it raised.
    """
    with pytest.raises(BadMedia, match="is no path: ZeroDivisionError"):
        kind(Unreadable())
