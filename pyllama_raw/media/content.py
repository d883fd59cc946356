"""
Places of the images and sounds of a prompt in its text.

A chat template knows texts only. So each image or sound of a message becomes a marker that
nobody can guess, the template prints the markers where it prints the messages, and there the
rendered text is parted again.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from secrets import token_hex
from typing import Any, NamedTuple

from pyllama_raw.errors import BadMedia, InvalidRequest
from pyllama_raw.media.audio import Audio
from pyllama_raw.media.image import Image
from pyllama_raw.media.limits import Media, MediaLimits
from pyllama_raw.media.upload import check_bytes, is_source, read_source

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
