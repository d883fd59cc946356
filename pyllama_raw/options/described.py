"""
Descriptions of options: the docstrings below them in the source.

Help and JSON schemas show these docstrings, so an option is described once. They are read when
somebody asks, because pydantic's `use_attribute_docstrings` would parse the sources at every
start of a program.
"""

from __future__ import annotations

import ast
import inspect
from functools import cache
from itertools import pairwise
from textwrap import dedent, indent

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

PACKAGE = "pyllama_raw."


@cache
def descriptions(kind: type) -> dict[str, str]:
    """The description of each field of *kind*, by name; none where sources are missing."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith(PACKAGE):
            found |= _docstrings(base)
    return found


def _docstrings(kind: type) -> dict[str, str]:
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # a program may be shipped without its sources
        return {}
    (node,) = ast.parse(dedent(source)).body
    found: dict[str, str] = {}
    for field, below in pairwise(node.body if isinstance(node, ast.ClassDef) else ()):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = inspect.cleandoc(text)
    return found


class Documented(type(BaseModel)):  # type: ignore[misc]
    """Metaclass of options, whose `__doc__` lists them. It is made when somebody asks."""

    @property
    def __doc__(cls) -> str:  # type: ignore[override]
        told = [
            f"{name} = {_default(cls, name)}\n{indent(text, '    ')}"
            for name, text in descriptions(cls).items()
        ]
        return "\n\n".join([about(cls), "\n".join(told)])


def _default(kind: type[BaseModel], name: str) -> str:
    value = kind.model_fields[name].get_default(call_default_factory=True)
    return f"{type(value).__name__}()" if isinstance(value, BaseModel) else repr(value)


def about(kind: type) -> str:
    """The docstring of *kind* as it is in the source."""
    return inspect.cleandoc(kind.__dict__.get("__doc__") or "")


class DescribedModel(BaseModel, metaclass=Documented):
    """A model of pydantic whose help and JSON schema have the descriptions."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        made = handler(core_schema)
        schema = handler.resolve_ref_schema(made)
        schema["description"] = about(cls)
        for name, text in descriptions(cls).items():
            schema["properties"][name]["description"] = text
        return made
