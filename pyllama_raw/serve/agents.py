"""What the bodies of dialects for agents have in common: one answer, which is taken apart."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from pyllama_raw.results import Operation
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.body import TextBody, template_variables
from pyllama_raw.serve.conversation import ChatTurns
from pyllama_raw.serve.failures import refused
from pyllama_raw.serve.marks import points_of
from pyllama_raw.serve.openai.messages import take_media
from pyllama_raw.serve.service import Service


class AgentBody(TextBody):
    """A chat that is to go on, in another form than that of chats."""

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

    async def asked(self, service: Service) -> Asked:
        """As the engine takes it; raises Failure and InvalidSampling."""
        found = service.find(self.model, Operation.GENERATE)
        if self.n not in (None, 1):
            raise refused("n", "an answer has one output", "unsupported")
        chat = self.chat()
        options: Any = {**self.options(found, service.config), **self.calling()}
        options["reply"] = True
        options["template_kwargs"] = template_variables(self.variables(), None)
        params = self.params(found, service.config, **self.more())
        media = await take_media(
            chat.messages, found.engine, service.config, chat.places
        )
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
        if points := await points_of(chat, asked):
            asked.options["cache_points"] = points
        return asked


def function_tool(
    name: Any, description: Any, parameters: Any, **fields: Any
) -> dict[str, Any]:
    """A tool as chat templates know it."""
    function = {"name": name, "parameters": parameters or {"type": "object"}, **fields}
    if description is not None:
        function["description"] = description
    return {"type": "function", "function": function}
