"""Bodies that ask for a message."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import TypedDict

from pyllama_raw.serve import fields
from pyllama_raw.serve.body import Items
from pyllama_raw.serve.chats import NAMES, OF_MESSAGES, ChatTurns, ConversationBody
from pyllama_raw.serve.failures import refused
from pyllama_raw.serve.messages.blocks import BlockList, MessageTurn, conversation_of
from pyllama_raw.serve.tools import function_tool, tool_options

CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessageToolChoice(TypedDict, total=False):
    """Whether tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str
    disable_parallel_tool_use: bool


class MessagesBody(ConversationBody):
    """A chat of messages that are made of blocks."""

    rules: ClassVar[fields.Rules] = fields.MESSAGES

    messages: Annotated[list[MessageTurn], Field(min_length=1, fail_fast=True)]
    """Messages; an answer that has begun may be the last one, and goes on."""
    system: str | BlockList | None = None
    """What the model is told before the first message."""
    stop_sequences: Items[str] | None = None
    """Texts that end the answer."""
    tools: Items[dict[str, Any]] | None = None
    """Tools that the client runs; those that a server would run are left out."""
    tool_choice: MessageToolChoice | None = None
    """Whether tools are called: "auto", "any", "none", or "tool" with the name of one."""
    thinking: dict[str, Any] | None = None
    """Whether the template lets the model think: "disabled", or any other type."""
    output_config: dict[str, Any] | None = None
    """The form of the text, and the effort that the template is told."""

    @property
    def names(self) -> dict[str, str]:
        """Fields of the body, by what the engine calls them."""
        told = dict.fromkeys(OF_MESSAGES, "messages") | NAMES
        told |= {"stop": "stop_sequences", "json_schema": "output_config"}
        return told | super().names

    def chat(self) -> ChatTurns:
        """The chat. Raises Failure."""
        chat = conversation_of(self.system, self.messages)
        if any(tool.get("cache_control") for tool in self.tools or ()) and self.system:
            chat.marks.add(1)
        return chat

    def calling(self, chat: ChatTurns | None = None) -> dict[str, Any]:
        """Options of the calls of tools. Raises Failure."""
        chat = chat or ChatTurns()
        for tool in self.tools or ():
            if "input_schema" not in tool:
                chat.stand_in(tool.get("name"), tool)
        tools = [
            function_tool(tool, tool["input_schema"])
            for tool in self.tools or ()
            if "input_schema" in tool
        ]
        given = self.tool_choice or {}
        choice = CHOICES.get(given.get("type", "auto")) or {"name": given.get("name")}
        is_parallel = not given.get("disable_parallel_tool_use")
        return tool_options(tools, choice, is_parallel)

    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        effort, thinks = (self.output_config or {}).get("effort"), None
        if self.thinking is not None:
            thinks = self.thinking.get("type") != "disabled"
        return self.variables_for(effort, thinks=thinks)

    def more(self) -> dict[str, Any]:
        """Fields of SamplingParams that the dialect has other names for."""
        told: dict[str, Any] = {}
        if self.stop_sequences:
            told["stop"] = tuple(self.stop_sequences)
        form = (self.output_config or {}).get("format")
        if form is not None:
            schema = form.get("schema") if isinstance(form, dict) else None
            if not isinstance(schema, dict):
                raise refused("output_config.format", "it needs a schema")
            told["json_schema"] = schema
        return told
