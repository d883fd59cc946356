"""Images and sounds, as users give them, meet a projector here."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

from pyllama_raw.core.encodes import RowKey
from pyllama_raw.core.namespace import Namespace
from pyllama_raw.media.audio import Audio
from pyllama_raw.media.limits import Media
from pyllama_raw.media.upload import DecodeStopped, Stop, never
from pyllama_raw.native.projector import Bitmap, Cut, EncodeCall, Projector, RowRun, Run


@dataclass(frozen=True, slots=True)
class MediaLayout:
    """Room that a part takes in a prompt: known from its size, before it is decoded."""

    runs: tuple[Run, ...]
    keys: tuple[bytes | None, ...]  # 32 bytes: rows with equal keys are equal


class MediaReader:
    """
    Plans and decodes the images and sounds of prompts for one projector.

    Args:
        identity: all that must be equal for two projectors to make equal rows.

    Thread:
        Any.
    """

    def __init__(self, projector: Projector, identity: bytes) -> None:
        self._projector, self._identity = projector, identity

    def key(self, part: Media, namespace: Namespace) -> RowKey:
        """Parts with equal ones have equal rows, and share them in *namespace* only."""
        return RowKey(sha256(self._identity + part.digest).digest(), namespace)

    def layout(self, part: Media) -> MediaLayout:
        """
        The layout of *part*, from its size.

        Raises:
            BadMedia: the size cannot be handled.
            Unsupported: the projector does not see, or does not hear.
        """
        with self._placeholder(part) as bitmap, self._projector.cut(bitmap) as cut:
            return MediaLayout(cut.runs, tuple(self._keys(part.digest, cut)))

    def read(self, part: Media, stop: Stop = never) -> Cut:
        """
        Decode *part* and cut it for the encodes; takes a second for a large image.

        Raises:
            BadMedia: it is damaged, or not what its first bytes say.
            Unsupported: the projector does not see, or does not hear.
            DecodeStopped: *stop* says so.
        """
        with self.decode(part, stop) as bitmap:
            return self._projector.cut(bitmap)

    def encode(
        self, part: Media, layout: MediaLayout, control: EncodeCall
    ) -> array[float] | None:
        """
        All rows of *part*, in order; None if it was cancelled.

        Raises:
            BadMedia, Unsupported: as read().
            EncodeFailed: the computation failed, or a value is not a number.
        """
        try:
            cut = self.read(part, lambda: control.cancelled)
        except DecodeStopped:
            return None
        with cut:
            assert cut.runs == layout.runs  # the size decides, and a bitmap has it
            rows = array("f")
            for index, run in enumerate(cut.runs):
                if isinstance(run, RowRun):
                    found = self._projector.encode(cut, index, control)
                    if found is None:
                        return None
                    rows += found
            return rows

    def decode(self, part: Media, stop: Stop = never) -> Bitmap:
        """The pixels or samples of *part*; raises as read()."""
        self._projector.check_support(is_sound=isinstance(part, Audio))
        if isinstance(part, Audio):
            samples = part.samples(self._projector.sample_rate or part.rate, stop)
            return Bitmap.sound(len(samples), samples)
        return Bitmap.image(part.width, part.height, part.pixels(stop))

    def _placeholder(self, part: Media) -> Bitmap:
        if isinstance(part, Audio):
            return Bitmap.sound(
                part.n_samples(self._projector.sample_rate or part.rate)
            )
        return Bitmap.image(part.width, part.height)

    def _keys(self, digest: bytes, cut: Cut) -> Iterator[bytes | None]:
        """
        A key for each run of rows; None for tokens, which are their own.

        All slices of an image have its digest, so the place among them counts.
        """
        for ordinal, run in enumerate(cut.runs):
            if isinstance(run, RowRun):
                facts = f" {ordinal} {run.n_cells} {run.n_pos}".encode()
                yield sha256(self._identity + digest + facts).digest()
            else:
                yield None
