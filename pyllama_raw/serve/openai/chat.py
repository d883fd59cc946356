"""Bodies of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from pyllama_raw.serve.body import effort_variables, template_variables
from pyllama_raw.serve.chats import ConversationBody
from pyllama_raw.serve.conversation import ChatTurns
from pyllama_raw.serve.failures import refused
from pyllama_raw.serve.openai.messages import ChatMessage
from pyllama_raw.serve.tools import tool_options

_OF_MESSAGES = ("prompt", "content", "role", "chat messages", "images", "sounds")
NAMES = {  # of fields, by what the engine calls them
    **dict.fromkeys(_OF_MESSAGES, "messages"),
    "tools": "tools",
    "a call that has to be made": "tool_choice",
    "template_kwargs": "chat_template_kwargs",
}


class ChatBody(ConversationBody):
    """A chat that is to go on."""

    has_choices: ClassVar[bool] = True

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    """Messages; an answer that has begun may be the last one, and goes on."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    """Whether each token has its log-probability."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Likely tokens that are listed with each token, if there are logprobs."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call."""
    tool_choice: str | dict[str, Any] | None = None
    """
    "auto": the model decides; "none", "required", the function that it must call, or the
    `allowed_tools`, which are all that it is told of.
    """
    parallel_tool_calls: bool | None = None
    """Whether one answer may call several functions, which it may unless this is false."""
    parse_tool_calls: bool | None = None
    """False: the text stays as the model writes it, with calls and reasoning in it."""
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    """"none": reasoning stays in the content, otherwise it is `reasoning_content`."""
    reasoning_effort: str | None = None
    """A variable of the chat template; "none" also asks it for no reasoning."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables of the chat template."""
    add_generation_prompt: bool | None = None
    """Whether the template asks for an answer, which it does unless one has begun."""
    continue_final_message: bool | None = None
    """Whether the last message is to go on, which is so if it is the assistant's."""

    verbose: bool = False
    """Whether a whole answer tells the prompt as the model gets it, in `__verbose`."""

    @property
    def names(self) -> dict[str, str]:
        """Fields of the body, by what the engine calls them."""
        newer = {"max_tokens": "max_completion_tokens"}
        is_newer = self.max_completion_tokens is not None
        return super().names | NAMES | (newer if is_newer else {})

    @property
    def is_parsed(self) -> bool:
        """Whether the reply is taken apart."""
        if self.parse_tool_calls is False:
            return False
        return self.reasoning_format != "none" or bool(self.tools)

    def chat(self) -> ChatTurns:
        """The chat. Raises Failure if something is asked for that is not done."""
        self._check()
        return ChatTurns(self.messages)

    def calling(self) -> dict[str, Any]:
        """Options of the calls of tools. Raises Failure."""
        return tool_options(self.tools, self.tool_choice, self.parallel_tool_calls)

    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        effort = effort_variables(self.reasoning_effort)
        given = effort | (self.chat_template_kwargs or {})
        return template_variables(given, self.add_generation_prompt)

    def more(self) -> dict[str, Any]:
        """Fields of SamplingParams that the dialect has other names for."""
        told: dict[str, Any] = {} if self.is_parsed else {"special": True}
        if self.max_completion_tokens is not None:
            told["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            told["logprobs"] = self.top_logprobs or 0
        return told

    def reasoning_names(self, *, has_alias: bool) -> tuple[str, ...]:
        """Names of fields of the answer that have the reasoning."""
        if self.reasoning_format == "none":
            return ("content",)
        return ("reasoning_content", *(["reasoning"] if has_alias else []))

    def _check(self) -> None:
        """Raise Failure if something is asked for that is not done."""
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs", "it needs logprobs: true")
        last = self.messages[-1]
        has_begun = last["role"] == "assistant" and bool(last.get("content"))
        if self.continue_final_message not in (None, has_begun):
            reason = "the last message goes on if it is the assistant's"
            raise refused("continue_final_message", reason, "unsupported")
        if self.add_generation_prompt and has_begun:
            reason = "the assistant has begun an answer, which goes on"
            raise refused("add_generation_prompt", reason, "unsupported")
