"""
libsndfile opens the files of sounds, and makes samples of them.

Length and rate come from the header, so a sound can be refused before it is decoded. A header that
was written before the sound was does not know the length: then a WAV goes to its end, and a FLAC,
which libsndfile cannot read so, is refused by that name. Of several channels the mean counts. soxr makes another rate of them: it filters out what the
new rate cannot hold.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from pyllama_raw.errors import BadMedia, PyllamaError, Unsupported
from pyllama_raw.media.pictures import INSTALL
from pyllama_raw.media.upload import DecodeStopped, Stop, Upload, never

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Samples = NDArray[np.float32]

KINDS = "WAV, FLAC, MP3 or OGG"
MAX_FRAMES = 2**27
MAX_CHANNELS = 8
MAX_READS = 2**18  # an MP3 takes four a frame
BLOCK = 2**16
MIN_SAMPLES = 2  # that mtmd takes
UNKNOWN_SIZE = (
    0x7FFF0000  # and more: who wrote the header did not know; no upload is as large
)
UNKNOWN_FRAMES = 2**63 - 1  # of libsndfile, for a FLAC that tells none
MAX_CHUNKS = 1024  # of a WAV before its samples
_SIZE = struct.Struct("<I")
_MAGICS = (b"RIFF", b"fLaC", b"OggS", b"ID3", b"\xff")
_FORMATS = {"WAV": "wav", "WAVEX": "wav", "FLAC": "flac", "OGG": "ogg", "MP3": "mp3"}
_CODINGS = {
    "PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW",
    "VORBIS", "OPUS", "MPEG_LAYER_III",
}  # fmt: skip
_MP3_FRAME = 1152  # samples by which the length of a whole MP3 may be told wrong


class SoundHeader(NamedTuple):
    """Facts that are known of a sound before it is decoded."""

    format: str  # wav, flac, mp3, ogg
    n_frames: int  # samples of each channel
    rate: int  # of them, a second


def read_header(content: bytes) -> SoundHeader:
    """
    Raises:
        BadMedia: it is no sound, or damaged; of a WAV also if its end is missing.
        Unsupported: soundfile is not installed.
    """
    with _opened(content) as file:
        return SoundHeader(_FORMATS[file.format], file.frames, file.samplerate)


def read_samples(
    content: bytes, header: SoundHeader, rate: int, stop: Stop = never
) -> Samples:
    """
    n_samples(header, rate) samples, from -1 to 1.

    Raises:
        BadMedia: it is damaged, or its end is missing.
        DecodeStopped: *stop* says so.
    """
    import numpy as np

    mono, at = np.zeros(header.n_frames, np.float32), 0
    with _opened(content) as file:
        while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
            if stop():
                raise DecodeStopped
            mono[at : at + len(block)] = block.mean(axis=1)
            at += len(block)
    if header.n_frames - at > (_MP3_FRAME if header.format == "mp3" else 0):
        raise BadMedia(f"it has {at} samples, its header tells of {header.n_frames}")
    if not np.isfinite(mono).all():
        raise BadMedia("a sample is not a number")
    return resampled(mono, header.rate, rate)


def n_samples(n_frames: int, rate: int, new_rate: int) -> int:
    """The number of samples that resampled() gives."""
    return max(ceil(n_frames * new_rate / rate), MIN_SAMPLES)


def resampled(samples: Samples, rate: int, new_rate: int) -> Samples:
    """*samples* at another rate; the same ones if it is their own."""
    import numpy as np

    if rate != new_rate:
        try:
            import soxr
        except ImportError as error:
            raise Unsupported(f"sounds of {rate} samples a second", INSTALL) from error
        frames = soxr.resample(samples, rate, new_rate)
    else:
        frames = samples
    padded = np.zeros(n_samples(len(samples), rate, new_rate), np.float32)
    padded[: len(frames)] = frames[: len(padded)]
    return padded


@contextmanager
def _opened(content: bytes) -> Iterator[Any]:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without the library
        raise Unsupported("files of sounds", INSTALL) from error
    if not content.startswith(_MAGICS):
        raise BadMedia(f"no {KINDS} file: it begins with {content[:8]!r}")
    content = _with_sizes(content)
    try:
        with soundfile.SoundFile(Upload(content, MAX_READS)) as file:
            _check_kind(file)
            yield file
    except (PyllamaError, DecodeStopped):
        raise
    except Exception as error:  # noqa: BLE001 - whatever a damaged file leads to
        reason = getattr(error, "error_string", error)
        raise BadMedia(f"it cannot be decoded: {reason}") from None


def _with_sizes(content: bytes) -> bytes:
    """
    *content*; of a WAV with the sizes that its header should have.

    Who writes into a pipe or a stream does not know how long the sound will be. He writes a size
    of 0xFFFFFFFF, 0x7FFFFFFF or a little less, or 0, or one of a file without samples, and means
    "to the end".

    Raises:
        BadMedia: the end of a WAV that tells its length is missing.
    """
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        return content
    at = _data_at(content)
    if at is None:
        return content  # libsndfile says what is wrong with it
    n_left = len(content) - at
    (riff,), (data,) = _SIZE.unpack_from(content, 4), _SIZE.unpack_from(content, at - 4)
    # A size of 0 is true if the file is as long as it says.
    is_open = data >= UNKNOWN_SIZE or (data == 0 and riff + 8 != len(content))
    if not is_open and data > n_left:
        raise BadMedia("the end of the WAV is missing")
    if riff < UNKNOWN_SIZE and riff + 8 > len(content):
        raise BadMedia("the end of the WAV is missing")
    if not is_open and riff + 8 <= len(content) and riff:
        return content
    sized = bytearray(content)
    _SIZE.pack_into(sized, 4, len(content) - 8)
    if is_open:
        _SIZE.pack_into(sized, at - 4, n_left)
    return bytes(sized)


def _data_at(content: bytes) -> int | None:
    """The place of the samples of a WAV; None if it is not among the first chunks."""
    at = 12
    for _ in range(MAX_CHUNKS):
        name, at = content[at : at + 4], at + 8
        if at > len(content):
            return None
        if name == b"data":
            return at
        (size,) = _SIZE.unpack_from(content, at - 4)
        at += size + size % 2
    return None


def _check_kind(file: Any) -> None:
    if file.format not in _FORMATS or file.subtype not in _CODINGS:
        raise BadMedia(f"{file.format} of {file.subtype}: give {KINDS}")
    if file.frames == UNKNOWN_FRAMES:
        raise BadMedia("its header does not tell its length: save it anew, or as WAV")
    if file.channels > MAX_CHANNELS or not 0 < file.frames <= MAX_FRAMES:
        facts = f"{file.channels} channels of {file.frames} samples"
        raise BadMedia(f"{facts}: at most {MAX_CHANNELS} of 1 to {MAX_FRAMES}")
