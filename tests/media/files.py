"""Images and sounds as files, for tests."""

from __future__ import annotations

import io
import struct
import wave
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow


def pixels(width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """Noise, so that no two images are alike: [height, width, 3]."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (height, width, 3), np.uint8)


def image_file(
    kind: str, width: int = 40, height: int = 30, *, mode: str = "RGB", **options: Any
) -> bytes:
    """An image as PNG, JPEG, GIF or BMP."""
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


def flac_file(
    n_samples: int = 16000, rate: int = 16000, *, told: int | None = None
) -> bytes:
    """Blocks of 4096 samples of 16 bits, all of them 0; *told*: what the header says."""
    size, frames = 4096, []
    for number, start in enumerate(range(0, n_samples, size)):
        count = min(size, n_samples - start)
        head = b"\xff\xf8\x70\x08" + _utf8(number) + struct.pack(">H", count - 1)
        head += bytes([_crc(head, 0x07, 8)])
        frame = head + b"\0\0\0"  # a constant, 0
        frames.append(frame + struct.pack(">H", _crc(frame, 0x8005, 16)))
    numbers = rate << 44 | 15 << 36 | (told or n_samples)  # one channel of 16 bits
    info = struct.pack(">HH", size, size) + bytes(6) + numbers.to_bytes(8, "big")
    return b"fLaC\x80\0\0\x22" + info + bytes(16) + b"".join(frames)


def mp3_file(n_frames: int = 40, told: int | None = None) -> bytes:
    """Silence: 64 kbit/s, 44,100 samples a second, one channel."""
    frame = b"\xff\xfb\x50\xc0" + bytes(204)
    if told is None:
        return frame * n_frames
    first = frame[:21] + b"Xing" + struct.pack(">II", 1, told)
    return first + frame[len(first) :] + frame * n_frames


def _utf8(number: int) -> bytes:
    return chr(number).encode()


def _crc(data: bytes, polynomial: int, n_bits: int) -> int:
    value, top = 0, 1 << (n_bits - 1)
    for byte in data:
        value ^= byte << (n_bits - 8)
        for _ in range(8):
            value = value << 1 ^ (polynomial if value & top else 0)
            value &= (1 << n_bits) - 1
    return value
