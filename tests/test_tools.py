"""Functions as tools, and the arguments of calls."""

from __future__ import annotations

import functools
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from pyllama_raw.errors import InvalidRequest
from pyllama_raw.tools import ToolCall, arguments_of, schema_of


class Place(BaseModel):
    """Where it is."""

    lat: float


def weather(
    city: Annotated[str, Field(description="A city.", min_length=1)],
    days: int = 3,
    unit: Literal["c", "f"] = "c",
    *,
    near: Place | None = None,
) -> str:
    """
    Tell the weather.

    It may rain.
    """
    return f"{city} {days} {unit} {near}"


class Station:
    def rain(self, mm: float) -> None: ...


def test_a_function_is_a_tool():
    """
    The docstring describes it, and annotations its parameters; titles say nothing new.
    """
    tool = schema_of(weather)

    assert tool["type"] == "function"
    assert tool["function"] | {"parameters": None} == {
        "name": "weather",
        "description": "Tell the weather.\n\nIt may rain.",
        "parameters": None,
    }
    parameters = tool["function"]["parameters"]
    assert parameters["required"] == ["city"]
    assert parameters["additionalProperties"] is False
    assert parameters["properties"] == {
        "city": {"type": "string", "minLength": 1, "description": "A city."},
        "days": {"type": "integer", "default": 3},
        "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
        "near": {
            "anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}],
            "default": None,
        },
    }
    assert parameters["$defs"]["Place"]["description"] == "Where it is."


def test_methods_and_coroutines_are_tools():
    """
    What is bound is no parameter, and a function without a docstring has no description.
    """

    async def now() -> str: ...

    tools = [schema_of(Station().rain), schema_of(now)]

    assert [tool["function"] for tool in tools] == [
        {
            "name": "rain",
            "parameters": {
                "additionalProperties": False,
                "properties": {"mm": {"type": "number"}},
                "required": ["mm"],
                "type": "object",
            },
        },
        {
            "name": "now",
            "parameters": {
                "additionalProperties": False,
                "properties": {},
                "type": "object",
            },
        },
    ]


def many(*args: int) -> None: ...
def more(**kwargs: int) -> None: ...
def placed(a: int, /) -> None: ...
def odd(a: Callback) -> None: ...  # noqa: F821 - a name that is not there
def strange(a: Station) -> None: ...


REFUSED = {
    "*args": (many, "many(*args)"),
    "**kwargs": (more, "more(**kwargs)"),
    "positional": (placed, "placed(a, /)"),
    "a type that is not there": (odd, "Callback"),
    "a type that is no JSON": (strange, "Station"),
    "a lambda": (lambda a: a, "letters"),
    "a partial function": (functools.partial(weather), "has a name"),
    "a text": ("weather", "has a name"),
    "a class": (Place, "has a name"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_functions_are_refused(what):
    """
    The error tells of the parameter, or of what a function needs.
    """
    function, told = REFUSED[what]

    with pytest.raises(InvalidRequest) as caught:
        schema_of(function)

    assert told in str(caught.value)


def test_arguments_of_a_call():
    """
    They are a mapping, empty where the model wrote none; what was cut is told.
    """
    assert arguments_of(ToolCall("1", "f", '{"a": [1]}')) == {"a": [1]}
    assert arguments_of(ToolCall("1", "f", "")) == {}
    for cut in ('{"a": ', "[1]", "[" * 100_000):
        with pytest.raises(InvalidRequest, match="a JSON object"):
            arguments_of(ToolCall("1", "f", cut))
