#!/usr/bin/env python3
"""
Arguments of the pinned llama-server, read from its source: common/arg.cpp.

    python -m scripts.llama_arguments            # writes the table of docs/llama-server.md
    python -m scripts.llama_arguments --list     # and the list, which needs the source

The list is tests/cli/llama_arguments.txt, a line for each argument: its names, its negated names,
the number of its values, and the variable of the environment. tests/cli/test_llama_flags.py
compares it with our table and the table with the page, and needs no source.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pyllama_raw.cli.llama_flags import described
from scripts.llama_source import unpack

LIST = Path(__file__).resolve().parents[1] / "tests" / "cli" / "llama_arguments.txt"
SOURCE = "common/arg.cpp"
PAGE = LIST.parents[2] / "docs" / "llama-server.md"
BEGIN, END = (
    "<!-- flags: python -m scripts.llama_arguments -->",
    "<!-- end of flags -->",
)
BEGINNING = re.compile(r"(?:add_opt\(|args\.push_back\()common_arg\(")
LISTS = re.compile(r"\s*\{([^}]*)\}\s*,\s*(?:\{([^}]*)\}\s*,)?")
TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')
HANDLER = re.compile(r"\[[^\]]*\]\(common_params &\s*\w*((?:,[^,)]*)*)\)")


class Argument(NamedTuple):
    """An argument of llama-server."""

    names: tuple[str, ...]
    negated: tuple[str, ...] = ()
    n_values: int = 0
    variable: str = ""

    def __str__(self) -> str:
        fields = " ".join(self.names), " ".join(self.negated)
        return " | ".join((*fields, str(self.n_values), self.variable))


def main() -> None:
    """Write what is asked for."""
    if "--list" in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            source = (unpack(Path(folder), (SOURCE,)) / SOURCE).read_text()
        LIST.write_text("".join(f"{argument}\n" for argument in arguments_of(source)))
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")


def written(page: str) -> str:
    """*page* with the table of today."""
    before, _, tail = page.partition(BEGIN)
    _, _, after = tail.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def table() -> str:
    """Flags and what they mean, in Markdown; those of one meaning share a row."""
    rows: dict[str, list[str]] = {}
    for names, meaning in described():
        rows.setdefault(meaning, []).append(names.replace("|", "\\|"))
    lines = [f"| {'; '.join(names)} | {meaning} |" for meaning, names in rows.items()]
    return "\n".join(["| flags (variable) | here |", "| --- | --- |", *lines])


def listed() -> list[Argument]:
    """The arguments of the list."""
    rows = [line.split(" | ") for line in LIST.read_text().splitlines()]
    return [
        Argument(tuple(n.split()), tuple(neg.split()), int(n_values), variable)
        for n, neg, n_values, variable in rows
    ]


def arguments_of(source: str) -> list[Argument]:
    """The arguments that llama-server has by the text of common/arg.cpp, in its order."""
    source = re.sub(r"^\s*//.*$", "", source, flags=re.MULTILINE)
    return list(dict.fromkeys(_arguments(source)))


def _arguments(source: str) -> Iterator[Argument]:
    for beginning in BEGINNING.finditer(source):
        end = _closing(source, beginning.end())
        body, options = (
            source[beginning.end() : end],
            source[end : source.index(";", end)],
        )
        # An argument of all programs, of the server among others, or of others only.
        examples = re.findall(r"LLAMA_EXAMPLE_(\w+)", _call(options, "set_examples"))
        excluded = _call(options, "set_excludes")
        if examples and not {"SERVER", "COMMON"} & set(examples):
            continue
        if "LLAMA_EXAMPLE_SERVER" in excluded:
            continue
        lists = LISTS.match(body)
        assert lists is not None, body
        names, negated = (tuple(TEXT.findall(part or "")) for part in lists.groups())
        # The types of the handler say how many values there are; a function of its own has one.
        handler = HANDLER.search(body, lists.end())
        values = handler[1].count(",") if handler else 1
        n_values = 0 if handler and "bool" in handler[1] else values
        variable = _call(options, "set_env").strip('"')
        if "set_preset_only" in options:
            variable, n_values = "preset", 1
        yield Argument(names, negated, n_values, variable)


def _closing(source: str, at: int) -> int:
    """The place of the bracket that closes the one before *at*."""
    depth, is_text = 1, False
    while depth:
        sign = source[at]
        if is_text and sign == "\\":
            at += 1
        elif sign == '"':
            is_text = not is_text
        elif not is_text:
            depth += (sign == "(") - (sign == ")")
        at += 1
    return at - 1


def _call(options: str, name: str) -> str:
    """The arguments of the call *name* behind an argument; empty if there is none."""
    call = re.search(rf"{name}\(([^)]*)\)", options)
    return call[1] if call else ""


if __name__ == "__main__":
    main()
