"""
The map in ARCHITECTURE.md has a line for every file of the package, and no other.

A line is the first sentence of its file, where it stays true. To write the map anew:
PYLLAMA_RAW_UPDATE=1 .venv/bin/pytest tests/test_map.py
"""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE, PAGE = ROOT / "pyllama_raw", ROOT / "ARCHITECTURE.md"
HEADING = "## Map\n"


def files() -> list[Path]:
    """Those of ours; `lib` holds a built libllama and its headers."""
    kinds = (".py", ".h", ".cpp")
    found = [path for path in PACKAGE.rglob("*") if path.suffix in kinds]
    return [path for path in found if PACKAGE / "_ffi" / "lib" not in path.parents]


def first_sentence(path: Path) -> str:
    """Of the docstring or the first comment; empty if the file begins with code."""
    text = path.read_text()
    if path.suffix == ".py":
        words = ast.get_docstring(ast.parse(text)) or ""
    else:
        comment = re.match(r"/\*(.*?)\*/|((?:// .*\n)+)", text, re.DOTALL)
        words = (comment[1] or comment[2]) if comment else ""
        words = re.sub(r"^ ?(?:\*|//)(?: |$)", "", words, flags=re.MULTILINE)
    paragraph = " ".join(words.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) ", paragraph)[0].rstrip(".")


def lines_of(folder: Path, names: list[Path]) -> Iterator[str]:
    """A heading, then the files; a .cpp without a sentence stands beside its header."""
    yield f"\n### {folder.relative_to(ROOT)}\n"
    for path in sorted(names):
        shown, code = _link(path), path.with_suffix(".cpp")
        if path.suffix == ".h" and code in names and not first_sentence(code):
            shown += f", {_link(code)}"
        if words := first_sentence(path):
            yield f"- {shown}: {words}"


def _link(path: Path) -> str:
    name = path.name.replace("__", r"\_\_")
    return f"[{name}]({path.relative_to(ROOT)})"


def written_map() -> str:
    """The section as it has to be."""
    folders: dict[Path, list[Path]] = {}
    for path in files():
        folders.setdefault(path.parent, []).append(path)
    return "\n".join(
        line for item in sorted(folders.items()) for line in lines_of(*item)
    )


def test_the_map_has_every_file():
    """
    Each file is named once, with the sentence that it begins with.
    """
    before, _, shown = PAGE.read_text().partition(HEADING)
    if os.environ.get("PYLLAMA_RAW_UPDATE"):
        shown = f"{written_map()}\n"
        PAGE.write_text(before + HEADING + shown)

    assert shown.strip() == written_map().strip()


def test_every_file_says_what_it_is():
    """
    A file begins with a sentence; a header speaks for the code beside it.
    """
    silent = [path for path in files() if not first_sentence(path)]

    assert [path for path in silent if path.with_suffix(".h") not in files()] == []
