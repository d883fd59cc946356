"""Images and sounds as files, for tests."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image as Pillow


def pixels(width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """Noise, so that no two images are alike: [height, width, 3]."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (height, width, 3), np.uint8)


def image_file(
    kind: str, width: int = 40, height: int = 30, *, mode: str = "RGB", **options: Any
) -> bytes:
    """An image as PNG, JPEG, GIF, BMP or WEBP."""
    stream = io.BytesIO()
    Pillow.fromarray(pixels(width, height)).convert(mode).save(stream, kind, **options)
    return stream.getvalue()


def moving(kind: str) -> bytes:
    """Two frames."""
    frames = [Pillow.fromarray(pixels(20, 20, seed)) for seed in (0, 1)]
    stream = io.BytesIO()
    frames[0].save(stream, kind, save_all=True, append_images=frames[1:])
    return stream.getvalue()


def deep_png(width: int = 20, height: int = 20) -> bytes:
    """16 bits a channel."""
    values = np.arange(width * height, dtype=np.uint16).reshape(height, width) * 100
    stream = io.BytesIO()
    Pillow.fromarray(values).save(stream, "PNG")
    return stream.getvalue()


def tone(n_samples: int) -> NDArray[np.float32]:
    return np.sin(np.arange(n_samples) * 0.1).astype(np.float32)


def wav_file(n_samples: int = 16000, rate: int = 16000, n_channels: int = 1) -> bytes:
    """Integers of 16 bits."""
    samples = (tone(n_samples) * 32000).astype("<i2").repeat(n_channels)
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(n_channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return stream.getvalue()


def sound_file(
    kind: str,
    n_samples: int = 16000,
    rate: int = 16000,
    n_channels: int = 1,
    subtype: str | None = None,
) -> bytes:
    """A sound as WAV, FLAC, MP3 or OGG."""
    samples = np.stack([tone(n_samples) * 0.9] * n_channels, axis=1)
    stream = io.BytesIO()
    soundfile.write(stream, samples, rate, format=kind, subtype=subtype)
    return stream.getvalue()


def png_of(
    width: int,
    height: int,
    packed: bytes,
    *further: tuple[bytes, bytes],
    depth: int = 8,
    colour: int = 2,
    order: int = 0,
    behind: tuple[tuple[bytes, bytes], ...] = (),
) -> bytes:
    """A PNG of these packed pixels; *further* and *behind*: chunks around them."""
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, order)
    chunks = [(b"IHDR", head), *further, (b"IDAT", packed), *behind, (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data))
        + name
        + data
        + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
