"""Limits of the images and sounds of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyllama_raw.errors import BadMedia, InvalidRequest
from pyllama_raw.media.audio import Audio
from pyllama_raw.media.image import PIXELS, Image
from pyllama_raw.media.upload import check_bytes

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
