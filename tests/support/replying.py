"""An engine without a model that writes a given reply, by a template with tools."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from pyllama_raw import AsyncEngine
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.engine.parts import EngineParts
from pyllama_raw.engine.watcher import PolicyLog
from pyllama_raw.testing import FakeExecutor, FakeVocab, fake_limits, fake_parts

TEMPLATE = """
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}"arguments" <tool_call><|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor -%}
<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% if thinks %}<think>
{% endif %}{% endif %}"""

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


class ReplyVocab(FakeVocab):
    """Bytes, four control tokens, and two that are user defined."""

    names = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
    defined = ("<think>", "</think>")
    ids: ClassVar = {name: 256 + i for i, name in enumerate((*names, *defined))}
    n_tokens = 256 + len(ids)
    eog_tokens = frozenset({ids["</s>"], ids["<|im_end|>"]})

    @property
    def special_texts(self) -> dict[str, bool]:
        return {name: name in self.names for name in self.ids}

    def tokenize(
        self, text: str, *, add_special: bool, parse_special: bool
    ) -> array[int]:
        ids = self.ids if parse_special else dict.fromkeys(self.defined)
        tokens = array("i", [256] if add_special else [])
        for part in re.split(f"({'|'.join(map(re.escape, ids))})", text):
            tokens.extend([self.ids[part]] if part in ids else part.encode())
        return tokens

    def piece(self, token: int, special: bool = False) -> bytes:
        if token < 256:
            return bytes([token])
        name = list(self.ids)[token - 256]
        return name.encode() if special or name in self.defined else b""


def tokens_of(text: str) -> list[int]:
    return list(ReplyVocab().tokenize(text, add_special=False, parse_special=True))


def reply_engine(*replies: str, template: str = TEMPLATE) -> AsyncEngine:
    """An engine whose n-th reply of a chat is the n-th of *replies*, each ended."""
    return AsyncEngine(reply_parts(*replies, template=template))


def reply_parts(*replies: str, template: str = TEMPLATE) -> EngineParts:
    """The parts of such an engine, whose template runs in this process, as in serve/support.py."""
    asks = tuple(tokens_of("<|im_start|>assistant\n"))
    written = [tokens_of(f"{reply}<|im_end|>") for reply in replies]

    def next_token(before: Sequence[int]) -> int:
        places = [
            at + len(asks)
            for at in range(len(before))
            if tuple(before[at : at + len(asks)]) == asks
        ]
        reply, start = written[len(places) - 1], places[-1]
        thinks = [ReplyVocab.ids["<think>"], 10]  # the template has begun it
        if list(before[start : start + 2]) == thinks != reply[:2]:
            start += 2
        return reply[len(before) - start]

    limits = fake_limits(n_ctx_slot=2048, n_cells=8192, n_batch=2048)
    executor = FakeExecutor(limits, next_token=next_token)
    parts = fake_parts(executor, chat_template=template)
    vocab = ReplyVocab()
    scheduler = Scheduler(limits, vocab.pieces, report=PolicyLog())
    return replace(parts, vocab=vocab, scheduler=scheduler, template_process=False)
