"""
Look for control tokens that messages forge, in every chat template of a folder.

    python -m scripts.chat_injection [FOLDER] [--rounds N] [--seed N]

Without a folder the templates are those of llama.cpp's source.

Each template gets chats whose texts are pieces of its own markers, as are names, descriptions
and schemas of tools, and ids, names, arguments and results of calls. What a tokenizer finds
in the prompt must be what it finds if each character of a message is put out. And the
same chats are rendered with letters of which no marker can be made: prompts that have
other markers than these twins are counted, because templates branch on what messages say.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pyllama_raw.errors import InvalidRequest
from pyllama_raw.prompts.chat import Markers
from pyllama_raw.prompts.messages import plain_messages
from pyllama_raw.prompts.rendering.template import CompiledTemplate
from scripts.llama_source import unpack

TEMPLATES = "models/templates"  # of the source
MARKER = re.compile(
    r"<\|[^|<>\s{}]{1,40}\|>|<\uff5c[^\uff5c\n]{1,40}\uff5c>|</?[a-z_]{1,30}>|\[/?[A-Z_]{3,30}\]"
)
ALWAYS = {"<s>", "</s>", *(f"<|{role}|>" for role in ("user", "system", "assistant"))}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ID = "abcdefghi"  # that all templates take
KEPT = {"role", "type"}
KEYS = {
    "arguments", "content", "default", "description", "enum", "function", "id", "items",
    "name", "parameters", "properties", "reasoning_content", "required", "text",
    "tool_call_id", "tool_calls", *KEPT,
}  # fmt: skip
CUTS = ("", "", "", " ", "\n", "*")


def drawn(rng: random.Random, markers: list[str]) -> str:
    """Whole, cut and turned markers, and something between them."""
    text = ""
    for _ in range(rng.randrange(5)):
        marker = rng.choice(markers)
        at = rng.randrange(len(marker) + 1)
        forms = (marker, marker[:at], marker[at:], marker[::-1], marker.upper(), "a")
        text += rng.choice(forms) + rng.choice(CUTS)
    return text


def drawn_chat(rng: random.Random, markers: list[str]) -> list[dict[str, Any]]:
    """Texts, or also parts, tool calls with forged keys, answers of tools, roles."""
    is_plain = rng.random() < 0.5

    def text() -> str:
        return drawn(rng, markers)

    def content() -> Any:
        if is_plain or rng.random() < 0.6:
            return text()
        return [{"type": "text", "text": text()} for _ in range(rng.randrange(1, 4))]

    chat: list[dict[str, Any]] = [
        {"role": "user", "content": content(), "name": text()},
        {"role": "assistant", "content": content()},
        {"role": "user", "content": content()},
    ]
    return chat if is_plain else chat + more_turns(rng, chat, text)


def more_turns(
    rng: random.Random, chat: list[dict[str, Any]], text: Callable[[], str]
) -> list[dict[str, Any]]:
    """What not every template takes; also put into *chat*."""
    if rng.random() < 0.3:
        chat.insert(0, {"role": "system", "content": text()})
    turns: list[dict[str, Any]] = []
    if rng.random() < 0.3:
        chat[-2]["reasoning_content"] = text()
    if rng.random() < 0.4:
        turns += tool_use(rng, text)
    if rng.random() < 0.2:
        turns.append({"role": text(), "content": text()})
    return turns


def tool_use(rng: random.Random, text: Callable[[], str]) -> list[dict[str, Any]]:
    """Calls and their answers; arguments may be a text."""
    turns: list[dict[str, Any]] = []
    for _ in range(rng.randrange(1, 3)):
        arguments: Any = {text(): text(), "a": [text(), {text(): 1}]}
        if rng.random() < 0.4:
            arguments = rng.choice([json.dumps(arguments), text()])
        call = {"name": text(), "arguments": arguments}
        name, id_ = call["name"], rng.choice([ID, ID, text()])
        calls = [{"id": id_, "type": "function", "function": call}]
        answer = {"role": "tool", "content": text(), "tool_call_id": id_, "name": name}
        if rng.random() < 0.2:
            answer["content"] = [{"type": "text", "text": text()}]
        turns += [{"role": "assistant", "content": "", "tool_calls": calls}, answer]
    return turns


def drawn_tools(rng: random.Random, markers: list[str]) -> list[dict[str, Any]] | None:
    """Functions of which a client may write every word."""

    def text() -> str:
        return drawn(rng, markers)

    def tool() -> dict[str, Any]:
        schema = {"type": "string", "description": text(), "enum": [text(), text()]}
        items = {"type": "array", "items": {"type": "string", "default": text()}}
        properties = {text(): schema, "a": items, text(): {"type": "integer"}}
        parameters = {
            "type": "object",
            "properties": properties,
            "required": [next(iter(properties))],
        }
        function = {"name": text(), "description": text(), "parameters": parameters}
        return {"type": "function", "function": function}

    if rng.random() < 0.5:
        return None
    return [tool() for _ in range(rng.randrange(1, 4))]


def twin(value: Any) -> Any:
    """*value* with private letters in the place of all that markers are made of."""
    if isinstance(value, str):
        return (
            ID
            if value == ID
            else "".join(chr(0xE000 + ord(letter)) for letter in value)
        )
    if isinstance(value, dict):
        return {
            key if key in KEYS else twin(key): item if key in KEPT else twin(item)
            for key, item in value.items()
        }
    return [twin(item) for item in value] if isinstance(value, list) else value


def own_markers(text: str, origins: str, markers: list[str]) -> Counter[str]:
    """What a tokenizer finds in the pieces of a prompt."""
    spelled = re.compile(
        "|".join(sorted(map(re.escape, markers), key=len, reverse=True))
    )
    special = dict.fromkeys(markers, True)
    counts: Counter[str] = Counter()
    for piece, _ in Markers(special, None).parts(text, origins):
        counts.update(spelled.findall(piece))
    return counts


def written(text: str, origins: str, markers: list[str]) -> Counter[str]:
    """Markers in what is left of a prompt without any text but the template's."""
    alone = "".join(
        letter if origin == "t" else "\0"
        for letter, origin in zip(text, origins, strict=True)
    )
    return own_markers(alone, "t" * len(alone), markers)


def try_template(source: str, rng: random.Random, n_rounds: int) -> Counter[str]:
    """What came of *n_rounds* chats."""
    markers = sorted(set(MARKER.findall(source)) | ALWAYS)
    outcomes: Counter[str] = Counter()
    template = CompiledTemplate(source, TOKENS)
    for _ in range(n_rounds):
        chat = plain_messages(drawn_chat(rng, markers))
        tools = drawn_tools(rng, markers)
        try:
            text, origins = template.render(chat, tools=tools)
            other = template.render(twin(chat), tools=twin(tools))
        except Exception:  # noqa: BLE001 - the template does not take these messages
            outcomes["not rendered"] += 1
            continue
        try:
            counts = own_markers(text, origins, markers)
        except InvalidRequest:
            outcomes["refused"] += 1
            continue
        n_spelled = sum(text.count(marker) for marker in markers)
        outcomes["prompts"] += 1
        outcomes["prompts with tools"] += tools is not None
        outcomes["prompts with forgeries"] += n_spelled > counts.total()
        outcomes["forged"] += counts != written(text, origins, markers)
        outcomes["unlike twin"] += counts != own_markers(*other, markers)
    return +outcomes


def main() -> int:
    """1 if a message forged a marker, or nothing was tried."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folder = options.folder or unpack(Path(scratch), (TEMPLATES,)) / TEMPLATES
        total: Counter[str] = Counter()
        for path in sorted(folder.glob("*.jinja")):
            rng = random.Random(f"{options.seed} {path.name}")  # noqa: S311 - no secret
            outcomes = try_template(path.read_text(), rng, options.rounds)
            total += outcomes
            if set(outcomes) & {"forged", "refused", "unlike twin"}:
                print(path.name, dict(outcomes))
    print("all", dict(total))
    return int(not total["prompts"] or total["forged"] > 0)


if __name__ == "__main__":
    sys.exit(main())
