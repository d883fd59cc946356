"""Chat templates, chats that they are given, and texts for every tokenizer."""

from __future__ import annotations

import json
from typing import Any

from pyllama_raw.errors import InvalidRequest, RequestError
from scripts.fuzz_targets.target import Target, Try

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "u"}], "name": "n"},
    {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "r",
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "f", "arguments": {"x": 1}},
            }
        ],
    },
    {"role": "tool", "content": "t", "tool_call_id": "1", "name": "f"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
]


def _templates() -> Try:
    """
    A template that is read here, where its coverage is seen.

    It may compute for long and take all memory, because an engine runs it apart.
    """
    from pyllama_raw.prompts.rendering.template import CompiledTemplate

    def attempt(data: bytes) -> None:
        source = data.decode(errors="replace")
        template = None
        try:
            template = CompiledTemplate(
                source, {"bos_token": "<s>", "eos_token": "</s>"}
            )
            text, origins = template.render(CHAT, tools=TOOLS)
        except Exception:  # noqa: BLE001 - whatever a stranger's program raises is told by its process
            return
        assert type(text) is str or isinstance(text, str)
        assert len(origins) == len(text), "characters without an origin"
        assert set(origins) <= set("mtd")

    return attempt


def _template_seeds() -> list[bytes]:
    from pyllama_raw.options.chat_templates import TEMPLATES

    return [text.encode() for text in TEMPLATES.values()]


TEMPLATE_WORDS = tuple(
    word.encode()
    for word in (
        "{{", "}}", "{%", "%}", "{%-", "-%}", "{#", "#}", "|", "messages", "message['content']", "message.role", "tools",
        "for", "in", "endfor", "if", "else", "elif", "endif", "set", "endset", "macro", "endmacro", "namespace(", "loop.index0",
        "raise_exception('a')", "strftime_now('%Y')", "tojson", "tojson(indent=4)", "trim", "join(',')", "replace('a', 'b')",
        "split('a')", "items", "upper", "length", "is defined", "is string", "is mapping", "~", "+", "*", "[::-1]", "[1:]",
        "%", "'%s' %", ".format(", "generation", "endgeneration", "break", "continue", "range(3)", "filter", "call",
        "self", "cycler('a')", "joiner()", "lipsum(1)", "dict(a=1)", "__class__", "|attr('a')", "|map('upper')", "|list",
    )
)  # fmt: skip


def _chats() -> Try:
    """Messages, tools and variables of a chat, as a prompt of the template that the first byte names."""
    from pyllama_raw.options.chat_templates import TEMPLATES
    from pyllama_raw.prompts.chat import ChatSettings
    from pyllama_raw.prompts.prompt import PromptEncoder
    from pyllama_raw.testing import FakeVocab

    encoders = [PromptEncoder(FakeVocab(), text, 2**15) for text in TEMPLATES.values()]

    def attempt(data: bytes) -> None:
        encoder = encoders[data[0] % len(encoders)] if data else encoders[0]
        try:
            chat = json.loads(data[1:])
        except (ValueError, RecursionError):
            chat = data[1:].decode(errors="surrogateescape")
        if not isinstance(chat, dict):
            encoder.read(chat)
            return
        kwargs = chat.get("kwargs")  # an engine takes a mapping only
        variables = kwargs if isinstance(kwargs, dict) else None
        settings = ChatSettings(chat.get("tools"), variables, None)
        encoder.read(chat.get("messages"), settings)  # type: ignore[arg-type]

    return attempt


def _chat_seeds() -> list[bytes]:
    chats = [
        {"messages": CHAT, "tools": TOOLS, "kwargs": {"enable_thinking": False}},
        {"messages": CHAT[1:2] + CHAT[:1]},
        {"messages": [*CHAT[:2], {"role": "assistant", "content": "begun"}], "kwargs": {"add_generation_prompt": False}},
        CHAT[:2],
    ]  # fmt: skip
    return [
        bytes([index]) + json.dumps(chat).encode()
        for index in range(3)
        for chat in chats
    ]


CHAT_WORDS = tuple(
    word.encode()
    for word in (
        "role", "content", "tool_calls", "function", "arguments", "name", "id", "tool_call_id", "reasoning_content",
        "tools", "kwargs", "messages", "type", "text", "user", "assistant", "developer", "<s>", "</s>", "<|im_end|>",
        "add_generation_prompt", "enable_thinking", "description", "parameters", "documents",
    )
)  # fmt: skip


def _texts() -> Try:
    """A text for the tokenizer that the first byte names; special tokens are read if it is odd."""
    from pyllama_raw.native.model import Model
    from scripts.tiny_models.splitting import SPLITTING
    from tests.support.tiny import tiny_model

    path, vocabs = tiny_model("llama"), {}

    def vocab_of(name: str) -> Any:
        if name not in vocabs:
            model = Model.load(
                path, vocab_only=True, kv_overrides={"tokenizer.ggml.pre": name}
            )
            vocabs[name] = model
        return vocabs[name].vocab

    def attempt(data: bytes) -> None:
        kind = data[0] if data else 0
        vocab = vocab_of(SPLITTING[kind // 2 % len(SPLITTING)])
        text = data[1:].decode(errors="replace")
        is_odd = bool(kind % 2)
        tokens = vocab.tokenize(text, add_special=is_odd, parse_special=is_odd)
        assert all(0 <= token < vocab.n_tokens for token in tokens)

    return attempt


def _text_seeds() -> list[bytes]:
    texts = [
        b"Hello, world! 123\n\n  It's <|im_end|>\t",
        "Ünï東京🙂 \u3000".encode(),
        b"a" * 600,
        b" " * 600 + b"x",
    ]
    return [bytes([number]) + text for number in range(0, 184, 23) for text in texts]


TEXT_WORDS = (
    b"a", b"A", b" ", b"\n", b"\t", b"7", b".", "ü".encode(), "東".encode(), "\u3000".encode(), "🙂".encode(),
    b"<|im_end|>", b"<|im_start|>", b"<s>", "\u2581".encode(), b"a" * 300, b" " * 300, b"7" * 300, b"\xff",
)  # fmt: skip

TARGETS = (
    Target("templates", _templates, _template_seeds, (), words=TEMPLATE_WORDS, max_cpu_s=2, max_mib=512, may_exceed=True),
    Target("chats", _chats, _chat_seeds, (RequestError,), words=CHAT_WORDS, n_head=1),
    Target("texts", _texts, _text_seeds, (InvalidRequest,), words=TEXT_WORDS, n_head=1, max_bytes=2**14),
)  # fmt: skip
