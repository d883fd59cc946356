"""
Requests from arguments, JSON lines and conversations, and how each of them ends.

A line that is wrong becomes an error with its index; the lines beside it go on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from pyllama_raw import Message, Prompt
from pyllama_raw.api.results import Result
from pyllama_raw.core.request import FinishReason
from pyllama_raw.errors import InvalidRequest, PyllamaError
from pyllama_raw.media import Audio, Image
from pyllama_raw.options.config import Token
from pyllama_raw.options.frozen import mistake_of
from pyllama_raw.options.requests import RequestOptions
from pyllama_raw.options.sampling import SamplingParams

SUCCESS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one input: a result or an error."""

    index: int
    result: Result | None = None
    error: PyllamaError | None = None
    alternatives: tuple[Result, ...] = ()  # outputs after the first

    @property
    def results(self) -> tuple[Result, ...]:
        """All outputs."""
        return () if self.result is None else (self.result, *self.alternatives)

    @property
    def succeeded(self) -> bool:
        """Whether the request ran to its own end."""
        reasons = [result.finish_reason for result in self.results]
        return bool(reasons) and all(reason in SUCCESS for reason in reasons)


@dataclass(frozen=True, slots=True)
class InputRequest:
    """One request to make."""

    index: int
    prompt: Prompt
    sampling: SamplingParams
    options: Mapping[str, Any] = field(default_factory=dict)  # of RequestOptions


Input = InputRequest | Outcome  # the end of a line that cannot become a request


def from_prompts(
    prompts: Sequence[str],
    *,
    chat: Conversation | None,
    defaults: Mapping[str, Any],
    options: Mapping[str, Any],
    media: Sequence[Image | Audio] = (),
) -> list[Input]:
    """
    Requests for prompts given as arguments; each is what the user says in *chat*.

    Args:
        media: stand before each prompt.
    """
    sampling = SamplingParams(**defaults)

    def whole(prompt: str) -> Prompt:
        if chat is not None:
            return chat.with_message(prompt, media)
        return [*media, prompt] if media else prompt

    return [
        InputRequest(index, whole(prompt), sampling, options)
        for index, prompt in enumerate(prompts)
    ]


def from_file(
    name: str, *, defaults: Mapping[str, Any], options: Mapping[str, Any]
) -> list[Input]:
    """Requests of a file of JSON lines, `-` for stdin; empty lines do not count."""
    lines = lines_of(name)
    SamplingParams(**defaults)  # wrong for every line: refused at once
    return [
        parse_line(index, line, defaults=defaults, options=options)
        for index, line in enumerate(filter(bytes.strip, lines))
    ]


def lines_of(name: str) -> list[bytes]:
    """The lines of a file, `-` for stdin; a mark of UTF-8 is none of the text."""
    data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    return data.removeprefix(b"\xef\xbb\xbf").split(b"\n")


def parse_line(
    index: int,
    line: bytes,
    *,
    defaults: Mapping[str, Any],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Input:
    """
    Make a request of one JSON line.

    Args:
        defaults: sampling parameters that it may lack, and *options* of the request.
    """
    try:
        parsed = _Line.model_validate_json(line)
        fields = parsed.model_dump(include=parsed.model_fields_set & _SAMPLING.keys())
        sampling = SamplingParams(**{**defaults, **fields})
    except ValidationError as error:
        return Outcome(index, error=_refusal(error))
    except PyllamaError as error:
        return Outcome(index, error=error)
    prompt = parsed.prompt
    if prompt is None:
        prompt = parsed.model_dump(include={"messages"})["messages"]
    own = {name: getattr(parsed, name) for name in _OPTIONS}
    own = {name: value for name, value in own.items() if value is not None}
    return InputRequest(index, prompt, sampling, {**options, **own})


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: str
    content: str | list[dict[str, Any]]  # text, or parts of it, as OpenAI has them


class _LineBase(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | list[Token] | None = None
    messages: Annotated[list[_Message], Field(min_length=1)] | None = None

    @field_validator("stop", mode="before", check_fields=False)
    @classmethod
    def _one_stop_string(cls, value: object) -> object:
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _one_prompt(self) -> _LineBase:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt", self.prompt, "either prompt or messages")
        return self


_OPTIONS: dict[str, Any] = {
    name: (kind, None)
    for name, kind in get_type_hints(RequestOptions, include_extras=True).items()
}
_SAMPLING: dict[str, Any] = {
    name: (field.annotation, field)
    for name, field in SamplingParams.model_fields.items()
}
_Line: Any = create_model("_Line", __base__=_LineBase, **_OPTIONS, **_SAMPLING)


def _refusal(error: ValidationError) -> InvalidRequest:
    """The first mistake of a line."""
    item = error.errors(include_url=False)[0]
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequest):
        return cause
    name, value, words = mistake_of(_Line, item)
    if item["type"] in ("json_invalid", "model_type"):
        words = f"a JSON object ({item['msg']})"
    elif item["loc"][:1] == ("prompt",):
        name, words = "prompt", "text or a list of token ids"
    return InvalidRequest(name if item["loc"] else "line", value, words)


HELP = """\
/system TEXT  tell the model how to behave from here on; without TEXT: tell it nothing
/reset        forget what was said
/help         show this
/quit         end, as does the end of the input
Ctrl-C stops an answer; at the prompt, twice, it ends. A space before / makes it text."""


@dataclass(slots=True)
class Conversation:
    """A system message, and the turns of user and assistant after it."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def with_message(
        self, text: str, media: Sequence[Image | Audio] = ()
    ) -> list[Message]:
        """The messages to answer if the user now shows *media* and says *text*."""
        messages = list(self.turns)
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        # Media stand before the text, as parts of one message.
        content: object = text
        if media:
            kinds = ["image" if isinstance(m, Image) else "audio" for m in media]
            parts = [{"type": k, k: m} for k, m in zip(kinds, media, strict=True)]
            content = [*parts, {"type": "text", "text": text}]
        return [*messages, {"role": "user", "content": content}]

    def take(self, text: str, answer: str) -> None:
        """Keep a turn; one without an answer is forgotten, so that roles alternate."""
        if answer:
            self.turns.append({"role": "user", "content": text})
            self.turns.append({"role": "assistant", "content": answer})

    def command(self, line: str) -> str:
        """Do what *line* says; return what to tell the person."""
        name, _, text = line.partition(" ")
        text = text.strip()
        if name == "/system":
            self.system = text or None
            return "system message set" if text else "no system message"
        if name == "/reset" and not text:
            self.turns.clear()
            return "forgotten"
        return HELP if line == "/help" else f"{name} is no command: /help lists them"
