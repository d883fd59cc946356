"""
Options of a request beside its prompt and its sampling parameters, and how values are checked.

Rules:
1. Checked values are plain: an int, float, str or tuple, or a mapping that nobody can change. So
   no code of a caller's class runs in the engine thread.
2. What is given may be any object of a stranger: whatever it raises, the caller is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import islice
from numbers import Integral
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    Strict,
    TypeAdapter,
    ValidationError,
    WrapValidator,
)
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pyllama_raw.errors import InvalidRequest, reading
from pyllama_raw.options.chat_templates import ALLOWED, given_template
from pyllama_raw.options.frozen import allowed, place

if TYPE_CHECKING:
    from pyllama_raw.replies.spec import ReplySpec


T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

MAX_PRIORITY = 2**31 - 1
MAX_DEADLINE_S = 1e9  # Python's waits take no more than some 9e9 seconds
MAX_SALT = 1024  # characters
MAX_CACHE_POINTS = 1024
MAX_POLICY_DATA = 32
MAX_POSITION = 2**31 - 1
MAX_TEXTS = 2**20  # of one call: an iterator may never end
MAX_ADAPTERS = 16  # of a request
MAX_SCALE = 100  # products with it stay finite

Need = Literal["generate", "embed", "rank"]  # what a model must be able to do


def _plain_int(value: Any) -> Any:
    """Whole numbers of other libraries are ints to a reader."""
    is_other = isinstance(value, Integral) and not isinstance(value, int)
    return index(value) if is_other else value


def _listed(value: object) -> object:
    """Items of the list are checked where they are copied, because that may take long."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return value
    raise ValueError("a list of mappings, or None")


def _mapping(value: object) -> object:
    if isinstance(value, Mapping):
        return value
    raise ValueError("a mapping, or None")


def _beginning(value: object) -> object:
    """The first items of a mapping, one more than allowed: it may never end."""
    if not isinstance(value, Mapping):
        return value
    try:
        return dict(islice(value.items(), max(MAX_POLICY_DATA, MAX_ADAPTERS) + 1))
    except Exception as error:
        raise ValueError("a mapping that can be read") from error


def _reply(value: object) -> object:
    """Nobody can change a specification, so it is handed on as it is."""
    from pyllama_raw.replies.spec import ReplySpec  # few requests give one

    if value is None or type(value) is bool or type(value) is ReplySpec:
        return value
    raise ValueError("a ReplySpec, True, False or None")


def _template(value: str) -> str:
    """The text of the template that *value* is, names or has in a file."""
    try:
        return given_template(value).text
    except ValueError as error:
        raise ValueError(f"{ALLOWED} ({error})") from None


def _datum(value: object) -> object:
    """A value that no class of the caller's has made."""
    fits = value is None or type(value) in (bool, float)
    if type(value) is str:
        fits = len(value) <= MAX_SALT
    elif type(value) is int:
        fits = value.bit_length() <= 64
    if not fits:
        text_limit = f"text of at most {MAX_SALT} characters"
        raise ValueError(
            f"a number of at most 64 bits, True, False, None or {text_limit}"
        )
    return value


Whole = Annotated[int, Strict(), BeforeValidator(_plain_int)]
Flag = Annotated[bool, Strict()]
Name = Annotated[str, Strict(), Field(min_length=1, max_length=MAX_SALT)]
Priority = Annotated[Whole, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
SlotIndex = Annotated[Whole, Field(ge=0, le=MAX_POSITION)]
Seconds = Annotated[
    float, Strict(), Field(gt=0, le=MAX_DEADLINE_S, allow_inf_nan=False)
]
AdapterScale = Annotated[float, Field(ge=-MAX_SCALE, le=MAX_SCALE, allow_inf_nan=False)]

# What checkers allow callers to give, and what it is once it was checked.
if TYPE_CHECKING:
    Template = str
    Points = Iterable[int]
    Scales = Mapping[str, float]
    PolicyData = Mapping[str, str | int | float | bool | None]
    Tools = Sequence[Mapping[str, Any]]
    Variables = Mapping[str, Any]
    ReplyOption = ReplySpec | bool | None
else:
    _Position = Annotated[Whole, Field(ge=1, le=MAX_POSITION)]
    _Scale = Annotated[AdapterScale, Strict()]
    _Key = Annotated[str, Strict(), Field(max_length=MAX_SALT)]
    Fixed = Annotated[
        dict[K, V], BeforeValidator(_beginning), AfterValidator(MappingProxyType)
    ]

    Template = Annotated[str, Strict(), AfterValidator(_template)]
    Points = Annotated[
        tuple[_Position, ...], Field(max_length=MAX_CACHE_POINTS, fail_fast=True)
    ]
    Scales = Annotated[Fixed[Name, _Scale], Field(max_length=MAX_ADAPTERS)]
    PolicyData = Annotated[
        Fixed[_Key, Annotated[Any, PlainValidator(_datum)]],
        Field(max_length=MAX_POLICY_DATA),
    ]
    Tools = Annotated[Any, PlainValidator(_listed)]
    Variables = Annotated[Any, PlainValidator(_mapping)]
    ReplyOption = Annotated[Any, PlainValidator(_reply)]


class ChatOptions(TypedDict, total=False):
    """Options of chat messages and of the reply to them; other prompts take none."""

    tools: Tools | None
    """Functions that the model may call, as JSON schemas."""
    tool_choice: Name | None
    """
    "auto": the model decides, the default; "none": it is told of no tool; "required": it calls
    one or several; or the name of the tool that it calls.
    """
    parallel_tool_calls: Flag
    """Whether the model may call several tools in one reply; True by default."""
    reply: ReplyOption
    """
    True: the reply is taken apart into content, reasoning and calls, by what is known of the
    chat template, or by a ReplySpec. None: if tools are given. False: never.
    """
    template_kwargs: Variables | None
    """More variables of the chat template."""
    chat_template: Template | None
    """
    A template to use instead of the model's own: Jinja text that reads `messages`, the path of
    such a file, or a name such as "chatml" or "llama3".
    """


class TextOptions(TypedDict, total=False):
    """Options of serving a request."""

    priority: Priority
    """Requests with a lower number run first; 0 by default, negative ones are allowed."""
    deadline_s: Seconds | None
    """Seconds from now after which the request ends with what it has. None: never."""
    max_wait_s: Seconds | None
    """Seconds after which a request that has had no slot raises WaitedTooLong. None: never."""


class RequestOptions(TextOptions, ChatOptions, total=False):
    """
    Options of serving a request; only adapters and those of chats change its output.

    help() shows no fields of a TypedDict. Of any request: priority, deadline_s, max_wait_s,
    cache_salt, cache_points, slot, adapters, speculation, client, policy_data. Of a chat: tools,
    tool_choice, parallel_tool_calls, reply, template_kwargs, chat_template. docs/api.md, and the
    source below, describe each.
    """

    adapters: Scales | None
    """Loaded adapters by name, at most 16, each with the scale of its effect, -100 to 100; 0 is as if
    left out."""
    cache_salt: Name | None
    """Only requests with an equal salt share cached prefixes; text of 1 to 1024 characters."""
    cache_points: Points
    """Positions of the prompt, in tokens, that are worth a snapshot; at most 1024."""
    slot: SlotIndex | None
    """
    The slot that the request is to have if no other one runs in it, so that `save_slot()` finds it there. What
    others have left in it is given up. None, or one that the engine has not: the slot that is missed least.
    """
    speculation: Flag
    """Whether drafts of the output may be verified, if the engine has any; True by default."""
    client: Name | None
    """The sender of the request, for policies that are fair by client."""
    policy_data: PolicyData | None
    """Further facts of the request for a scheduling policy."""


# -- values ---------------------------------------------------------------------

_Text = Annotated[str, Strict(), Field(min_length=1)]


def _ids_or(value: Any, read_text: Callable[[Any], str]) -> Any:
    """Token ids are checked where they are copied, because that may take long."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return value
    return read_text(value)


NAME: TypeAdapter[str] = TypeAdapter(Name)
SALT: TypeAdapter[str | None] = TypeAdapter(Name | None)
TEXT: TypeAdapter[str] = TypeAdapter(_Text)
# Without fail_fast a million wrong texts would be a million errors: half a minute and 1 GB.
_SOME = Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)
TEXTS: TypeAdapter[list[str]] = TypeAdapter(Annotated[list[_Text], _SOME])
_TextOrIds = Annotated[_Text, WrapValidator(_ids_or)]
TEXTS_OR_IDS: TypeAdapter[Any] = TypeAdapter(Annotated[list[_TextOrIds], _SOME])
WAIT: TypeAdapter[float] = TypeAdapter(Annotated[float, Strict(), Field(ge=0)])
_OPTIONS: dict[type, TypeAdapter[Any]] = {}


@cache
def whole(low: int, high: int) -> TypeAdapter[int]:
    """Whole numbers from *low* to *high*."""
    return TypeAdapter(Annotated[Whole, Field(ge=low, le=high)])


def options_of(kind: type[T]) -> TypeAdapter[T]:
    """The options that a TypedDict lists; its rules are made once."""
    if kind not in _OPTIONS:
        _OPTIONS[kind] = TypeAdapter(kind)
    return _OPTIONS[kind]


def checked(kind: TypeAdapter[T], value: object, *names: str) -> T:
    """
    *value* as pydantic reads it.

    Args:
        names: of the argument; where *value* holds options, they have names of their own.

    Raises:
        InvalidRequest: the first mistake.
    """
    with reading(".".join(names) or "options", value, "a value that can be read"):
        try:
            return kind.validate_python(value)
        except ValidationError as error:
            item = error.errors(include_url=False)[0]
        name = place((*names, *item["loc"]))
        raise InvalidRequest(name, item["input"], allowed(item))
