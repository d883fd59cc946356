"""
MP3: frames, each with a header that says its length; anything may stand between them.

A decoder gets the frames alone, so it finds those that were counted here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from pyllama_raw.errors import BadMedia

# kbit/s by index, of MPEG-1 and of MPEG-2 and 2.5, layer III.
_BIT_RATES = (
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
)
_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
_MPEG_1, _LAYER_3, _MONO = 3, 1, 3
_SAME = 0xFFFE0C00  # bits of a header that all frames have in common
_MIN_FRAMES = 2


class _Frame(NamedTuple):
    n_bytes: int
    n_samples: int
    rate: int
    n_side: int  # bytes behind the header, before what the first frame may tell


def read(content: bytes) -> tuple[bytes, int, int]:
    """Its frames, samples of each channel, samples a second. Raises BadMedia."""
    frames = list(_frames(content))
    if len(frames) < _MIN_FRAMES:
        raise BadMedia("no MP3 file: there are no frames of layer III")
    at, first = frames[0]
    n_frames = len(frames)
    told = _told(content[at : at + first.n_bytes], first)
    if told is not None:
        n_frames -= 1  # the first one has no sound
        if abs(told - n_frames) > 1:
            raise BadMedia(f"the MP3 says it has {told} frames, it has {n_frames}")
    parts = (content[at : at + frame.n_bytes] for at, frame in frames)
    return b"".join(parts), n_frames * first.n_samples, first.rate


def _frames(content: bytes) -> Iterator[tuple[int, _Frame]]:
    """Places of all frames of the kind of the first one, which another one follows."""
    at, kind = _behind_tag(content), None
    while (at := content.find(b"\xff", at)) >= 0:
        frame = _frame(content, at)
        (head,) = struct.unpack_from(">I", content, at) if frame else (0,)
        if frame is None or kind not in (None, head & _SAME):
            at += 1
            continue
        if kind is None and _frame(content, at + frame.n_bytes) is None:
            at += 1
            continue
        if at + frame.n_bytes > len(content):
            return
        kind = head & _SAME
        yield at, frame
        at += frame.n_bytes


def _behind_tag(content: bytes) -> int:
    """Where an ID3 tag ends: its length has 7 bits a byte."""
    if content[:3] != b"ID3" or len(content) < 10:
        return 0
    a, b, c, d = content[6:10]
    return 10 + (a << 21 | b << 14 | c << 7 | d)


def _frame(content: bytes, at: int) -> _Frame | None:
    """The frame whose header stands at *at*."""
    head = content[at : at + 4]
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return None
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    index, rate_index, padding = head[2] >> 4, head[2] >> 2 & 3, head[2] >> 1 & 1
    if (
        version not in _RATES
        or layer != _LAYER_3
        or index in (0, 15)
        or rate_index == 3
    ):
        return None
    is_first = version == _MPEG_1
    rate = _RATES[version][rate_index]
    n_samples = 1152 if is_first else 576
    bit_rate = 1000 * _BIT_RATES[not is_first][index]
    is_mono = head[3] >> 6 == _MONO
    n_side = (17 if is_mono else 32) if is_first else (9 if is_mono else 17)
    n_check = 0 if head[1] & 1 else 2
    n_bytes = n_samples // 8 * bit_rate // rate + padding
    return _Frame(n_bytes, n_samples, rate, n_check + n_side)


def _told(frame: bytes, facts: _Frame) -> int | None:
    """How many frames there are besides the first one, if that says so."""
    at = 4 + facts.n_side
    if frame[at : at + 4] not in (b"Xing", b"Info"):
        return None
    flags, n_frames = struct.unpack_from(">II", frame.ljust(at + 16, b"\0"), at + 4)
    return n_frames if flags & 1 else None
