"""`/v1/chat/completions`: bodies, and answers of content, reasoning and calls of tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import to_json

from pyllama_raw import Delta, Result
from pyllama_raw.replies.parts import CallDelta, Content
from pyllama_raw.serve import fields
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.body import Items, Limit
from pyllama_raw.serve.chats import NAMES, OF_MESSAGES, ChatTurns, ConversationBody
from pyllama_raw.serve.failures import refused
from pyllama_raw.serve.openai.chunks import Chunks, chat_logprobs, reason_of
from pyllama_raw.serve.openai.messages import ChatMessage
from pyllama_raw.serve.tools import as_function, tool_call, tool_options


class ChatBody(ConversationBody):
    """A chat that is to go on."""

    has_choices: ClassVar[bool] = True

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    """Messages; an answer that has begun may be the last one, and goes on."""
    max_completion_tokens: Limit | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    """Whether each token has its log-probability."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Likely tokens that are listed with each token, if there are logprobs."""
    tools: Items[dict[str, Any]] | None = None
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
    reasoning: dict[str, Any] | None = None
    """`effort`, and `enabled`: whether the template lets the model think."""
    thinking: bool | dict[str, Any] | None = None
    """Whether the template lets the model think; as an object, by its `type`."""
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
        told = dict.fromkeys(OF_MESSAGES, "messages") | NAMES | super().names
        return told | (newer if is_newer else {})

    def chat(self) -> ChatTurns:
        """The chat. Raises Failure if something is asked for that is not done."""
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "it needs logprobs: true")
        last = self.messages[-1]
        has_begun = last["role"] == "assistant" and bool(last.get("content"))
        if self.continue_final_message not in (None, has_begun):
            reason = "the last message goes on if it is the assistant's"
            raise refused("continue_final_message", reason, "unsupported")
        if self.add_generation_prompt and has_begun:
            reason = "the assistant has begun an answer, which goes on"
            raise refused("add_generation_prompt", reason, "unsupported")
        for message in self.messages:
            # Templates print functions only, so a call of a custom tool is told as one.
            calls = message.get("tool_calls")
            if isinstance(calls, list):
                message["tool_calls"] = [as_function(call) for call in calls]  # type: ignore[typeddict-unknown-key]
        return ChatTurns(self.messages)

    def calling(self, chat: ChatTurns | None = None) -> dict[str, Any]:  # noqa: ARG002
        """Options of the calls of tools. Raises Failure."""
        return tool_options(self.tools, self.tool_choice, self.parallel_tool_calls)

    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        effort, thinks = self.reasoning_effort, None
        if isinstance(self.thinking, dict):
            thinks = self.thinking.get("type", "enabled") not in ("disabled", False)
        elif self.thinking is not None:
            thinks = self.thinking
        for name, value in (self.reasoning or {}).items():
            if name == "effort":
                effort = effort or value
            elif name in ("enabled", "enable"):
                thinks = bool(value)
            elif value and name not in ("summary", "generate_summary"):
                raise refused(f"reasoning.{name}", fields.NOT_DONE, "unsupported")
        asks = self.add_generation_prompt
        return self.variables_for(effort, thinks=thinks, asks=asks)

    def more(self) -> dict[str, Any]:
        """Fields of SamplingParams that the dialect has other names for."""
        told: dict[str, Any] = {}
        is_as_written = self.reasoning_format == "none" and not self.tools
        if is_as_written or self.parse_tool_calls is False:
            told["special"] = True
        if self.max_completion_tokens is not None:
            told["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            told["logprobs"] = self.top_logprobs or 0
        return told


class ChatCodec(Chunks):
    """Writes the answer to a chat."""

    def __init__(
        self, asked: Asked, body: ChatBody, prompt: str | None, *, has_alias: bool
    ) -> None:
        kind = "chat.completion.chunk" if asked.streams else "chat.completion"
        super().__init__("chatcmpl", kind, asked, with_usage=body.wants_usage)
        names = ("reasoning_content", "reasoning")[: 1 + has_alias]
        is_apart = body.reasoning_format != "none"
        self._reasoning = names if is_apart else ("content",)
        self._lists = asked.params.logprobs is not None
        self._verbose = {} if prompt is None else {"__verbose": {"prompt": prompt}}

    def begin(self, n_prompt: int) -> bytes:  # noqa: ARG002
        """The role of each output."""
        choice = b'"delta":{"role":"assistant","content":null},"finish_reason":null'
        return b"".join(self.frame(index, choice) for index in range(self._n))

    def delta(self, prompt: int, delta: Delta) -> bytes:  # noqa: ARG002 - there is one
        """The new parts; log-probabilities are those of all tokens since the last ones."""
        told: list[dict[str, Any]] = [*_told_of(delta, self._reasoning)]
        logprobs = b""
        if self._lists and delta.logprobs:
            logprobs = b'"logprobs":%b,' % to_json(chat_logprobs(delta.logprobs))
            told = told or [{}]
        frames = []
        for each in told:
            choice = b'"delta":%b,%b"finish_reason":null' % (to_json(each), logprobs)
            frames.append(self.frame(delta.index, choice))
            logprobs = b""
        return b"".join(frames)

    def ended(self, prompt: int, result: Result) -> bytes:  # noqa: ARG002
        """Why an output ended."""
        choice = b'"delta":{},' + to_json(reason_of(result))[1:-1]
        return self.frame(result.index, choice)

    def whole(self, results: Sequence[Sequence[Result]]) -> dict[str, Any]:
        """The answer at once."""
        choices = [
            {
                "index": result.index,
                "message": _message_of(result, self._reasoning),
                "logprobs": chat_logprobs(result.logprobs) if self._lists else None,
                **reason_of(result),
            }
            for result in results[0]
        ]
        return self.answer(choices, results) | self._verbose


def _told_of(delta: Delta, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """
    Objects `delta` of a stream, one for each part.

    The name of a call comes once and before its arguments, because clients add texts up.

    Args:
        names: of fields that have the reasoning.
    """
    if not delta.parts and delta.text:  # it is not taken apart
        yield {"content": delta.text}
    for part in delta.parts:
        if not isinstance(part, CallDelta):
            is_content = isinstance(part, Content)
            yield dict.fromkeys(("content",) if is_content else names, part.text)
            continue
        if part.name is not None:
            begun = tool_call(part.id, part.name, "")
            yield {"tool_calls": [{"index": part.index, **begun}]}
        if part.arguments:
            more = {"index": part.index, "function": {"arguments": part.arguments}}
            yield {"tool_calls": [more]}


def _message_of(result: Result, names: Sequence[str]) -> dict[str, Any]:
    """The whole message; *names* are those of fields that have the reasoning."""
    told: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    if result.reasoning:
        told |= dict.fromkeys(names, result.reasoning)
    told["content"] += result.text
    if result.tool_calls:
        told["content"] = told["content"] or None
        told["tool_calls"] = [
            tool_call(call.id, call.name, call.arguments) for call in result.tool_calls
        ]
    return told
