"""
The chat cases of llama.cpp's own tests: what its parsers find in a reply, ours find.

    python -m scripts.chat_cases [--derived] [--seed N] [WORD ...]

The cases are read from the pinned source. Each reply is parsed as a whole, and in pieces that
are drawn: by letters, by bytes, and by tokens with the control tokens of the template's family
as such. All have to give the same parts. scripts/chat_cases.toml names, each with a reason, the
cases in which ours differs: it is a mistake if one of them passes, or another one fails.

WORDs choose cases by their names; --derived takes no bundled specification.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
import tomllib
from functools import cache
from pathlib import Path

from pyllama_raw.replies.derive import derive, spec_for
from pyllama_raw.replies.spec import ReplySpec
from scripts.chat_case_runs import mistake_in
from scripts.chat_case_templates import Template
from scripts.llama_chat_cases import Case, Reader
from scripts.llama_source import unpack

TABLE = Path(__file__).with_suffix(".toml")
PARTS = ("tests/test-chat.cpp", "models/templates")


def main() -> int:
    """0 if exactly those cases differ that are listed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--derived", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        source = unpack(Path(scratch), PARTS)
        reader = Reader((source / PARTS[0]).read_text("utf-8"))
        templates = {p.name: Template(p) for p in (source / PARTS[1]).glob("*.jinja")}
    for line, reason in reader.unread.items():
        print(f"NOT READ: line {line}: {reason}")
    cases = [
        case
        for case in reader.cases
        if not options.words or any(word in case.name for word in options.words)
    ]
    mistakes = {}
    for case in cases:
        template = templates[case.template]
        spec = specification(template, options.derived)
        if mistake := mistake_in(case, template, spec, options.seed):
            mistakes[case.name] = mistake
    n_lines = len({case.line for case in reader.cases})
    print(f"{n_lines} cases read, {len(reader.unread)} not; {len(cases)} runs tried")
    if options.derived:
        return told_of_derived(cases, mistakes, templates)
    return report(cases, mistakes, is_all=not options.words)


@cache
def specification(template: Template, derived: bool) -> ReplySpec:
    """The one that the package finds; that of a reply without calls if there is none."""
    if derived:
        return derive(template.render) or ReplySpec()
    return spec_for(template.source, template.render) or ReplySpec()


def told_of_derived(
    cases: list[Case], mistakes: dict[str, str], templates: dict[str, Template]
) -> int:
    """Say which templates are read right without a bundled specification."""
    listed = listed_of(cases)
    n_derived = n_right = n_tried = 0
    for name in sorted(templates):
        tried = [case.name for case in cases if case.template == name]
        wrong = [n for n in tried if n in mistakes and n not in listed]
        is_derived = specification(templates[name], derived=True) != ReplySpec()
        n_derived += is_derived
        n_tried += bool(tried)
        n_right += is_derived and bool(tried) and not wrong
        words = "derived" if is_derived else "not derived"
        print(f"{name}: {words}; {len(tried) - len(wrong)} of {len(tried)} runs")
        for case_name in wrong if is_derived else ():
            print(f"    {case_name}: {mistakes[case_name]}")
    print(f"{n_derived} of {len(templates)} templates have a derived specification")
    print(f"with it, all runs of {n_right} of {n_tried} templates are as expected")
    return 0


def patterns_of() -> list[str]:
    """Patterns of the cases that have to differ."""
    table: dict[str, list[str]] = tomllib.loads(TABLE.read_text())["differs"]
    return [pattern for listed in table.values() for pattern in listed]


def listed_of(cases: list[Case]) -> set[str]:
    names = [case.name for case in cases]
    return {name for p in patterns_of() for name in fnmatch.filter(names, p)}


def report(cases: list[Case], mistakes: dict[str, str], *, is_all: bool) -> int:
    """Tell what is otherwise than it has to be."""
    listed = listed_of(cases)
    wrong = {name: mistake for name, mistake in mistakes.items() if name not in listed}
    passed = sorted(listed - mistakes.keys())
    names = [case.name for case in cases]
    idle = [p for p in patterns_of() if is_all and not fnmatch.filter(names, p)]
    for name, mistake in wrong.items():
        print(f"DIFFERS: {name}: {mistake}")
    for name in passed:
        print(f"PASSES, although {TABLE.name} says that it differs: {name}")
    for pattern in idle:
        print(f"{TABLE.name} has {pattern}, which is no case")
    n_same = len(cases) - len(mistakes)
    print(
        f"{n_same} runs as expected, {len(mistakes)} not, {len(listed)} of which are listed"
    )
    return 1 if wrong or passed or idle or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
