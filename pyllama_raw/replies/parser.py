"""Takes a reply apart while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from pyllama_raw.replies.parts import Part
from pyllama_raw.replies.reader import ReplyReader
from pyllama_raw.replies.source import MARK, Source
from pyllama_raw.replies.spec import ReplySpec
from pyllama_raw.replies.typed import parameters_of
from pyllama_raw.replies.writer import Writer


class ReplyParser:
    """
    Takes one reply apart while it is generated.

    All that is generated is in its parts, but for delimiters: what is no call is content. However
    the text is cut into pieces, the parts say the same when they are put together.

    Args:
        spec: how the model writes. `spec.bound(is_special)` says which of its delimiters are
            special tokens; in one that is not bound, all delimiters are matched as text.
        tools: the tools of the request, as OpenAI's API has them. They give the types of
            arguments; calls without a delimiter are known by their names alone.
        prefix: the end of the prompt after its last message, which may begin reasoning.
        calls: whether calls are taken out; without, they are text of the content.
        new_id: makes the id of a call in formats that write none.
    """

    def __init__(
        self,
        spec: ReplySpec,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        prefix: str = "",
        calls: bool = True,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._special = spec.special
        self._source = Source()
        self._writer = Writer()
        self._reader = ReplyReader(
            spec,
            self._source,
            self._writer,
            dict(map(parameters_of, tools)) if calls else None,
            new_id or id_maker(spec),
        )
        self._reader.begin_after(prefix)

    def feed(self, text: str, special: bool = False) -> list[Part]:
        """
        The parts that *text*, the next of the reply, adds.

        Args:
            text: the next text, or with *special* the name of one special token in `spec.special`.
            special: *text* is such a token. Other tokens are fed as the text that they show.
        """
        text = text.replace(MARK, "\ufffd")
        self._source.add(MARK + text if special and text in self._special else text)
        next(self._reader.flow, None)
        return self._writer.taken()

    def finish(self) -> list[Part]:
        """The parts that the end of the reply adds. A call that is cut keeps what it has."""
        self._source.ended = True
        next(self._reader.flow, None)
        self._reader.end()
        return self._writer.taken()


def id_maker(spec: ReplySpec) -> Callable[[], str]:
    """Makes ids as the models of *spec* take them."""
    length = spec.calls and spec.calls.id_length
    if length:
        return lambda: uuid4().hex[:length]
    return lambda: f"call_{uuid4().hex[:24]}"
