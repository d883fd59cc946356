"""FLAC: blocks of metadata, the first of which says how long the sound is, then frames."""

from __future__ import annotations

from pyllama_raw.errors import BadMedia

_N_INFO = 34  # bytes of that block
_N_TEXT = 18  # up to the end of the number of samples, of which 8 are their digest's


def read(content: bytes) -> tuple[bytes, int, int]:
    """The content, samples of each channel, samples a second. Raises BadMedia."""
    kind, length = content[4:5], int.from_bytes(content[5:8], "big")
    info = content[8 : 8 + _N_INFO]
    if kind not in (b"\0", b"\x80") or length != _N_INFO or len(info) < _N_INFO:
        raise BadMedia("a FLAC without its header")
    numbers = int.from_bytes(info[10:_N_TEXT], "big")
    rate, n_frames = numbers >> 44, numbers & (2**36 - 1)
    if n_frames == 0:
        raise BadMedia("a FLAC that does not say how long it is")
    least_bytes = int.from_bytes(info[4:7], "big")  # of a frame
    most_samples = int.from_bytes(info[2:4], "big")  # in one
    if most_samples < 16:
        raise BadMedia("a damaged FLAC: blocks of less than 16 samples")
    if (n_frames // most_samples) * max(least_bytes, 10) > len(content):
        raise BadMedia("the end of the FLAC is missing")
    return content, n_frames, rate
