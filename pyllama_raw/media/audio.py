"""A sound of a prompt."""

from __future__ import annotations

from dataclasses import dataclass, fields
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from pyllama_raw.errors import BadMedia, InvalidRequest, reading
from pyllama_raw.media import sounds
from pyllama_raw.media.sounds import SoundHeader, read_header, read_samples, resampled
from pyllama_raw.media.upload import Source, Stop, is_source, never, read_source

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RATES = range(4000, 192_001)  # samples a second
_ALLOWED = "bytes, a Path or a float32 array [n_samples]"
SAMPLES = "samples"  # the format of what is decoded


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Audio:
    """
    A sound: the content of a file, or samples. Pickles, and never changes.

    Args:
        source: a WAV, FLAC, MP3 or OGG file as bytes or by its Path; or an array of numpy,
            float32 [n_samples], from -1 to 1.
        sample_rate: of an array, samples a second.

    Raises:
        BadMedia: none of these, damaged, or without a sample.
        Unsupported: a file, but soundfile is not installed.
    """

    content: bytes
    format: str  # wav, flac, mp3, ogg; samples: float32
    n_frames: int  # samples of each channel
    rate: int  # of them, a second

    def __init__(
        self, source: Source | NDArray[np.float32], sample_rate: int | None = None
    ) -> None:
        if is_source(source):
            if sample_rate is not None:
                allowed = "it for an array only, because a file has its own"
                raise InvalidRequest("sample_rate", sample_rate, allowed)
            content = read_source(source)
            kind, n_frames, rate = read_header(content)
        else:
            kind = SAMPLES
            with reading("audio", source, _ALLOWED):
                content, n_frames, rate = _samples(source, sample_rate)
        if rate not in RATES or n_frames < 1:
            raise BadMedia(f"a sound of {n_frames} samples, {rate} a second")
        values = content, kind, n_frames, rate
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    @property
    def digest(self) -> bytes:
        """32 bytes that tell this sound from all others."""
        head = f"audio {self.format} {self.rate} ".encode()
        return sha256(head + self.content).digest()

    @property
    def seconds(self) -> float:
        return self.n_frames / self.rate

    def n_samples(self, rate: int) -> int:
        """The number of samples that samples() gives."""
        return sounds.n_samples(self.n_frames, self.rate, rate)

    def samples(self, rate: int, stop: Stop = never) -> NDArray[np.float32]:
        """Samples at *rate*, from -1 to 1; raises as read_samples()."""
        if self.format != SAMPLES:
            header = SoundHeader(self.format, self.n_frames, self.rate)
            return read_samples(self.content, header, rate, stop)
        import numpy as np

        return resampled(np.frombuffer(self.content, np.float32), self.rate, rate)

    def __repr__(self) -> str:
        return f"Audio({self.format}, {self.seconds:.2f} s)"


def _samples(samples: Any, rate: int | None) -> tuple[bytes, int, int]:
    kind, shape = str(getattr(samples, "dtype", "")), getattr(samples, "shape", ())
    if kind != "float32" or len(shape) != 1:
        value = f"{type(samples).__name__} {kind} {shape}" if kind else samples
        raise InvalidRequest("audio", value, _ALLOWED)
    if not isinstance(rate, int) or rate not in RATES:
        allowed = f"{RATES.start} to {RATES.stop - 1} with an array"
        raise InvalidRequest("sample_rate", rate, allowed)
    if not abs(samples).max(initial=0.0) <= 2.0:  # also if it is not a number
        raise BadMedia("samples beyond -1 to 1, or that are no numbers")
    return samples.tobytes(), len(samples), rate
