"""
Reads the declarations of a C header, or of our cdef files, into comparable text.

No C parser: comments, preprocessor and `__cplusplus` blocks go, what is left is cut at
the semicolons outside braces. The compiler checks the meaning when the extension is built.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
TOKEN = re.compile(r"\.\.\.|\w+|[^\w\s]")
EXPORT = re.compile(r"\b(?:LLAMA|MTMD|GGML|GGML_BACKEND)_API\b|\bextern\b")
CONSTANT = re.compile(
    r'#define (\w+) (?:\.\.\.|"[^"]*"|(?!__|extern\b)[\w ()<>|~+*-]+)$'
)
DEPRECATED = re.compile(r"(?:GGML_)?DEPRECATED\s*\(")
CALLBACK = re.compile(r"\(\s*\*\s*(\w+)\s*\)\s*\(")
FUNCTION = re.compile(r"(\w+)\s*\(")
CPLUSPLUS = re.compile(r"__cplusplus|__CUDACC__")
ARRAY_SIZE = re.compile(r"\[[^\]]+\]")  # the compiler fills `[...]` in
COMPOUND = re.compile(
    r"(typedef\s+)?(struct|enum)\s+(\w+)?\s*\{(.*)\}\s*(\w*)$", re.DOTALL
)

KINDS = ("functions", "structs", "enums", "typedefs")


@dataclass(frozen=True, slots=True)
class Declarations:
    """What a header declares: name -> canonical text, each in header order."""

    functions: dict[str, str] = field(default_factory=dict)
    structs: dict[str, tuple[str, ...]] = field(default_factory=dict)  # fields
    enums: dict[str, tuple[str, ...]] = field(default_factory=dict)  # names of values
    typedefs: dict[str, str] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)  # `#define` of a number or string
    deprecated: set[str] = field(default_factory=set)  # functions


def parse(source: str) -> Declarations:
    """Read the declarations of C *source*."""
    found = Declarations()
    text = COMMENT.sub(" ", source).replace("\\\n", " ")
    body = []
    for line in c_lines(text):
        if not line.startswith("#"):
            body.append(line)
        elif match := CONSTANT.match(line):
            found.constants.add(match[1])
    for statement in split("\n".join(body), ";"):
        add(found, statement)
    return found


def merge(parts: Iterable[Declarations]) -> Declarations:
    """All *parts* as one."""
    whole = Declarations()
    for part in parts:
        for kind in KINDS:
            getattr(whole, kind).update(getattr(part, kind))
        whole.constants.update(part.constants)
        whole.deprecated.update(part.deprecated)
    return whole


def c_lines(text: str) -> Iterator[str]:
    """The lines a C compiler sees: without the branches of `#ifdef __cplusplus`."""
    seen = [True]  # one entry per open #if
    for raw in text.splitlines():
        line = re.sub(r"^#\s+", "#", " ".join(raw.split()))
        if line.startswith("#if"):
            seen.append(not CPLUSPLUS.search(line))
        elif line.startswith(("#else", "#elif")):
            seen[-1] = True
        elif line.startswith("#endif"):
            seen.pop()
        elif all(seen):
            yield line


def split(text: str, mark: str) -> Iterator[str]:
    """Cut *text* at each *mark* outside braces and parentheses."""
    depth, start = 0, 0
    for index, char in enumerate(text):
        if char in "{(":
            depth += 1
        elif char in "})":
            depth -= 1
        elif char == mark and depth == 0:
            yield text[start:index].strip()
            start = index + 1
    yield text[start:].strip()


def add(found: Declarations, statement: str) -> None:
    """Put *statement* into the part of *found* it belongs to."""
    code = EXPORT.sub("", statement).strip()
    if match := COMPOUND.match(code):
        add_compound(found, match)
    elif code.startswith("typedef"):
        match = CALLBACK.search(code)
        name = match[1] if match else TOKEN.findall(ARRAY_SIZE.sub("", code))[-1]
        found.typedefs[name] = canonical(code)
    elif DEPRECATED.match(code):
        found.deprecated.add(function_name(DEPRECATED.sub("", code, count=1)))
    elif code.endswith(")") and "{" not in code:
        found.functions[function_name(code)] = canonical(code)


def add_compound(found: Declarations, match: re.Match[str]) -> None:
    """A struct or enum with a body; its typedef, if any, counts as a typedef."""
    typedef, kind, tag, body, alias = match.groups()
    name = tag or alias
    if kind == "enum":
        values = (canonical(value).split(" ")[0] for value in split(body, ","))
        found.enums[name] = tuple(v for v in values if v not in {"", "..."})
    else:
        fields = (canonical(each) for each in split(body, ";"))
        found.structs[name] = tuple(f for f in fields if f not in {"", "..."})
    if typedef:
        found.typedefs[alias] = f"typedef {kind} {tag} {alias}"


def function_name(code: str) -> str:
    """The declared name: the word before the first parenthesis."""
    match = FUNCTION.search(code)
    assert match is not None, code
    return match[1]


def canonical(code: str) -> str:
    """*code* as tokens with one blank between; array sizes do not count."""
    return " ".join(TOKEN.findall(ARRAY_SIZE.sub("[...]", code)))
