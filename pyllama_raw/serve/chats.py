"""
Bodies that ask for a chat to go on, whatever the form of the chat.

The positions of tokens that marks in a chat stand for are found by text: a prefix is rendered
alone and compared with the whole. What both begin with is the same in the next prompt, too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, ClassVar

from pyllama_raw import PyllamaError
from pyllama_raw.results import Operation
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.body import TextBody
from pyllama_raw.serve.conversation import ChatTurns
from pyllama_raw.serve.failures import refused
from pyllama_raw.serve.openai.messages import take_media
from pyllama_raw.serve.service import Service

MAX_MARKS = 4
PROBE = {"role": "user", "content": "\N{REPLACEMENT CHARACTER}"}


class ConversationBody(TextBody):
    """A chat that is to go on."""

    has_choices: ClassVar[bool] = False  # it may have several outputs

    @abstractmethod
    def chat(self) -> ChatTurns:
        """The chat. Raises Failure."""

    @abstractmethod
    def calling(self) -> dict[str, Any]:
        """Options of the calls of tools. Raises Failure."""

    @abstractmethod
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""

    @abstractmethod
    def more(self) -> dict[str, Any]:
        """Fields of SamplingParams that the dialect has other names for."""

    @property
    def is_parsed(self) -> bool:
        """Whether the reply is taken apart."""
        return True

    async def asked(self, service: Service) -> Asked:
        """As the engine takes it; raises Failure and InvalidSampling."""
        found, config = service.find(self.model, Operation.GENERATE), service.config
        if self.n not in (None, 1) and not self.has_choices:
            raise refused("n", "an answer has one output", "unsupported")
        chat = self.chat()
        options = self.options(found, config) | self.calling()
        options["reply"] = self.is_parsed
        options["template_kwargs"] = self.variables()
        params = self.params(found, config, **self.more())
        media = await take_media(chat.messages, found.engine, config, chat.places)
        asked = Asked(
            found=found,
            prompts=(chat.messages,),
            params=params,
            options=options,
            streams=bool(self.stream),
            names=self.names,
            media=media,
            origins=chat.origins,
        )
        if points := await _points_of(chat, asked):
            options["cache_points"] = points
        return asked


async def _points_of(chat: ChatTurns, asked: Asked) -> tuple[int, ...]:
    """The end of each marked prefix; none where the cache needs no such places."""
    engine, options = asked.found.engine, asked.of_chat
    if not chat.marks or engine.info.can_cut:
        return ()
    points: set[int] = set()
    try:
        whole = await engine.tokenize(chat.messages, **options)
    except PyllamaError:  # the request itself says what is wrong
        return ()
    variables = options["template_kwargs"] | {"add_generation_prompt": False}
    options["template_kwargs"] = variables
    for mark in sorted(chat.marks)[-MAX_MARKS:]:
        prefix: list[Any] = [*chat.messages[:mark]]
        if prefix[-1]["role"] == "system":  # many templates want a user's message
            prefix.append(PROBE)
        try:
            points.add(_n_common(whole, await engine.tokenize(prefix, **options)))
        except PyllamaError:  # the template takes no such chat
            continue
    return tuple(sorted(points - {0}))


def _n_common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
