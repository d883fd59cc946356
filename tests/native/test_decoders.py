"""Pixels and samples are those that mtmd's own decoders make, which the engine does not use."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from pyllama_raw.media import Audio, Image
from pyllama_raw.native.libllama import ffi, lib
from pyllama_raw.native.projector import Projector
from tests.media.files import image_file, png_of, sound_file, wav_file
from tests.native.media_support import loaded

pytestmark = pytest.mark.native

N_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
DEPTHS = {0: (1, 2, 4, 8, 16), 3: (1, 2, 4, 8)}
PASSES = (
    (0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2),
    (0, 1, 1, 2),
)  # fmt: skip


@pytest.fixture(scope="module")
def eyes() -> Iterator[Projector]:
    with loaded("llava") as projector:
        yield projector


@pytest.fixture(scope="module")
def ears() -> Iterator[Projector]:
    with loaded("ultravox") as projector:
        yield projector


def by_mtmd(projector: Projector, content: bytes) -> bytes:
    found = lib.mtmd_helper_bitmap_init_from_buf(
        lib.plr_projector_ctx(projector.ptr),
        content,
        len(content),
        False,
        lib.mtmd_helper_init_opt_default(),
    )
    bitmap = ffi.gc(found.bitmap, lib.mtmd_bitmap_free)
    n_bytes = lib.mtmd_bitmap_get_n_bytes(bitmap)
    return bytes(ffi.buffer(lib.mtmd_bitmap_get_data(bitmap), n_bytes))


def any_png(chance: random.Random) -> bytes:
    """Noise of any size, depth, colours, filters and order, with or without alpha."""
    width, height = chance.randint(1, 40), chance.randint(1, 40)
    colour, order = chance.choice(list(N_CHANNELS)), chance.randrange(2)
    depth = chance.choice(DEPTHS.get(colour, (8, 16)))
    sizes = [(width, height)]
    if order:
        sizes = [
            (-(-(width - x) // step_x), -(-(height - y) // step_y))
            for x, y, step_x, step_y in PASSES
            if x < width and y < height
        ]
    rows = b"".join(
        bytes([chance.randrange(5)])
        + chance.randbytes(-(-n_columns * depth * N_CHANNELS[colour] // 8))
        for n_columns, n_rows in sizes
        for _ in range(n_rows)
    )
    alpha = {0: chance.randrange(2**depth).to_bytes(2, "big"), 2: chance.randbytes(6)}
    alpha[3] = chance.randbytes(chance.randint(1, 2**depth) if colour == 3 else 1)
    others = [(b"gAMA", (45455).to_bytes(4, "big"))]
    if colour == 3:
        others.append((b"PLTE", chance.randbytes(3 * 2**depth)))
    if colour in alpha and chance.randrange(2):
        others.append((b"tRNS", alpha[colour]))
    packed = zlib.compress(rows)
    return png_of(
        width, height, packed, *others, depth=depth, colour=colour, order=order
    )


def test_pixels_of_any_png_are_those_of_mtmd(eyes):
    """
    Bit for bit: alpha is dropped, of 16 bits the upper eight count, grey is three colours.
    """
    chance = random.Random(5)  # noqa: S311 - the same on every run
    files = [any_png(chance) for _ in range(600)]

    different = [file for file in files if Image(file).pixels() != by_mtmd(eyes, file)]

    assert different == []


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1"])
@pytest.mark.parametrize("kind", ["BMP", "GIF"])
def test_pixels_of_a_bmp_and_a_gif_are_those_of_mtmd(eyes, kind, mode):
    """
    Bit for bit.
    """
    content = image_file(kind, mode=mode)

    assert Image(content).pixels() == by_mtmd(eyes, content)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_pixels_of_a_jpeg_are_nearly_those_of_mtmd(eyes, mode):
    """
    The standard leaves the last bits open.
    """
    content = image_file("JPEG", mode=mode)

    pixels = [Image(content).pixels(), by_mtmd(eyes, content)]

    ours, theirs = (np.frombuffer(each, np.uint8).astype(int) for each in pixels)
    assert np.abs(ours - theirs).max() <= 2


@pytest.mark.parametrize("n_channels", [1, 2, 6])
@pytest.mark.parametrize(
    ("kind", "subtype"),
    [("WAV", kind) for kind in ("PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")]
    + [("WAV", "ULAW"), ("WAV", "ALAW"), ("FLAC", "PCM_16"), ("FLAC", "PCM_24")],
)
def test_samples_at_the_rate_of_the_projector_are_those_of_mtmd(
    ears, kind, subtype, n_channels
):
    """
    Bit for bit.
    """
    rate = ears.sample_rate
    content = sound_file(kind, 20_001, rate, n_channels, subtype)

    assert Audio(content).samples(rate).tobytes() == by_mtmd(ears, content)


def test_samples_of_another_rate_are_nearer_than_those_of_mtmd(ears):
    """
    mtmd interpolates by a straight line.
    """
    content = wav_file(44_100, 44_100)
    expected = np.sin(np.arange(16_000) * 0.1 * 44_100 / 16_000) * 32000 / 2**15

    ours = Audio(content).samples(16_000)
    theirs = np.frombuffer(by_mtmd(ears, content), np.float32)[:16_000]

    errors = [np.abs(each - expected)[300:-300].max() for each in (ours, theirs)]
    assert errors[0] < 0.001 < errors[1]
