"""
Images and sounds of a prompt, their limits, and their places in its text.

A chat template knows texts only. So each image or sound of a message becomes a marker that
nobody can guess, the template prints the markers where it prints the messages, and there the
rendered text is parted again.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from hashlib import sha256
from secrets import token_hex
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pyllama_raw.errors import BadMedia, InvalidRequest, reading, shown
from pyllama_raw.media import decoders
from pyllama_raw.media.decoders import (
    SoundHeader,
    Source,
    Stop,
    check_bytes,
    is_source,
    never,
    read_picture_header,
    read_pixels,
    read_samples,
    read_sound_header,
    read_source,
    resampled,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


PIXELS = "pixels"  # the format of what is decoded


class PilImage(Protocol):
    """The part of an image of Pillow that is used."""

    @property
    def size(self) -> tuple[int, int]: ...
    def convert(self, mode: str) -> Any: ...


_ALLOWED_IMAGES = "bytes, a Path, a uint8 array [height, width, 3] or Pillow's"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Image:
    """
    An image: the content of a file, or pixels. Pickles, and never changes.

    Args:
        source: a PNG, JPEG, GIF, BMP or WebP file as bytes or by its Path; an array of
            numpy, uint8 [height, width, 3]; or an image of Pillow.

    Raises:
        BadMedia: none of these, damaged at its beginning, or without a pixel.
        Unsupported: a file, but Pillow is not installed.
    """

    content: bytes
    format: str  # png, jpeg, gif, bmp, webp; pixels: red, green, blue, row by row
    width: int  # as it is shown
    height: int

    def __init__(self, source: Source | NDArray[np.uint8] | PilImage) -> None:
        if is_source(source):
            content = read_source(source)
            kind, width, height = read_picture_header(content)
        else:
            kind = PIXELS
            content, width, height = _pixels(source)
        if width < 1 or height < 1:
            raise BadMedia(f"an image of {width} x {height} pixels")
        values = content, kind, width, height
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    @property
    def digest(self) -> bytes:
        """32 bytes that tell this image from all others."""
        head = f"image {self.format} {self.width} {self.height} ".encode()
        return sha256(head + self.content).digest()

    def pixels(self, stop: Stop = never) -> bytes:
        """Red, green and blue, row by row; raises as read_pixels()."""
        if self.format == PIXELS:
            return self.content
        return read_pixels(self.content, stop)

    def __repr__(self) -> str:
        return f"Image({self.format}, {self.width} x {self.height})"


def _pixels(source: Any) -> tuple[bytes, int, int]:
    with reading("image", source, _ALLOWED_IMAGES):
        content, width, height = _read_pixels(source)
        if type(content) is bytes and len(content) == 3 * width * height:
            return content, width, height
    raise InvalidRequest("image", source, _ALLOWED_IMAGES)


def _read_pixels(source: Any) -> tuple[Any, int, int]:
    if hasattr(source, "convert") and hasattr(source, "size"):
        width, height = source.size
        return _converted(source), width, height
    shape, kind = getattr(source, "shape", None), str(getattr(source, "dtype", ""))
    if shape is None or len(shape) != 3 or shape[2] != 3 or kind != "uint8":
        value = f"{type(source).__name__} {kind} {shape}" if shape else source
        raise InvalidRequest("image", value, _ALLOWED_IMAGES)
    return source.tobytes(), shape[1], shape[0]


def _converted(source: PilImage) -> Any:
    try:
        return source.convert("RGB").tobytes()
    except Exception as error:
        raise BadMedia(f"an image that cannot be converted: {shown(error)}") from error


RATES = range(4000, 192_001)  # samples a second
_ALLOWED_SOUNDS = "bytes, a Path or a float32 array [n_samples]"
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
            kind, n_frames, rate = read_sound_header(content)
        else:
            kind = SAMPLES
            with reading("audio", source, _ALLOWED_SOUNDS):
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
        return decoders.n_samples(self.n_frames, self.rate, rate)

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
        raise InvalidRequest("audio", value, _ALLOWED_SOUNDS)
    if not isinstance(rate, int) or rate not in RATES:
        allowed = f"{RATES.start} to {RATES.stop - 1} with an array"
        raise InvalidRequest("sample_rate", rate, allowed)
    if not abs(samples).max(initial=0.0) <= 2.0:  # also if it is not a number
        raise BadMedia("samples beyond -1 to 1, or that are no numbers")
    return samples.tobytes(), len(samples), rate


Media = Image | Audio


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of one prompt, and of each image or sound in it."""

    max_parts: int
    max_bytes: int  # of an upload; also of pixels or samples that are given
    max_pixels: int
    max_seconds: float

    def check_count(self, n_parts: int) -> None:
        """Raise InvalidRequest if there are too many images and sounds."""
        if n_parts > self.max_parts:
            value = f"{n_parts} images and sounds"
            raise InvalidRequest("prompt", value, f"at most {self.max_parts}")

    def check(self, media: Sequence[Media]) -> None:
        """
        Raise unless all *media* are within the limits.

        Raises:
            InvalidRequest: there are too many.
            BadMedia: one is too large or too long.
        """
        self.check_count(len(media))
        for index, part in enumerate(media):
            if part.format != PIXELS:  # of which max_pixels is the limit
                check_bytes(len(part.content), self.max_bytes, index)
            if isinstance(part, Audio):
                if part.seconds > self.max_seconds:
                    allowed = f"at most {self.max_seconds:g} s are allowed"
                    raise BadMedia(f"{part.seconds:.1f} s, {allowed}", index)
            elif part.width * part.height > self.max_pixels:
                raise BadMedia(
                    f"{part.width} x {part.height} pixels, at most {self.max_pixels} "
                    "are allowed",
                    index,
                )


_DATA_URL = re.compile(r"data:(?:image|audio)/[\w.+-]+;base64,")


class PromptPiece(NamedTuple):
    """A part of a rendered prompt: a text, or which of the media stands there."""

    text: str
    origins: str  # of each character, as rendering/text.py says
    media: int | None = None


class MediaMessages:
    """
    Chat messages whose images and sounds are taken out.

    Args:
        messages: their content may be a list of parts: `text`, `image_url` and
            `input_audio` as OpenAI has them, with data in place of addresses; and
            `image` and `audio` with what Image() and Audio() take, but no text.
        limits: their number and bytes are checked before anything is read of them.

    Raises:
        InvalidRequest: a part is none of these, or there are too many.
        BadMedia: an image or a sound cannot be used.
    """

    def __init__(
        self, messages: Sequence[Mapping[str, Any]], limits: MediaLimits
    ) -> None:
        limits.check_count(sum(map(_n_media, messages)))
        self.media: list[Media] = []
        self._limits = limits
        self._name = token_hex(16)
        self.messages = [self._without_media(message) for message in messages]

    def pieces(self, text: str, origins: str) -> list[PromptPiece]:
        """
        The rendered *text* in pieces, with the media where their markers are.

        Raises:
            InvalidRequest: the template does not print each marker once and whole.
        """
        pieces, indices, at = [], [], 0
        for match in re.finditer(rf"<{self._name}-(\d+)>", text):
            start, end = match.span()
            if set(origins[start:end]) == {"m"}:
                indices.append(int(match[1]))
                pieces.append(PromptPiece(text[at:start], origins[at:start]))
                pieces.append(PromptPiece("", "", indices[-1]))
                at = end
        pieces.append(PromptPiece(text[at:], origins[at:]))
        if sorted(indices) != list(range(len(self.media))):
            value = (
                f"{len(self.media)} images and sounds, of which {len(indices)} appear"
            )
            allowed = "a chat template that prints each part of a message once"
            raise InvalidRequest("messages", value, allowed)
        return [piece for piece in pieces if piece.text or piece.media is not None]

    def _without_media(self, message: Any) -> Any:
        if not _n_media(message):
            return message  # parts of other kinds are the template's business
        texts = [self._text(part) for part in message["content"]]
        return {**message, "content": "".join(texts)}

    def _text(self, part: object) -> str:
        """The text of *part*, or the marker of what it shows."""
        if isinstance(part, Mapping):
            kind = part.get("type")
            if kind == "text" and isinstance(part.get("text"), str):
                return str(part["text"])
            if isinstance(kind, str) and kind in _KINDS:
                index = len(self.media)
                try:
                    self.media.append(_KINDS[kind](part.get(kind), self._limits))
                except BadMedia as error:
                    raise BadMedia(error.reason, index) from error
                return f"<{self._name}-{index}>"
        allowed = f"parts of the types text, {', '.join(_KINDS)}"
        raise InvalidRequest("content", part, allowed)


def list_pieces(prompt: Sequence[object]) -> tuple[list[PromptPiece], list[Media]]:
    """
    Pieces of a list of texts, images and sounds, all of which its author may write.

    Raises:
        InvalidRequest: something else is in it.
    """
    pieces: list[PromptPiece] = []
    media: list[Media] = []
    for part in prompt:
        if isinstance(part, Image | Audio):
            pieces.append(PromptPiece("", "", len(media)))
            media.append(part)
        elif isinstance(part, str):
            pieces.append(PromptPiece(part, "t" * len(part)))
        else:
            raise InvalidRequest("prompt", part, "texts, Image(...) and Audio(...)")
    return pieces, media


def _image_of_url(value: object, limits: MediaLimits) -> Image:
    url = value.get("url") if isinstance(value, Mapping) else value
    return Image(_data_of("image_url", url, limits))


def _audio_of_input(value: object, limits: MediaLimits) -> Audio:
    data = value.get("data") if isinstance(value, Mapping) else None
    return Audio(_decoded("input_audio", data, 0, limits))


def _given(kind: type[Image] | type[Audio], value: Any, limits: MediaLimits) -> Media:
    """An Image or Audio of *value*; a text may be a stranger's and names no file."""
    if isinstance(value, kind):
        return value
    return kind(read_source(value, limits.max_bytes) if is_source(value) else value)


_KINDS: dict[str, Callable[[Any, MediaLimits], Media]] = {
    "image_url": _image_of_url,
    "input_audio": _audio_of_input,
    "image": partial(_given, Image),
    "audio": partial(_given, Audio),
}


def _n_media(message: object) -> int:
    """The number of parts of *message* that are images and sounds."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return sum(map(_is_media, content)) if isinstance(content, list | tuple) else 0


def _is_media(part: object) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind in _KINDS


def _data_of(name: str, url: object, limits: MediaLimits) -> bytes:
    """The content of a data URL: nothing is fetched from anywhere."""
    match = _DATA_URL.match(url) if isinstance(url, str) else None
    if match is None or not isinstance(url, str):
        allowed = "data:image/...;base64,... because nothing is fetched from addresses"
        raise InvalidRequest(name, url, allowed)
    return _decoded(name, url, match.end(), limits)


def _decoded(name: str, data: object, start: int, limits: MediaLimits) -> bytes:
    """The bytes that *data* has in base64 from *start* on."""
    if isinstance(data, str):
        n_bytes = (len(data) - start) // 4 * 3 - data[-2:].count("=")
        check_bytes(n_bytes, limits.max_bytes)
        try:
            return b64decode(data[start:], validate=True)
        except (binascii.Error, ValueError):
            pass
    raise InvalidRequest(name, data, "data in base64")
