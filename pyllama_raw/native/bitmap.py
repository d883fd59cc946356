"""An image or a sound, decoded; or only its size, which is enough to count its cells."""

from __future__ import annotations

from typing import Any, Self

from pyllama_raw.errors import BadMedia
from pyllama_raw.native.arrays import FLOAT32, UINT8, Array, pointer
from pyllama_raw.native.handle import Handle
from pyllama_raw.native.libllama import ffi, lib

MAX_SIDE = 2**14  # pixels; mtmd computes sizes in 32 bits
MAX_PIXELS = 2**26
MAX_SAMPLES = 2**27


class Bitmap(Handle):
    """
    Pixels or samples for Projector.cut().

    Thread:
        Any.
    """

    def __init__(self, pointer: Any) -> None:
        super().__init__(pointer, lib.mtmd_bitmap_free)
        self.is_sound = bool(lib.mtmd_bitmap_is_audio(pointer))

    @classmethod
    def image(cls, n_x: int, n_y: int, pixels: Array | bytes | None = None) -> Self:
        """
        An image of *pixels*, red, green and blue; without them, only its size.

        Raises:
            BadMedia: a side is 0 or too long, or the number of pixels is another one.
        """
        _check_size(n_x, n_y)
        data = ffi.NULL
        if pixels is not None:
            if len(pixels) != 3 * n_x * n_y:
                raise BadMedia(
                    f"{n_x} x {n_y} pixels take {3 * n_x * n_y} bytes, not {len(pixels)}"
                )
            data = pointer(pixels, UINT8)
        return cls(lib.plr_bitmap_image(n_x, n_y, data))

    @classmethod
    def sound(cls, n_samples: int, samples: Array | None = None) -> Self:
        """
        A sound of *samples* at the rate of the projector; without them, only its length.

        Raises:
            BadMedia: too few samples, or too many.
        """
        if not 2 <= n_samples <= MAX_SAMPLES:  # mtmd aborts on a single sample
            raise BadMedia(f"{n_samples} samples: 2 to {MAX_SAMPLES} are allowed")
        data = ffi.NULL
        if samples is not None:
            data = pointer(samples, FLOAT32, min_size=n_samples)
        return cls(lib.plr_bitmap_sound(n_samples, data))


def _check_size(n_x: int, n_y: int) -> None:
    if not (0 < n_x <= MAX_SIDE and 0 < n_y <= MAX_SIDE and n_x * n_y <= MAX_PIXELS):
        raise BadMedia(
            f"{n_x} x {n_y} pixels: sides of 1 to {MAX_SIDE} are allowed, and "
            f"{MAX_PIXELS} pixels in all"
        )
