"""
Forms that a text must have, in the words of several servers.

OpenAI says `response_format`; llama-server `json_schema` and `grammar`; vLLM `structured_outputs`,
and `guided_json` and its like before that; SGLang `json_schema` as text, `regex` and `ebnf`; TGI
an object as `grammar`; Ollama `format`. All of them become one constraint of SamplingParams, and
an error names the field that the client has sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from pyllama_raw.serve.failures import refused

ANY_OBJECT = {"type": "object"}
RULES_OF_GBNF = "::="  # Lark has a colon alone
MAX_CHOICES = 1024


class Form(NamedTuple):
    """The constraint of a text."""

    params: Mapping[str, Any]  # fields of SamplingParams
    names: Mapping[str, str]  # of fields of the body, by those of SamplingParams


class ResponseFormat(BaseModel):
    """The form that the text must have."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["text", "json_object", "json_schema", "json", "regex", "grammar"]
    json_schema: dict[str, Any] | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    def params(self) -> dict[str, Any]:
        """Fields of SamplingParams. Raises Failure if what the type needs is missing."""
        value = (self.model_extra or {}).get("value", self.schema_)
        match self.type:
            case "text":
                return {}
            case "json_object":
                return {"json_schema": self.schema_ or ANY_OBJECT}
            case "json_schema":
                schema = (self.json_schema or {}).get("schema", value)
                if not isinstance(schema, dict):
                    raise refused(
                        "response_format", "json_schema needs json_schema.schema"
                    )
                return {"json_schema": schema}
            case "grammar":  # Fireworks has it beside the type
                return _grammar(
                    (self.model_extra or {}).get("grammar"), "response_format.grammar"
                )
            case kind:  # those of TGI
                return _of_tgi({"type": kind, "value": value}, "response_format")


def form_of(fields: Mapping[str, Any]) -> Form:
    """
    The constraint that *fields* of a body ask for.

    Raises:
        Failure: one of them is none, or two ask for the same thing.
    """
    params: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, read in READERS.items():
        value = fields.get(name)
        if value is None or value == "":
            continue
        for field, constraint in read(value, name).items():
            if field in params:
                reason = f"{names[field]} says it, too: give one of them"
                raise refused(name, reason)
            params[field], names[field] = constraint, name
    return Form(params, names)


def _response_format(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, ResponseFormat):
        raise refused(name, "give an object with a type")
    return value.params()


def _schema(value: Any, name: str) -> dict[str, Any]:
    """A schema, as an object or as JSON in a text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise refused(name, "give a JSON schema, as an object or as JSON in a text")
    return {"json_schema": value}


def _regex(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, str):
        raise refused(name, "give a regular expression")
    return {"regex": value}


def _choice(value: Any, name: str) -> dict[str, Any]:
    """One of several texts; as a grammar, because that needs no escapes but those of JSON."""
    is_list = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES
    if not is_list or not all(isinstance(text, str) and text for text in value):
        raise refused(
            name, f"give a list of 1 to {MAX_CHOICES} texts that are not empty"
        )
    texts = (json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(value))
    return {"lark": f"start: {' | '.join(texts)}"}


def _grammar(value: Any, name: str) -> dict[str, Any]:
    """A grammar in GBNF, which others call EBNF, or in Lark; or the form of TGI."""
    if isinstance(value, dict):
        return _of_tgi(value, name)
    if not isinstance(value, str):
        raise refused(name, "give a grammar in GBNF or Lark")
    return {"grammar" if RULES_OF_GBNF in value else "lark": value}


def _gbnf(value: Any, name: str) -> dict[str, Any]:
    return {"grammar": value} if isinstance(value, str) else _grammar(value, name)


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, bool):
        raise refused(name, "give true or false")
    return {"json_schema": ANY_OBJECT} if value else {}


def _format(value: Any, name: str) -> dict[str, Any]:
    return {"json_schema": ANY_OBJECT} if value == "json" else _schema(value, name)


def _of_tgi(value: dict[str, Any], name: str) -> dict[str, Any]:
    kind, inner = value.get("type"), value.get("value")
    place = f"{name}.value"
    if kind == "json_schema" and isinstance(inner, dict):  # with its name beside it
        return _schema(inner.get("schema", inner), place)
    if kind == "json":
        return _schema(inner, place)
    if kind == "regex":
        return _regex(inner, place)
    raise refused(f"{name}.type", "give json, json_schema or regex, with a value")


def _structured(value: Any, name: str) -> dict[str, Any]:
    """vLLM's object of constraints."""
    if not isinstance(value, dict):
        raise refused(name, "give an object")
    for inner, constraint in value.items():
        is_off = constraint is None or constraint is False or constraint == ""
        if inner not in INNER and inner not in HINTS and not is_off:
            allowed = ", ".join(INNER)
            raise refused(f"{name}.{inner}", f"this is not done here: give {allowed}")
    constraints = {
        inner: value[inner] for inner in INNER if value.get(inner) not in (None, False)
    }
    if len(constraints) > 1:
        raise refused(name, f"give one of {', '.join(constraints)}")
    for inner, constraint in constraints.items():
        return INNER[inner](constraint, f"{name}.{inner}")
    return {}


Reader = Callable[[Any, str], dict[str, Any]]

INNER: dict[str, Reader] = {  # of structured_outputs
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _object,
}
HINTS = ("disable_fallback",)  # change no output
READERS: dict[str, Reader] = {
    "response_format": _response_format,
    "json_schema": _schema,
    "regex": _regex,
    "grammar": _gbnf,
    "ebnf": _grammar,
    "structured_outputs": _structured,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "guided_json_object": _object,
    "format": _format,
}
