"""WAV: chunks, each a name and a length; `fmt ` says how the samples in `data` are written."""

from __future__ import annotations

import struct

from pyllama_raw.errors import BadMedia

INTEGER, FLOAT, A_LAW, MU_LAW, EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
_BITS = {INTEGER: (8, 16, 24, 32), FLOAT: (32, 64), A_LAW: (8,), MU_LAW: (8,)}
_FORMAT = struct.Struct(
    "<HHIIHH"
)  # kind, channels, rate, bytes a second, a frame, bits
MAX_CHANNELS = 8


def read(content: bytes) -> tuple[bytes, int, int]:
    """The content, samples of each channel, samples a second. Raises BadMedia."""
    if content[8:12] != b"WAVE":
        raise BadMedia("no WAV file")
    frame_bytes, rate, at = 0, 0, 12
    while at + 8 <= len(content):
        name, length = struct.unpack_from("<4sI", content, at)
        at += 8
        if name == b"data":
            if not frame_bytes:
                break
            if at + length > len(content):
                raise BadMedia("the end of the WAV is missing")
            return content, length // frame_bytes, rate
        if name == b"fmt " and not frame_bytes:
            frame_bytes, rate = _format(content[at : at + length])
        at += length + length % 2
    raise BadMedia("a WAV without its format and samples")


def _format(chunk: bytes) -> tuple[int, int]:
    """Bytes of a sample of all channels, samples a second."""
    if len(chunk) < _FORMAT.size:
        raise BadMedia("a WAV without its format")
    kind, n_channels, rate, _, n_bytes, bits = _FORMAT.unpack_from(chunk)
    if kind == EXTENSIBLE and len(chunk) >= 26:
        (kind,) = struct.unpack_from("<H", chunk, 24)
    if bits not in _BITS.get(kind, ()) or not 0 < n_channels <= MAX_CHANNELS:
        raise BadMedia(
            f"a WAV of kind {kind} with {n_channels} channels of {bits} bits: "
            f"integers, floats, A-law and mu-law go, and {MAX_CHANNELS} channels"
        )
    if n_bytes != n_channels * bits // 8:
        raise BadMedia("a damaged WAV: channels and bits do not fit")
    return n_bytes, rate
