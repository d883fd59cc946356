"""What an image or a sound takes in a prompt is known before it is decoded."""

import numpy as np
import pytest

from pyllama_raw.engine.media_desk import MediaReader
from pyllama_raw.errors import BadMedia, Unsupported
from pyllama_raw.media import Audio, Image
from pyllama_raw.native.projector import EncodeCall, RowRun
from tests.media.files import (
    deep_png,
    image_file,
    pixels,
    sound_file,
    tone,
    wav_file,
)
from tests.native.media_support import loaded, rows_of

pytestmark = pytest.mark.native

IMAGES = {
    "png": Image(image_file("PNG")),
    "jpeg": Image(image_file("JPEG")),
    "gif": Image(image_file("GIF")),
    "bmp": Image(image_file("BMP")),
    "16 bits": Image(deep_png()),
    "webp": Image(image_file("WEBP")),
    "on its side": Image(
        image_file("JPEG", exif=b"MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0")
    ),
    "CMYK": Image(image_file("JPEG", mode="CMYK")),
    "one pixel": Image(image_file("PNG", 1, 1)),
    "pixels": Image(pixels(100, 60)),
}
SOUNDS = {
    "wav": Audio(wav_file(20000)),
    "stereo": Audio(wav_file(20000, 44100, 2)),
    "flac": Audio(sound_file("FLAC", 20000)),
    "mp3": Audio(sound_file("MP3", 46000, 44100)),
    "ogg": Audio(sound_file("OGG", 20000, 48000)),
    "array": Audio(tone(8000), sample_rate=8000),
    "31 s": Audio(wav_file(31 * 8000, 8000)),
}


@pytest.mark.parametrize("name", ["llava", "idefics3", "gemma3", "qwen2vl"])
def test_the_layout_of_an_image_is_that_of_its_rows(name):
    """
    Cells and positions of each image are the same before and after it is decoded.
    """
    with loaded(name) as projector:
        reader = MediaReader(projector, name.encode())
        for image in IMAGES.values():
            layout = reader.layout(image)

            with reader.read(image) as cut:
                assert layout.runs == cut.runs


@pytest.mark.parametrize("name", ["ultravox", "qwen2a"])
def test_the_layout_of_a_sound_is_that_of_its_rows(name):
    """
    Cells and positions of each sound are the same before and after it is decoded.
    """
    with loaded(name) as projector:
        reader = MediaReader(projector, name.encode())
        for sound in SOUNDS.values():
            layout = reader.layout(sound)

            with reader.read(sound) as cut:
                assert layout.runs == cut.runs


def test_keys_are_equal_where_rows_are():
    """
    Slices of one image, images of one size, and projectors have keys of their own.
    """
    images = [Image(pixels(100, 60, seed)) for seed in range(4)]
    images.append(Image(pixels(100, 60, 0)))
    with loaded("idefics3") as projector:
        reader = MediaReader(projector, b"one")
        keys, rows = [], []
        for image in images:
            with reader.read(image) as cut:
                layout = reader.layout(image)
                found = rows_of(projector, cut)
                keys += [layout.keys[index] for index in found]
                rows += [content.tobytes() for content in found.values()]
        others = MediaReader(projector, b"two").layout(images[0])

    assert len(keys) == 5 * len(images)
    assert len(set(keys)) == len(set(zip(keys, rows, strict=True))) == 20
    assert keys[:5] == keys[-5:]
    assert not set(keys) & set(others.keys)
    assert [key is not None for key in others.keys] == [
        isinstance(run, RowRun) for run in others.runs
    ]


def test_decoded_pixels_are_those_of_the_file():
    """
    A PNG and its pixels give the same rows, and an array of numpy, too.
    """
    array = pixels(40, 30)
    given = [Image(image_file("PNG")), Image(image_file("BMP")), Image(array)]
    with loaded("llava") as projector:
        reader = MediaReader(projector, b"")

        rows = []
        for image in given:
            with reader.read(image) as cut:
                rows.append(np.array(rows_of(projector, cut)[0]))

    assert all(np.array_equal(rows[0], found) for found in rows)


def test_what_the_projector_does_not_take_is_refused():
    """
    A sound for a projector that only sees is refused before it is decoded.
    """
    with loaded("llava") as projector:
        reader = MediaReader(projector, b"")

        for call in (reader.layout, reader.decode, reader.read):
            with pytest.raises(Unsupported, match="does not hear"):
                call(SOUNDS["wav"])


def test_an_encode_that_was_cancelled_decodes_nothing():
    """
    A cancel ends what has not yet begun; a file that is damaged is not found to be so.
    """
    image = Image(image_file("GIF")[:-40])
    with loaded("llava") as projector:
        reader = MediaReader(projector, b"")
        layout, control = reader.layout(image), EncodeCall()
        with pytest.raises(BadMedia):
            reader.encode(image, layout, control)

        control.cancel()

        assert reader.encode(image, layout, control) is None
