"""Nodes of Python files, which the tests of one module read once."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of the file, as ast.walk() gives them."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Forget them behind the module: a million objects would slow each collection of garbage."""
    yield
    nodes.cache_clear()
