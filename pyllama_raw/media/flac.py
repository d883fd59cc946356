"""FLAC: blocks of metadata, the first of which says how long the sound is, then frames."""

from __future__ import annotations

import re

from pyllama_raw.errors import BadMedia

_N_INFO = 34  # bytes of that block
_N_NUMBERS = 18  # of them, up to the number of samples
_SYNC = re.compile(rb"\xff[\xf8\xf9]")
_LAST_BYTES, _LAST_SYNCS = 2**20, 2000  # where the last frame is looked for


def read(content: bytes) -> tuple[bytes, int, int]:
    """The content, samples of each channel, samples a second. Raises BadMedia."""
    kind, length = content[4:5], int.from_bytes(content[5:8], "big")
    info = content[8 : 8 + _N_INFO]
    if kind not in (b"\0", b"\x80") or length != _N_INFO or len(info) < _N_INFO:
        raise BadMedia("a FLAC without its header")
    numbers = int.from_bytes(info[10:_N_NUMBERS], "big")
    rate, n_frames = numbers >> 44, numbers & (2**36 - 1)
    if n_frames == 0:
        raise BadMedia("a FLAC that does not say how long it is")
    end = _end(content, int.from_bytes(info[2:4], "big"))
    if end < n_frames:
        raise BadMedia(f"the end of the FLAC is missing: {end} of {n_frames} samples")
    return content, n_frames, rate


def _end(content: bytes, block: int) -> int:
    """Samples up to the end of the last frame that begins; frames have *block* samples."""
    start = max(len(content) - _LAST_BYTES, 0)
    found = [match.start() for match in _SYNC.finditer(content, start)]
    for at in reversed(found[-_LAST_SYNCS:]):
        if (end := _end_of_frame(content[at : at + 16], block)) is not None:
            return end
    return 0


def _end_of_frame(head: bytes, block: int) -> int | None:
    """Where the frame with this header ends, in samples; None: it is no header."""
    head = head.ljust(16, b"\0")
    size, at = head[2] >> 4, 5
    if size == 0:
        return None
    number = head[4]
    if number >= 0xC0:  # as UTF-8 has it, but longer
        n_more = 7 - (number ^ 0xFF).bit_length()
        number &= (1 << (6 - n_more)) - 1 if n_more < 6 else 0
        for byte in head[5 : 5 + n_more]:
            number = number << 6 | byte & 0x3F
        at += n_more
    if size in (6, 7):  # the number of samples follows
        n_bytes = size - 5
        n_samples = int.from_bytes(head[at : at + n_bytes], "big") + 1
        at += n_bytes
    elif size == 1:
        n_samples = 192
    else:
        n_samples = (576 << (size - 2)) if size < 6 else (256 << (size - 8))
    at += {12: 1, 13: 2, 14: 2}.get(head[2] & 15, 0)
    if at > 15 or _check(head[:at]) != head[at]:
        return None
    return number + n_samples if head[1] & 1 else number * block + n_samples


def _check(data: bytes) -> int:
    """The checksum of a header."""
    value = 0
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value << 1 ^ (0x107 if value & 0x80 else 0)) & 0xFF
    return value
