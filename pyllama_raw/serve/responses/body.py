"""Bodies that ask for a response."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError, to_json

from pyllama_raw.serve import fields
from pyllama_raw.serve.body import Items, Limit
from pyllama_raw.serve.chats import NAMES, OF_MESSAGES, ChatTurns, ConversationBody
from pyllama_raw.serve.failures import refused
from pyllama_raw.serve.forms import ANY_OBJECT
from pyllama_raw.serve.responses.items import ItemList, conversation_of
from pyllama_raw.serve.tools import function_tool, tool_options

ABSENT = ("previous_response_id", "conversation", "background", "prompt")
MAX_METADATA = 2**14  # bytes: the answer repeats it, and it stays until then
LOGPROBS = "message.output_text.logprobs"


class ResponsesBody(ConversationBody):
    """A chat of items that is to go on. All of it is here: nothing is kept."""

    rules: ClassVar[fields.Rules] = fields.RESPONSES
    refuses: ClassVar[tuple[str, ...]] = ABSENT

    input: str | ItemList | None = None
    """
    A text, or items; what an assistant began may be the last one, and goes on. None at all are an
    empty message, by which some clients try a model.
    """
    instructions: str | None = None
    """What the model is told before the input."""
    max_output_tokens: Limit | None = None
    """Most tokens of the answer; left out: what is left of the context."""
    tools: Items[dict[str, Any]] | None = None
    """Functions that the client runs; tools of other kinds are left out."""
    tool_choice: str | dict[str, Any] | None = None
    """"auto", "none", "required", or a function, or functions that are allowed."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls, which it may if this is left out."""
    text: dict[str, Any] | None = None
    """The form of the text, in `format`."""
    reasoning: dict[str, Any] | None = None
    """The `effort` that the template is told."""
    include: Items[str] | None = None
    """What is told beside the answer: nothing is, as no thought is hidden."""
    metadata: dict[str, Any] | None = None
    """Repeated by the answer."""
    previous_response_id: str | None = None
    """Refused: responses are not kept."""
    conversation: str | dict[str, Any] | None = None
    """Refused: conversations are not kept."""
    background: bool | None = None
    """Refused: an answer comes on the connection that asks for it."""
    prompt: dict[str, Any] | None = None
    """Refused: prompts are not kept."""

    @model_validator(mode="after")
    def _check_metadata(self) -> Self:
        metadata = self.metadata
        if metadata and len(to_json(metadata)) > MAX_METADATA:
            reason, shown = (
                "metadata: at most {most} bytes of JSON",
                {"most": MAX_METADATA},
            )
            raise PydanticCustomError("too_long", reason, shown)
        return self

    @property
    def names(self) -> dict[str, str]:
        """Fields of the body, by what the engine calls them."""
        told = dict.fromkeys((*OF_MESSAGES, "messages"), "input") | NAMES
        told |= {"max_tokens": "max_output_tokens", "json_schema": "text"}
        return told | super().names

    def chat(self) -> ChatTurns:
        """The chat. Raises Failure."""
        for name in ABSENT:
            if getattr(self, name):
                raise refused(name, "nothing is kept here: send all", "unsupported")
        if LOGPROBS in (self.include or ()):
            reason = "no log-probabilities are told here: ask for a chat completion"
            raise refused("include", reason, "unsupported")
        return conversation_of(self.instructions, self.input or "")

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
        return self.variables_for(effort)

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
                told["json_schema"] = ANY_OBJECT
            case {"type": "json_schema", "schema": dict(schema)}:
                told["json_schema"] = schema
            case _:
                reason = "give text, json_object, or json_schema with a schema"
                raise refused("text.format", reason)
        return told
