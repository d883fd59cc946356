"""
Tools of a chat, made of Python functions, and the calls that a model writes.

    result = await engine.complete(messages, tools=[schema_of(weather)])
    for call in result.tool_calls:
        print(weather(**arguments_of(call)))
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from inspect import Parameter, getdoc, isroutine, signature
from typing import Any, cast

from pydantic import PydanticUserError, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ArgumentsSchema

from pyllama_raw.errors import InvalidRequest
from pyllama_raw.replies.parser import CallDelta, Content, Part, Reasoning, ToolCall
from pyllama_raw.replies.spec import (
    CallsSpec,
    JsonCall,
    LiteralCall,
    MessageRule,
    MessagesSpec,
    ObjectCall,
    ReasoningSpec,
    ReplySpec,
    TaggedCall,
)

__all__ = [
    "CallDelta",
    "CallsSpec",
    "Content",
    "JsonCall",
    "LiteralCall",
    "MessageRule",
    "MessagesSpec",
    "ObjectCall",
    "Part",
    "Reasoning",
    "ReasoningSpec",
    "ReplySpec",
    "TaggedCall",
    "ToolCall",
    "arguments_of",
    "schema_of",
]

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
NAMELESS = {
    Parameter.POSITIONAL_ONLY: "{}, /",
    Parameter.VAR_POSITIONAL: "*{}",
    Parameter.VAR_KEYWORD: "**{}",
}


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """
    The tool that a model may call *function* as, in the form of OpenAI's API.

    Its docstring is the description. Its parameters are typed as pydantic reads them, so
    `Annotated[str, Field(description="...")]` describes one.

    Raises:
        InvalidRequest: it is no named function, a parameter has no name (`*args`), or has a
            type that JSON does not have.
    """
    name = getattr(function, "__name__", None)
    if not isroutine(function) or not isinstance(name, str):
        raise InvalidRequest("function", function, "a function that has a name")
    if not NAME.fullmatch(name):
        allowed = "a function with a name of at most 64 letters, digits, _ and -"
        raise InvalidRequest("function", name, allowed)
    description: dict[str, Any] = {"name": name, "description": getdoc(function)}
    if description["description"] is None:
        del description["description"]
    description["parameters"] = _parameters(function, name)
    return {"type": "function", "function": description}


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """
    The arguments of *call*, by name.

    Raises:
        InvalidRequest: they are no JSON object, as when the reply was cut.
    """
    allowed = "a JSON object"
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("arguments", call.arguments, allowed) from error
    if not isinstance(arguments, dict):
        raise InvalidRequest("arguments", call.arguments, allowed)
    return arguments


class _Schema(GenerateJsonSchema):
    """Parameters without the titles that pydantic makes of their names."""

    def arguments_schema(self, schema: ArgumentsSchema) -> JsonSchemaValue:
        json_schema = super().arguments_schema(schema)
        for parameter in json_schema["properties"].values():
            parameter.pop("title", None)
        return json_schema


def _parameters(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """The schema of an object that has each parameter of *function*."""
    try:
        for parameter in signature(function).parameters.values():
            if parameter.kind in NAMELESS:
                value = f"{name}({NAMELESS[parameter.kind].format(parameter.name)})"
                allowed = "a function whose parameters all have names, as `city: str`"
                raise InvalidRequest("function", value, allowed)
        adapter: TypeAdapter[Any] = TypeAdapter(cast(Any, function))
        return adapter.json_schema(schema_generator=_Schema)
    except PydanticUserError as error:  # of types
        problem = error.message.partition("\n")[0]
        allowed = f"a function whose parameters JSON can say ({problem})"
        raise InvalidRequest("function", name, allowed) from error
    except (NameError, TypeError, ValueError) as error:
        if isinstance(error, InvalidRequest):
            raise
        allowed = f"a function whose parameters can be read ({error})"
        raise InvalidRequest("function", name, allowed) from error
