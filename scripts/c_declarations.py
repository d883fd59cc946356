"""
Reads the declarations of C headers into comparable text, and writes them for cffi.

No C parser: comments, preprocessor and `__cplusplus` blocks go, what is left is cut at
the semicolons outside braces. The compiler checks the meaning when the extension is built.
"""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
TOKEN = re.compile(r"\.\.\.|\w+|[^\w\s]")
MARKS = re.compile(  # they say nothing of a type
    r"\b(?:(?:LLAMA|MTMD|GGML|GGML_BACKEND)_API|extern|GGML_RESTRICT)\b"
)
CONSTANT = re.compile(r"#define (\w+) (?:\.\.\.|(?!__|extern\b)[\w ()<>|~+*-]+)$")
DEPRECATED = re.compile(r"(?:GGML_)?DEPRECATED\s*\((.*?),\s*\".*\)$", re.DOTALL)
CALLBACK = re.compile(r"\(\s*\*\s*(\w+)\s*\)\s*\(")
FUNCTION = re.compile(r"(\w+)\s*\(")
ARRAY = re.compile(r"\[[^\]]*\]")
CPLUSPLUS = re.compile(r"__cplusplus|__CUDACC__")
NAMED_SIZE = re.compile(r"\[(?!\d+\])[^\]]+\]")  # the compiler fills `[...]` in
COMPOUND = re.compile(
    r"(typedef\s+)?(struct|enum)\s+(\w+)\s*\{(.*)\}\s*(\w*)$", re.DOTALL
)

# Kind and name -> the fields of a struct, the values of an enum, nothing of a constant, and
# one text of all else. Deprecated functions are a kind of their own.
Declarations = dict[tuple[str, str], tuple[str, ...]]
ORDER = ("constant", "enum", "typedef", "struct", "function")  # before they are used


def parse(source: str) -> Declarations:
    """Read the declarations of C *source*, in its order."""
    declarations: Declarations = {}
    text = COMMENT.sub(" ", source).replace("\\\n", " ")
    body = []
    for line in c_lines(text):
        if not line.startswith("#"):
            body.append(line)
        elif match := CONSTANT.match(line):
            declarations["constant", match[1]] = ()
    for statement in split("\n".join(body), ";"):
        declarations.update(declaration(MARKS.sub("", statement).strip()))
    return declarations


def needed(names: Iterable[str], declarations: Declarations) -> Declarations:
    """What *declarations* says of *names*, and of all that these declarations name, in its order."""
    leads = defaultdict[str, set[str]](set)
    for (kind, name), parts in declarations.items():
        leads[name] |= set(TOKEN.findall(" ".join(parts)))
        if kind == "enum":
            for value in parts:
                leads[value].add(name)
    todo, names_done = set(names), set[str]()
    while todo:
        names_done |= todo
        todo = (
            set().union(*(leads[name] for name in todo if name in leads)) - names_done
        )
    return {key: parts for key, parts in declarations.items() if key[1] in names_done}


def render(declarations: Declarations) -> str:
    """*declarations* as C for cffi, which asks the compiler for what stands as `...`."""
    items = sorted(declarations.items(), key=lambda item: ORDER.index(item[0][0]))
    return "".join(rendered(*key, parts) + "\n" for key, parts in items)


def rendered(kind: str, name: str, parts: tuple[str, ...]) -> str:
    if kind == "constant":
        return f"#define {name} ..."
    if kind == "enum":
        values = textwrap.fill(", ".join((*parts, "...")), 84)
        return f"enum {name} {{\n{textwrap.indent(values, '    ')}\n}};"
    if kind == "struct":
        fields = "".join(f"    {plain(part)};\n" for part in (*parts, "..."))
        return f"struct {name} {{\n{fields}}};"
    return f"{plain(parts[0])};"


def plain(code: str) -> str:
    """Canonical *code* without the blanks that nobody would write."""
    return re.sub(r" (?=[,)\[\];])|(?<=\() |(?<=\[) |(?<=\w) (?=\((?! \*))", "", code)


def c_lines(text: str) -> Iterator[str]:
    """The lines that a C compiler sees: without the branches of `#ifdef __cplusplus`."""
    branches = [True]  # one entry per open #if
    for raw in text.splitlines():
        line = re.sub(r"^#\s+", "#", " ".join(raw.split()))
        if line.startswith("#if"):
            branches.append(not CPLUSPLUS.search(line))
        elif line.startswith(("#else", "#elif")):
            branches[-1] = True
        elif line.startswith("#endif"):
            branches.pop()
        elif all(branches):
            yield line


def split(text: str, mark: str) -> Iterator[str]:
    """Cut *text* outside braces and parentheses: at each *mark*, and behind functions."""
    depth, start = 0, 0
    for index, char in enumerate(text):
        if char in "{(":
            depth += 1
        elif char in "})":
            depth -= 1
        is_body = char == "}" and text[start:index].partition("{")[0].rstrip().endswith(
            ")"
        )
        if depth == 0 and (char == mark or is_body):
            yield text[start:index].strip()
            start = index + 1
    yield text[start:].strip()


def declaration(code: str) -> Declarations:
    """What the statement *code* declares; nothing of what has a body, such as a function."""
    if match := COMPOUND.match(code):
        return compound(match)
    if match := DEPRECATED.match(code):
        return {("deprecated", function_name(match[1])): (canonical(match[1]),)}
    if code.startswith("typedef"):
        match = CALLBACK.search(code)
        name = match[1] if match else TOKEN.findall(ARRAY.sub("", code))[-1]
        return {("typedef", name): (canonical(code),)}
    if code.endswith(")") and "{" not in code:
        return {("function", function_name(code)): (canonical(code),)}
    return {}


def compound(match: re.Match[str]) -> Declarations:
    """A struct or enum with a body, and its typedef if it has one."""
    typedef, kind, tag, body, alias = match.groups()
    parts = [canonical(part) for part in split(body, "," if kind == "enum" else ";")]
    if kind == "enum":
        parts = [part.split(" ")[0] for part in parts]
    declarations = {
        (kind, tag): tuple(part for part in parts if part not in {"", "..."})
    }
    if typedef:
        declarations["typedef", alias] = (f"typedef {kind} {tag} {alias}",)
    return declarations


def function_name(code: str) -> str:
    """The declared name: the word before the first parenthesis."""
    match = FUNCTION.search(code)
    assert match is not None, code
    return match[1]


def canonical(code: str) -> str:
    """*code* as tokens with one blank between; array sizes that have a name do not count."""
    return " ".join(TOKEN.findall(NAMED_SIZE.sub("[...]", code)))
