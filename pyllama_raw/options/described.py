"""
What each field of a class is for: the docstring below it in the source.

`help()`, JSON schemas and `--help` show these docstrings, so an option is described once.
They are read when somebody asks. Pydantic's `use_attribute_docstrings` would parse the
sources when a class is made, and every start of a program would wait for it.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from textwrap import indent

PACKAGE = "pyllama_raw."


@cache
def descriptions(kind: type) -> dict[str, str]:
    """The description of each field of *kind*, by name; none where sources are missing."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith(PACKAGE):
            found |= _classes(base.__module__).get(base.__name__, {})
    return found


def help_of(kind: type, defaults: Mapping[str, str]) -> str:
    """What the class says of itself, and below that each of its fields."""
    fields = "\n".join(
        f"{name} = {defaults.get(name, '...')}\n{indent(text, '    ')}"
        for name, text in descriptions(kind).items()
    )
    return "\n\n".join(part for part in (about(kind), fields) if part)


def about(kind: type) -> str:
    """The docstring of *kind* as it is in the source."""
    return inspect.cleandoc(kind.__dict__.get("__doc__") or "")


@cache
def _classes(module: str) -> dict[str, dict[str, str]]:
    """The descriptions in each class of *module*."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (
        KeyError,
        OSError,
        TypeError,
    ):  # a program may be shipped without its sources
        return {}
    found: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            # A TypedDict does not say at run time which one it extends.
            bases = (found.get(ast.unparse(base), {}) for base in node.bases)
            inherited = {k: text for fields in bases for k, text in fields.items()}
            found[node.name] = inherited | dict(_fields(node.body))
    return found


def _fields(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Each field that has a docstring below it."""
    for field, below in pairwise(body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, inspect.cleandoc(text)
