"""What a sound is, as libsndfile reads its header, and its samples."""

import pickle
import struct

import numpy as np
import pytest

from pyllama_raw.errors import BadMedia, InvalidRequest
from pyllama_raw.media import Audio
from tests.media.files import sound_file, tone, wav_file

OGG = sound_file("OGG")
MP3 = sound_file("MP3", 44100, 44100)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (wav_file(), ("wav", 16000, 16000)),
        (wav_file(n_channels=2, rate=44100), ("wav", 16000, 44100)),
        (sound_file("WAV", subtype="FLOAT"), ("wav", 16000, 16000)),
        (sound_file("FLAC", 20000), ("flac", 20000, 16000)),
        (sound_file("FLAC", 2**20), ("flac", 2**20, 16000)),
        (MP3, ("mp3", 44100, 44100)),
        (OGG, ("ogg", 16000, 16000)),
        (sound_file("OGG", rate=48000, subtype="OPUS"), ("ogg", 16000, 48000)),
    ],
    ids=lambda value: value if isinstance(value, tuple) else "",
)
def test_length_is_that_of_the_file(content, expected):
    """
    A sound knows its format, samples and rate without being decoded, and has that many.
    """
    audio = Audio(content)

    assert (audio.format, audio.n_frames, audio.rate) == expected
    for rate in (8000, audio.rate, 48000):
        assert len(audio.samples(rate)) == audio.n_samples(rate)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_samples_are_those_of_the_sound(kind, rate):
    """
    The mean of the channels, at the rate that is asked for, from -1 to 1.
    """
    audio = Audio(sound_file(kind, rate, rate, n_channels=2))

    samples = audio.samples(16000)

    expected = 0.9 * np.sin(np.arange(16000) * 0.1 * rate / 16000)
    lossy = 0.1 if kind in ("OGG", "MP3") else 0.001
    assert np.abs(samples - expected)[500:-500].max() < lossy
    assert samples.dtype == np.float32


def sized(riff: int | None, data: int | None, *chunks: bytes) -> bytes:
    """A WAV whose header tells these sizes; None: the right one."""
    content = wav_file(1000)
    body = content[12:36] + b"".join(chunks) + b"data"
    samples = content[44:]
    body += struct.pack("<I", len(samples) if data is None else data) + samples
    size = len(body) + 4 if riff is None else riff
    return b"RIFF" + struct.pack("<I", size) + b"WAVE" + body


LIST = b"LIST" + struct.pack("<I", 5) + b"INFO\0\0"  # of an odd length, so it is padded


@pytest.mark.parametrize("chunks", [(), (LIST,)])
@pytest.mark.parametrize(
    ("riff", "data"),
    [
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x7FFFFFFF, 0x7FFFFFFF),
        (0x7FFFF024, 0x7FFFF000),
        (0x80000024, 0x80000000),
        (0, 0),
        (36, 0),
        (0xFFFFFFFF, None),
        (0, None),
        (None, 0xFFFFFFFF),
    ],
)
def test_a_wav_of_unknown_length_goes_to_its_end(riff, data, chunks):
    """
    Who writes into a pipe or a stream writes such sizes: ffmpeg, sox, arecord, services.
    """
    expected = Audio(wav_file(1000)).samples(16000)

    assert np.array_equal(Audio(sized(riff, data, *chunks)).samples(16000), expected)


def test_a_flac_of_unknown_length_is_refused_by_name():
    """
    An encoder that wrote into a pipe could not tell it, and libsndfile needs it.
    """
    flac = bytearray(sound_file("FLAC", 20000))
    flac[21] &= 0xF0  # 36 bits of STREAMINFO
    flac[22:26] = bytes(4)

    with pytest.raises(BadMedia, match="does not tell its length: save it anew"):
        Audio(bytes(flac))


@pytest.mark.parametrize(
    ("riff", "data"), [(None, 5000), (5000, None), (5000, 0xFFFFFFFF), (None, 0)]
)
def test_a_wav_that_tells_its_length_must_have_it(riff, data):
    """
    More than there is, and none in a file that is whole, is damage.
    """
    with pytest.raises(BadMedia):
        Audio(sized(riff, data)).samples(16000)


def test_what_a_lower_rate_cannot_hold_is_filtered_out():
    """
    A tone of 15 kHz is silence at 16,000 samples a second, and no other tone.
    """
    high = np.sin(2 * np.pi * 15000 * np.arange(48000) / 48000).astype(np.float32)

    samples = Audio(high, 48000).samples(16000)

    assert np.abs(samples[500:-500]).max() < 0.001


def test_samples_of_numpy_are_a_sound():
    """
    They stay as they are at their own rate.
    """
    audio = Audio(tone(8000), sample_rate=8000)

    assert (audio.format, audio.seconds, audio.n_samples(16000)) == (
        "samples",
        1.0,
        16000,
    )
    assert np.array_equal(audio.samples(8000), tone(8000))
    assert pickle.loads(pickle.dumps(audio)) == audio  # noqa: S301 -- our own
    assert audio.digest != Audio(tone(8000), sample_rate=8001).digest


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"OggS" + bytes(100),
        b"RIFF\0\0\0\0WAVE",
        b"FORM\0\0\0\x20AIFFCOMM" + bytes(100),
        wav_file()[:-2],
        wav_file()[:30],
        wav_file()[:22] + struct.pack("<H", 9) + wav_file()[24:],
        sound_file("WAV", subtype="GSM610"),
        sound_file("FLAC")[:40],
        sound_file("FLAC")[:-9],
        sound_file("FLAC", 2**20)[:3000],
        OGG[: len(OGG) // 2],
        OGG[:-9],
        MP3[: len(MP3) // 2],
        MP3[:-3000],
        b"ID3" + bytes(7),
        b"\xff\xfb" * 500,
        b"\xff" * 2**16,
    ],
    ids=range(18),
)
def test_what_is_no_sound_or_is_cut_off_is_refused(content):
    """
    Other files, files whose end is missing, and files that lie about their length.
    """
    with pytest.raises(BadMedia):
        Audio(content).samples(16000)


def test_a_sample_that_is_no_number_is_refused():
    """
    Rows made of it would be none, either.
    """
    content = bytearray(sound_file("WAV", 9, subtype="FLOAT"))
    content[-4:] = struct.pack("<f", float("nan"))

    with pytest.raises(BadMedia, match="not a number"):
        Audio(content).samples(16000)


def test_samples_of_another_kind_are_refused():
    """
    Samples are float32 from -1 to 1 with their rate, and a file has its own rate.
    """
    for wrong, rate in (
        (tone(9).astype(np.float64), 16000),
        (tone(10).reshape(2, 5), 16000),
        (tone(10), None),
        (tone(10), 1),
        (wav_file(), 16000),
        ("sound.wav", None),
    ):
        with pytest.raises(InvalidRequest):
            Audio(wrong, rate)
    for samples in (np.full(9, np.nan), np.full(9, np.inf), np.full(9, 3.0), []):
        with pytest.raises(BadMedia):
            Audio(np.array(samples, np.float32), 16000)


class LikeArray:
    """A sound of four samples, as far as its attributes tell."""

    dtype, shape = "float32", (4,)


class Raising:
    """Raises whatever it is asked for."""

    def __getattr__(self, name):
        raise ZeroDivisionError(name)


@pytest.mark.parametrize("kind", [LikeArray, Raising])
def test_an_object_that_is_no_array_is_no_sound(kind):
    """
    Whatever it raises, the error says what is a sound.
    """
    with pytest.raises(InvalidRequest, match="or a float32 array"):
        Audio(kind(), 16000)
