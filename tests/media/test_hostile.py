"""Uploads that are made to keep a decoder busy are refused, or cost no more than others."""

import struct
import zlib

import pytest

from pyllama_raw.errors import BadMedia
from pyllama_raw.media import Audio, Image
from pyllama_raw.media.decoders import MAX_PARTS, MAX_SCANS, DecodeStopped, read_pixels
from tests.media.files import image_file, pixels, png_of, wav_file

PACKED = zlib.compress(bytes(3 * 4 * 4 + 4))  # 4 x 4 black pixels
BLACK = bytes(3 * 4 * 4)
MEGABYTE = zlib.compress(bytes(2**20 - 100))
JPEG = image_file("JPEG")
GIF = image_file("GIF")
GIF_AT = 13 + 3 * 256  # where the blocks of the GIF begin


def segment(marker: int, data: bytes) -> bytes:
    return struct.pack(">HH", marker, len(data) + 2) + data


def exif_of_itself() -> bytes:
    """5,000 values, each of which is all of it: Pillow would read 300 megabytes."""
    count, size = 5000, 2**16 - 100
    entries = (struct.pack("<HHII", tag, 7, size, 0) for tag in range(count))
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", count) + b"".join(entries)


def with_segments(*segments: bytes) -> bytes:
    return JPEG[:2] + b"".join(segments) + JPEG[2:]


@pytest.mark.parametrize(
    ("chunks", "behind"),
    [
        ([(b"zTXt", b"a\0\0" + MEGABYTE)] * 200, ()),
        ([(b"iCCP", b"a\0\0" + MEGABYTE)] * 200, ()),
        ([], ((b"iCCP", b"a\0\0" + MEGABYTE),) * 200),
        ([], ((b"IDAT", bytes(1000)),) * 200),
        ([], ((b"IDAT", b""),) * (MAX_PARTS - 9)),
    ],
    ids=[
        "texts",
        "profiles",
        "profiles behind",
        "pixels behind",
        "empty pixels behind",
    ],
)
def test_what_is_no_pixels_of_a_png_is_not_read(chunks, behind):
    """
    Texts and profiles that unpack to megabytes, and more than the pixels need.
    """
    image = Image(png_of(4, 4, PACKED, *chunks, behind=tuple(behind)))

    assert image.pixels() == BLACK


def test_a_png_is_unpacked_as_far_as_it_has_pixels():
    """
    What unpacks to 64 megabytes is as small as its size says.
    """
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(bytes(2**20)) for _ in range(64)) + packer.flush()

    assert Image(png_of(4, 4, packed)).pixels() == BLACK


@pytest.mark.parametrize(
    "segments",
    [
        [segment(0xFFE1, exif_of_itself())] * 5,
        [segment(0xFFED, b"Photoshop 3.0\0" + (b"8BIM" + bytes(8)) * 5000)] * 5,
        [segment(0xFFFE, b"a comment")] * (MAX_PARTS - 99),
        [segment(0xFFE2, b"MPF\0" + bytes(1000))],
        [b"\xff" * 100],
    ],
    ids=["EXIF", "Photoshop", "comments", "frames", "padding"],
)
def test_what_is_no_pixels_of_a_jpeg_is_not_read(segments):
    """
    Notes of programs and cameras do not change the pixels.
    """
    image = Image(with_segments(*segments))

    assert (image.format, image.pixels()) == ("jpeg", Image(JPEG).pixels())


@pytest.mark.parametrize(
    "content",
    [
        png_of(4, 4, PACKED, *[(b"tEXt", b"")] * MAX_PARTS),
        png_of(4, 4, PACKED, behind=((b"IDAT", b""),) * MAX_PARTS),
        b"\xff\xd8\xff" + b"\xff" * 2**16,
        with_segments(*[segment(0xFFFE, b"")] * MAX_PARTS),
        JPEG[:-2] + b"\xff\xda\0\0" * MAX_SCANS + JPEG[-2:],
        GIF[:GIF_AT] + b"!\xfe" + b"\1a" * 2**16 + b"\0" + GIF[GIF_AT:],
        GIF[:GIF_AT] + b"!\xff\1a\0" * 2**16 + GIF[GIF_AT:],
        b"BM"
        + struct.pack("<IIIIiiHHI", 2**20, 0, 1078, 40, 2**13, 2**12, 1, 8, 1)
        + bytes(1044)
        + b"\1\1" * 2**17,
    ],
    ids=range(8),
)
def test_an_image_in_very_many_parts_is_refused(content):
    """
    A decoder in Python would take a while for each part, however small it is.
    """
    with pytest.raises(BadMedia, match="save it anew"):
        Image(content).pixels()


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 2**20,
        b"\xff\xfb" * 2**19,
        b"ID3\4\0\0\0\0\0\0" + b"\xff" * 2**20,
        b"OggS" * 2**18,
        wav_file()[:36] + b"junk\0\0\0\0" * 2**17 + wav_file()[36:],
    ],
    ids=range(5),
)
def test_a_sound_in_very_many_parts_is_refused(content):
    """
    Whatever looks like its beginning.
    """
    if content.startswith(b"RIFF"):
        content = b"RIFF" + struct.pack("<I", len(content) - 8) + content[8:]

    with pytest.raises(BadMedia):
        Audio(content)


def test_a_decode_is_stopped():
    """
    Nobody waits for the end of a decode that nobody wants.
    """
    content = image_file("PNG", 400, 300)

    assert read_pixels(content) == pixels(400, 300).tobytes()
    with pytest.raises(DecodeStopped):
        read_pixels(content, lambda: True)
    with pytest.raises(DecodeStopped):
        Audio(wav_file()).samples(16000, lambda: True)
