"""Prompts with images and sounds: tokens, and which of them stand for rows."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

from pyllama_raw.core.namespace import Namespace
from pyllama_raw.core.spans import Span
from pyllama_raw.prompts.messages import is_sequence

if TYPE_CHECKING:
    from pyllama_raw.engine.media_desk import MediaDesk
    from pyllama_raw.media.limits import Media


@dataclass(slots=True)
class MediaPrompt:
    """
    A prompt while it is put together, and when that is done.

    Args:
        desk: None: only text can be added.
        namespace: the requests that share the rows of its media.
    """

    _desk: MediaDesk | None = None
    _namespace: Namespace = None
    _n_parts: int = 0
    tokens: array[int] = field(default_factory=partial(array, "i"))
    spans: tuple[Span, ...] = ()
    payloads: tuple[object, ...] = ()  # one a span

    def add_media(self, part: Media) -> None:
        """
        Raises:
            BadMedia: its size cannot be handled.
            Unsupported: the projector does not see, or does not hear.
        """
        assert self._desk is not None
        placed = self._desk.place(part, self._n_parts, self._namespace)
        self._n_parts += 1
        start = len(self.tokens)
        self.spans += tuple(
            span._replace(start=start + span.start, stop=start + span.stop)
            for span in placed.spans
        )
        self.payloads += placed.payloads
        self.tokens += placed.tokens


def has_media(prompt: Any) -> TypeGuard[Sequence[object]]:
    """Whether *prompt* is a list with an image or a sound in it."""
    media = sys.modules.get("pyllama_raw.media")
    if media is None or not is_sequence(prompt) or not len(prompt):  # nobody has any
        return False
    kinds = media.Image, media.Audio
    if not isinstance(prompt[0], (str, *kinds)):
        return False
    return any(isinstance(part, kinds) for part in prompt)
