"""Bodies that ask for a response."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from pyllama_raw.serve.body import (
    HARMLESS,
    ResponseFormat,
    effort_variables,
    template_variables,
)
from pyllama_raw.serve.chats import ChatTurns, ConversationBody
from pyllama_raw.serve.failures import refused
from pyllama_raw.serve.responses.items import ItemList, conversation_of
from pyllama_raw.serve.tools import function_tool, tool_options

ABSENT = ("previous_response_id", "conversation", "background", "prompt")
LOGPROBS = "message.output_text.logprobs"


class ResponsesBody(ConversationBody):
    """A chat of items that is to go on. All of it is here: nothing is kept."""

    harmless: ClassVar[set[str]] = HARMLESS | {
        "access_programs", "client_metadata", "context_management", "max_tool_calls",
        "moderation", "prompt_cache_options", "truncation",
    }  # fmt: skip

    input: str | ItemList
    """
    A text, or items; what an assistant began may be the last one, and goes on. None at all are an
    empty message, by which some clients try a model.
    """
    instructions: str | None = None
    """What the model is told before the input."""
    max_output_tokens: Annotated[int, Field(ge=0)] | None = None
    """Most tokens of the answer; left out: what is left of the context."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the client runs; tools of other kinds are left out."""
    tool_choice: str | dict[str, Any] | None = None
    """"auto", "none", "required", or a function, or functions that are allowed."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls, which it may if this is left out."""
    text: dict[str, Any] | None = None
    """The form of the text, in `format`."""
    reasoning: dict[str, Any] | None = None
    """The `effort` that the template is told."""
    include: list[str] | None = None
    """What is told beside the answer: nothing is, as no thought is hidden."""
    previous_response_id: str | None = None
    """Refused: responses are not kept."""
    conversation: str | dict[str, Any] | None = None
    """Refused: conversations are not kept."""
    background: bool | None = None
    """Refused: an answer comes on the connection that asks for it."""
    prompt: dict[str, Any] | None = None
    """Refused: prompts are not kept."""

    @property
    def names(self) -> dict[str, str]:
        """Fields of the body, by what the engine calls them."""
        told = dict.fromkeys(("prompt", "content", "role", "messages"), "input")
        told |= {"max_tokens": "max_output_tokens", "json_schema": "text"}
        return told

    def chat(self) -> ChatTurns:
        """The chat. Raises Failure."""
        for name in ABSENT:
            if getattr(self, name):
                raise refused(name, "nothing is kept here: send all", "unsupported")
        if LOGPROBS in (self.include or ()):
            reason = "no log-probabilities are told here: ask for a chat completion"
            raise refused("include", reason, "unsupported")
        return conversation_of(self.instructions, self.input)

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools that the client runs."""
        return [tool for tool in self.tools or () if tool.get("type") == "function"]

    def calling(self, chat: ChatTurns | None = None) -> dict[str, Any]:
        """Options of the calls of tools. Raises Failure."""
        chat = chat or ChatTurns()
        functions = []
        for tool in (*(self.tools or ()), *chat.tools):
            if isinstance(tool, dict) and tool.get("type") == "function":
                functions.append(tool)
            else:  # tools that a server would run, or whose calls are no JSON
                chat.stand_in(
                    tool.get("type") if isinstance(tool, dict) else None, tool
                )
        tools = [
            function_tool(
                tool,
                tool.get("parameters"),
                **({"strict": True} if tool.get("strict") else {}),
            )
            for tool in functions
        ]
        return tool_options(tools, self.tool_choice, self.parallel_tool_calls)

    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        effort = (self.reasoning or {}).get("effort")
        return template_variables(effort_variables(effort))

    def more(self) -> dict[str, Any]:
        """Fields of SamplingParams that the dialect has other names for."""
        told: dict[str, Any] = {}
        if self.max_output_tokens is not None:
            told["max_tokens"] = self.max_output_tokens
        form = (self.text or {}).get("format")
        match form:
            case None | {"type": "text"}:
                pass
            case {"type": "json_object"}:
                told |= ResponseFormat(type="json_object").params()
            case {"type": "json_schema", "schema": dict(schema)}:
                told["json_schema"] = schema
            case _:
                reason = "give text, json_object, or json_schema with a schema"
                raise refused("text.format", reason)
        return told
