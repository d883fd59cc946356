"""
The table of docs/service.md that says of each field of a body what becomes of it.

    python -m scripts.field_table

It is written from the tables of pyllama_raw/serve/fields.py and the fields of the bodies.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from pyllama_raw.serve import fields
from pyllama_raw.serve.body import Body, TextBody
from pyllama_raw.serve.fields import Alias, Ignored, Neutral, Rule
from pyllama_raw.serve.llamacpp import InfillBody, NativeCompletionBody
from pyllama_raw.serve.messages import MessagesBody
from pyllama_raw.serve.openai import ChatBody, CompletionBody
from pyllama_raw.serve.responses import ResponsesBody
from pyllama_raw.serve.scores import ClassifyBody, ScoreBody
from pyllama_raw.serve.tokens import DetokenizeBody, TokenizeBody
from pyllama_raw.serve.vectors import EmbeddingBody, RerankBody

PAGE = Path(__file__).resolve().parents[1] / "docs" / "service.md"
BEGIN, END = "<!-- fields: python -m scripts.field_table -->", "<!-- end of fields -->"
HEAD = (
    "of",
    "done",
    "done under our name",
    "taken if neutral",
    "ignored, named",
    "refused",
)
EMPTY = fields.Neutral(("", False, [], {})).values

# Rows: a name, the body, and the body that another row has told of.
ROWS: tuple[tuple[str, type[Body], type[Body] | None], ...] = (
    ("every body", Body, None),
    ("all that asks for text", TextBody, Body),
    ("`/v1/chat/completions`", ChatBody, TextBody),
    ("`/v1/completions`", CompletionBody, TextBody),
    ("`/v1/responses`", ResponsesBody, TextBody),
    ("`/v1/messages`", MessagesBody, TextBody),
    ("`/completion`", NativeCompletionBody, TextBody),
    ("`/infill`", InfillBody, NativeCompletionBody),
    ("`/v1/embeddings`", EmbeddingBody, Body),
    ("`/v1/rerank`", RerankBody, Body),
    ("`/v1/score`", ScoreBody, Body),
    ("`/v1/classify`", ClassifyBody, Body),
    ("`/tokenize`", TokenizeBody, Body),
    ("`/detokenize`", DetokenizeBody, Body),
)


def table() -> str:
    """The table, in Markdown."""
    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    for name, body, base in ROWS:
        own = _own(body) - (_own(base) if base else set())
        base_rules = base.rules if base else {}
        rules = {
            field: rule
            for field, rule in body.rules.items()
            if field not in _own(body) and base_rules.get(field) != rule
        }
        refused = dict.fromkeys(body.refuses, fields.Neutral())
        lines.append(_row(name, own, rules | refused))
    return "\n".join(lines)


def _own(body: type[Body]) -> set[str]:
    """Fields that bodies of a class have, but for those of SamplingParams alone."""
    if body is Body:
        return {*Body.model_fields}
    return {*body.kinds_of} - ({*body.takes} - {*body.model_fields}) - {*body.refuses}


def _row(name: str, own: Iterable[str], rules: Mapping[str, Rule]) -> str:
    cells: list[list[str]] = [[] for _ in HEAD[1:]]
    cells[0] = [f"`{field}`" for field in sorted(own)]
    for field, rule in sorted(rules.items()):
        match rule:
            case Alias(name=ours):
                cells[1].append(f"`{field}` ({ours})")
            case Neutral(values=values) if values in ((), EMPTY):
                cells[4].append(f"`{field}`")
            case Neutral(values=values):
                words = ", ".join(json.dumps(value) for value in values)
                cells[2].append(f"`{field}` ({words})")
            case Ignored():
                cells[3].append(f"`{field}`")
    return "| " + " | ".join([name, *map(", ".join, cells)]) + " |"


def written(page: str) -> str:
    """*page* with the table of today."""
    before, _, tail = page.partition(BEGIN)
    _, _, after = tail.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    """Write the table."""
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
