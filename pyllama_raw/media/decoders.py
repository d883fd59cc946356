"""
Uploads, and what Pillow and libsndfile make of them.

Rules:
1. A decoder reads an upload within bounds, and until it is stopped.
2. Only some formats are tried. Size, orientation, length and rate come from the header, so an
   upload can be refused before anything is unpacked.
3. A decoder of images sees only what its pixels need: the parts of a PNG or a JPEG that have pixels,
   and how to show them. Texts, profiles and previews are left out before, because they are of no
   use for pixels, and unpack to more than the image.
4. A header that was written before the sound was does not know the length: then a WAV goes to its
   end, and a FLAC, which libsndfile cannot read so, is refused by that name. Of several channels
   the mean counts. soxr makes another rate of them: it filters out what the new rate cannot hold.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from pyllama_raw.errors import BadMedia, PyllamaError, Unsupported, shown

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


MAX_BYTES = 2**28  # whatever the limits of an engine

Source = bytes | bytearray | memoryview | os.PathLike[str]
Stop = Callable[[], bool]


class DecodeStopped(Exception):
    """Nobody wants what is decoded any more."""


def never() -> bool:
    """Decode to the end."""
    return False


class Upload(BytesIO):
    """
    A file in memory.

    Args:
        max_reads: calls that read or seek; what is in millions of tiny parts takes a
            decoder seconds, and is no image or sound of anybody.
        stop: whether to end soon.

    Raises, from read():
        BadMedia: it takes more reads.
        DecodeStopped: *stop* says so.
    """

    def __init__(self, content: bytes, max_reads: int, stop: Stop = never) -> None:
        super().__init__(content)
        self._n_left, self._stop = max_reads, stop

    def read(self, size: int | None = -1, /) -> bytes:
        if self._stop():
            raise DecodeStopped
        if not self._spend():
            raise BadMedia("it has too many parts: save it anew")
        return super().read(size)

    def readinto(self, buffer: Any, /) -> int:
        """Read as read() does, but end where read() raises, because C calls it."""
        return super().readinto(buffer) if self._spend() else 0

    def _spend(self) -> bool:
        self._n_left -= 1
        return self._n_left >= 0


def is_source(value: object) -> TypeGuard[Source]:
    return isinstance(value, bytes | bytearray | memoryview | os.PathLike)


def read_source(source: Source, max_bytes: int = MAX_BYTES) -> bytes:
    """
    The bytes of *source*; a path is a Path, because a text of a stranger names no file.

    Raises:
        BadMedia: the file cannot be read, is none, or is too large.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        check_bytes(memoryview(source).nbytes, max_bytes)
        return bytes(source)
    try:
        path = Path(source)
    except Exception as error:  # whatever a stranger's object raises
        raise BadMedia(f"{shown(source)} is no path: {shown(error)}") from error
    try:
        with open(path, "rb", opener=_open_at_once) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BadMedia(f"{path.name} is no regular file")
            check_bytes(status.st_size, max_bytes)
            return stream.read()
    except (OSError, ValueError) as error:
        raise BadMedia(f"{path.name}: {error}") from error


def check_bytes(n_bytes: int, max_bytes: int, index: int | None = None) -> None:
    """Raise BadMedia if an upload has too many bytes."""
    if n_bytes > max_bytes:
        raise BadMedia(f"{n_bytes} bytes, at most {max_bytes} are allowed", index)


def _open_at_once(path: str, flags: int) -> int:
    """A FIFO that nobody writes to would be waited for."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


INSTALL = 'run `pip install "pyllama_raw[media]"`'
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP")
PICTURE_KINDS = "PNG, JPEG, GIF, BMP or WebP"
MAX_PICTURE_READS = 2**16
PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
MAX_PARTS = 2**13
MAX_SCANS = 40  # of a JPEG; each scan passes over all pixels
_PIXELS = {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"}
_SCAN, _PADDING, _EXIF, _ADOBE, _COMMENT = 0xFFDA, 0xFFFF, 0xFFE1, 0xFFEE, 0xFFFE
_NOTES = {*range(_EXIF, 0xFFF0), _COMMENT} - {_ADOBE}  # Adobe's names the colours
_ORIENTATION = 0x0112
_EXIF_NAME = b"Exif\0\0"


class PictureHeader(NamedTuple):
    """Facts that are known of an image before it is decoded."""

    format: str  # png, jpeg, gif, bmp, webp
    width: int  # as it is shown
    height: int


def read_picture_header(content: bytes) -> PictureHeader:
    """
    Raises:
        BadMedia: it is no image, or damaged at its beginning.
        Unsupported: Pillow is not installed.
    """
    with _open_picture(content, never) as (picture, turn):
        width, height = picture.size
        if turn >= 5:  # on its side
            width, height = height, width
        return PictureHeader(str(picture.format).lower(), width, height)


def read_pixels(content: bytes, stop: Stop = never) -> bytes:
    """
    Red, green and blue of each pixel, row by row; of several frames the first one's.

    Alpha is left out, as it stands in the file: the colours below it are not mixed with
    another one. Of 16 bits the upper eight count.

    Raises:
        BadMedia: it is damaged, or its end is missing.
        DecodeStopped: *stop* says so.
    """
    with _open_picture(content, stop) as (picture, turn):
        picture.load()
        if picture.mode == "P" and picture.palette is None:
            raise BadMedia("its palette is missing")
        picture.info.pop("transparency", None)
        is_deep = picture.mode.startswith("I")
        upright = _upper_bits(picture) if is_deep else picture
        if turn > 1:
            upright = upright.transpose(_turns()[turn - 2])
        return upright.convert("RGB").tobytes()


@contextmanager
def _open_picture(content: bytes, stop: Stop) -> Iterator[tuple[Picture, int]]:
    """An image, of which its header is read, and its orientation."""
    pillow = _pillow()
    file, exif = needed(content)
    try:
        with pillow.open(
            Upload(file, MAX_PICTURE_READS, stop), formats=FORMATS
        ) as picture:
            yield picture, orientation(exif or picture.info.get("exif", b""))
    except (PyllamaError, DecodeStopped):
        raise
    except pillow.UnidentifiedImageError:
        begin = content[:8]
        raise BadMedia(
            f"no {PICTURE_KINDS} file, or a damaged one: {begin!r}..."
        ) from None
    except Exception as error:  # noqa: BLE001 - Pillow raises what its plugins raise
        raise BadMedia(f"it cannot be decoded: {error}") from None


def _pillow() -> Any:
    try:
        import PIL.Image
        import PIL.WebPImagePlugin  # else all formats are loaded to find it
    except ImportError as error:
        raise Unsupported("files of images", INSTALL) from error
    return PIL.Image


def _turns() -> tuple[Any, ...]:
    """Transpositions that undo the orientations 2 to 8."""
    ways = _pillow().Transpose
    return (
        ways.FLIP_LEFT_RIGHT, ways.ROTATE_180, ways.FLIP_TOP_BOTTOM, ways.TRANSPOSE,
        ways.ROTATE_270, ways.TRANSVERSE, ways.ROTATE_90,
    )  # fmt: skip


def _upper_bits(picture: Picture) -> Picture:
    """A grey image of 16 bits in 8."""
    import numpy as np

    grey = (np.asarray(picture) >> 8).astype(np.uint8)
    return _pillow().fromarray(grey)  # type: ignore[no-any-return]


class FilePart(NamedTuple):
    """A piece of a file; empty if no decoder needs it."""

    content: bytes = b""
    is_exif: bool = False


def needed(content: bytes) -> tuple[bytes, bytes]:
    """
    The file without what is no pixels, and its EXIF data.

    Raises:
        BadMedia: it is damaged, its end is missing, or it has too many parts.
    """
    if content.startswith(PNG):
        parts = _chunks(content)
    elif content.startswith(JPEG):
        parts = _segments(content)
    else:
        return content, b""
    contents, exif = [], b""
    try:
        for count, part in enumerate(parts):
            if count > MAX_PARTS:
                raise BadMedia(f"more than {MAX_PARTS} parts: save it anew")
            if not part.is_exif:
                contents.append(part.content)
            elif not exif:
                exif = part.content
    except struct.error:
        raise BadMedia("the end of the file is missing, or it is damaged") from None
    return b"".join(contents), exif


def orientation(exif: bytes) -> int:
    """1 to 8: how an image is turned to be shown, as EXIF counts; 1: as it is."""
    exif = exif.removeprefix(_EXIF_NAME)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, start)
        for at in range(start + 2, start + 2 + 12 * count, 12):
            tag, _, _, value = struct.unpack_from(f"{order}HHIH", exif, at)
            if tag == _ORIENTATION:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass  # it is damaged, which the pixels need not be
    return 1


def _chunks(content: bytes) -> Iterator[FilePart]:
    """Chunks of a PNG, up to its end: length, name, data, checksum."""
    yield FilePart(PNG)
    at, name = len(PNG), b""
    while name != b"IEND":
        length, name = struct.unpack_from(">I4s", content, at)
        end = at + 12 + length
        if end > len(content):
            raise struct.error
        if name == b"eXIf":
            yield FilePart(content[at + 8 : end - 4], is_exif=True)
        else:
            yield FilePart(content[at:end] if name in _PIXELS else b"")
        at = end


def _segments(content: bytes) -> Iterator[FilePart]:
    """Segments of a JPEG, marker, length and data; then the first scan and the rest."""
    if content.count(b"\xff\xda") > MAX_SCANS:
        raise BadMedia(f"a JPEG of more than {MAX_SCANS} scans: save it anew")
    yield FilePart(content[:2])
    at, marker = 2, 0
    while marker != _SCAN:
        marker, length = struct.unpack_from(">HH", content, at)
        if marker == _PADDING:  # any number of bytes before a marker
            at += 1
            yield FilePart()
            continue
        if marker < 0xFF00:
            raise struct.error
        segment = content[at : at + 2 + length]
        if marker == _EXIF and segment.startswith(_EXIF_NAME, 4):
            yield FilePart(segment[4:], is_exif=True)
        elif marker in _NOTES:
            yield FilePart()
        else:
            yield FilePart(segment)
        at += 2 + length
    yield FilePart(content[at:])


if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Samples = NDArray[np.float32]

SOUND_KINDS = "WAV, FLAC, MP3 or OGG"
MAX_FRAMES = 2**27
MAX_CHANNELS = 8
MAX_SOUND_READS = 2**18  # an MP3 takes four a frame
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


def read_sound_header(content: bytes) -> SoundHeader:
    """
    Raises:
        BadMedia: it is no sound, or damaged; of a WAV also if its end is missing.
        Unsupported: soundfile is not installed.
    """
    with _open_sound(content) as file:
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
    with _open_sound(content) as file:
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
def _open_sound(content: bytes) -> Iterator[Any]:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without the library
        raise Unsupported("files of sounds", INSTALL) from error
    if not content.startswith(_MAGICS):
        raise BadMedia(f"no {SOUND_KINDS} file: it begins with {content[:8]!r}")
    content = _with_sizes(content)
    try:
        with soundfile.SoundFile(Upload(content, MAX_SOUND_READS)) as file:
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
        raise BadMedia(f"{file.format} of {file.subtype}: give {SOUND_KINDS}")
    if file.frames == UNKNOWN_FRAMES:
        raise BadMedia("its header does not tell its length: save it anew, or as WAV")
    if file.channels > MAX_CHANNELS or not 0 < file.frames <= MAX_FRAMES:
        facts = f"{file.channels} channels of {file.frames} samples"
        raise BadMedia(f"{facts}: at most {MAX_CHANNELS} of 1 to {MAX_FRAMES}")
