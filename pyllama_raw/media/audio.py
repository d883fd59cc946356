"""A sound of a prompt."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from hashlib import sha256
from math import ceil
from typing import TYPE_CHECKING, Any

from pyllama_raw.errors import BadMedia, InvalidRequest, PyllamaError
from pyllama_raw.media import flac, mp3, wav
from pyllama_raw.media.source import Source, read_source

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# How a file of each format begins, and what reads its length and what a decoder gets of it.
_FORMATS = (
    ("wav", b"RIFF", wav.read),
    ("flac", b"fLaC", flac.read),
    ("mp3", b"ID3", mp3.read),
    ("mp3", b"\xff", mp3.read),
)
RATES = range(4000, 192_001)  # samples a second
_ALLOWED = "bytes, a Path or a float32 array [n_samples]"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Audio:
    """
    A sound: the content of a file. Pickles, and never changes.

    Args:
        source: a WAV, FLAC or MP3 file as bytes or by its Path; or an array of numpy,
            float32 [n_samples], from -1 to 1.
        sample_rate: of an array, samples a second.

    Raises:
        BadMedia: none of these, damaged, or without a sample.
    """

    content: bytes  # what a decoder gets
    format: str  # wav, flac, mp3
    n_frames: int  # samples of each channel
    rate: int  # of them, a second
    digest: bytes  # 32 bytes that tell this sound from all others

    def __init__(
        self, source: Source | NDArray[np.float32], sample_rate: int | None = None
    ) -> None:
        if isinstance(source, bytes | bytearray | memoryview | os.PathLike):
            if sample_rate is not None:
                allowed = "it for an array only, because a file has its own"
                raise InvalidRequest("sample_rate", sample_rate, allowed)
            given = read_source(source)
        else:
            given = _content_of(source, sample_rate)
        found, read = _recognise(given)
        content, n_frames, rate = read(given)
        if rate not in RATES or n_frames < 1:
            raise BadMedia(f"a sound of {n_frames} samples, {rate} a second")
        for name, value in (
            ("content", content),
            ("format", found),
            ("n_frames", n_frames),
            ("rate", rate),
            ("digest", sha256(b"audio " + given).digest()),
        ):
            object.__setattr__(self, name, value)

    @property
    def seconds(self) -> float:
        return self.n_frames / self.rate

    def n_samples(self, rate: int) -> int:
        """Samples at another *rate*; of an MP3 file some more or less come out."""
        return max(ceil(self.n_frames * rate / self.rate), 2)

    def __repr__(self) -> str:
        return f"Audio({self.format}, {self.seconds:.2f} s)"


def _recognise(content: bytes) -> tuple[str, Any]:
    for name, magic, read in _FORMATS:
        if content.startswith(magic):
            return name, read
    raise BadMedia(f"no WAV, FLAC or MP3 file: it begins with {content[:8]!r}")


def _content_of(samples: Any, rate: int | None) -> bytes:
    try:
        return _wav_of(samples, rate)
    except PyllamaError:
        raise
    except Exception as error:  # whatever a stranger's object raises
        raise InvalidRequest("audio", samples, _ALLOWED) from error


def _wav_of(samples: Any, rate: int | None) -> bytes:
    """An array as a file, so that the decoder makes the rate of the model of it."""
    kind, shape = str(getattr(samples, "dtype", "")), getattr(samples, "shape", ())
    if kind != "float32" or len(shape) != 1:
        given = f"{type(samples).__name__} {kind} {shape}" if kind else samples
        raise InvalidRequest("audio", given, _ALLOWED)
    if not isinstance(rate, int) or rate not in RATES:
        allowed = f"{RATES.start} to {RATES.stop - 1} with an array"
        raise InvalidRequest("sample_rate", rate, allowed)
    if not abs(samples).max(initial=0.0) <= 2.0:  # also if it is not a number
        raise BadMedia("samples beyond -1 to 1, or that are no numbers")
    data: bytes = samples.astype("<f4").tobytes()
    head = struct.pack("<IHHIIHH", 16, wav.FLOAT, 1, rate, 4 * rate, 4, 32)
    body = b"WAVEfmt " + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body
