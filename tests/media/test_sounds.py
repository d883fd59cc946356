"""What a sound is, found out by its bytes alone."""

import pickle

import numpy as np
import pytest

from pyllama_raw.errors import BadMedia, InvalidRequest
from pyllama_raw.media import Audio
from tests.media.files import flac_file, mp3_file, tone, wav_file


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (wav_file(), ("wav", 16000, 16000)),
        (wav_file(n_channels=2, rate=44100), ("wav", 16000, 44100)),
        (flac_file(20000), ("flac", 20000, 16000)),
        (flac_file(2**20), ("flac", 2**20, 16000)),
        (mp3_file(40), ("mp3", 40 * 1152, 44100)),
        (mp3_file(40, told=40), ("mp3", 40 * 1152, 44100)),
        (b"ID3\4\0\0\0\0\0\5junk!" + mp3_file(9), ("mp3", 9 * 1152, 44100)),
    ],
)
def test_length_is_that_of_the_file(content, expected):
    """
    A sound knows its format, samples and rate without being decoded.
    """
    audio = Audio(content)

    assert (audio.format, audio.n_frames, audio.rate) == expected


def test_an_array_becomes_a_file():
    """
    Samples of numpy are a WAV file, which the decoder gives the rate of the model.
    """
    audio = Audio(tone(8000), sample_rate=8000)

    assert (audio.format, audio.seconds, audio.n_samples(16000)) == ("wav", 1.0, 16000)
    assert Audio(audio.content) == audio
    assert pickle.loads(pickle.dumps(audio)) == audio  # noqa: S301 -- our own


def test_only_frames_of_an_mp3_reach_the_decoder():
    """
    What stands between the frames of an MP3 file is left out, and counts for the digest.
    """
    clean = mp3_file(6)
    dirty = clean[:416] + b"junk\xff\xfb" + clean[416:] + b"TAG" + bytes(125)

    audio = Audio(b"ID3\4\0\0\0\0\0\0" + dirty)

    assert audio.content == clean
    assert audio.digest != Audio(clean).digest


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"OggS" + bytes(100),
        b"RIFF\0\0\0\0WAVE",
        wav_file()[:-2],
        wav_file()[:30],
        flac_file()[:40],
        flac_file(told=2**30),
        flac_file()[:60],
        flac_file(2**20)[:3000],
        mp3_file(40, told=4_000_000_000),
        mp3_file(40, told=50),
        mp3_file(1),
        b"ID3" + bytes(7),
        b"\xff\xfb" * 500,
    ],
)
def test_what_is_no_sound_or_is_cut_off_is_refused(content):
    """
    Other files, files whose end is missing, and files that lie about their length.
    """
    with pytest.raises(BadMedia):
        Audio(content)


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
