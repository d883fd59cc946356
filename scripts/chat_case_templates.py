"""Templates of llama.cpp's source, and the ends of their prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyllama_raw.prompts.rendering.template import CompiledTemplate
from pyllama_raw.replies.spec import ReplySpec
from scripts.llama_chat_cases import Case, Message


class Template:
    """One template of the source."""

    def __init__(self, path: Path) -> None:
        self.source = path.read_text("utf-8")
        tokens = {"bos_token": "", "eos_token": ""}
        self._compiled = CompiledTemplate(self.source, tokens)

    def render(
        self,
        messages: list[Any],
        tools: list[Any],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str | None:
        try:
            text, _ = self._compiled.render(
                messages, tools=tools, kwargs=variables, asks=add_generation_prompt
            )
        except Exception:  # noqa: BLE001 - templates are programs of strangers
            return None
        return text

    def prefix(self, case: Case, spec: ReplySpec) -> str:
        """The end of the prompt that *case* is a reply to, after its last message."""
        messages = [_plain(message) for message in case.messages] or [_plain(USER)]
        chat = messages[:-1] if case.continues else messages
        with_prompt = self._text(case, chat, asks=True)
        before = self._text(case, chat, asks=False)
        if not case.continues:
            return with_prompt[_n_common(with_prompt, before) :]
        last = messages[-1]
        word = "content" if case.continues == "content" else "reasoning_content"
        text = self._text(case, [*chat, {"content": "x", **last}], asks=False)
        place = text.rfind(last[word].strip()) if last[word] else -1
        if place >= _n_common(text, before):
            return text[_n_common(text, before) : place + len(last[word].strip())]
        return with_prompt[_n_common(with_prompt, before) :] + _begun(
            spec, last, case.continues
        )

    def _text(self, case: Case, chat: list[Any], asks: bool) -> str:
        variables = {"enable_thinking": case.enable_thinking}
        return (
            self.render(chat, case.tools, add_generation_prompt=asks, **variables) or ""
        )


USER = Message("user", "Hey there!")


def _plain(message: Message) -> dict[str, Any]:
    calls = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": args}}
        for name, args, id_ in message.tool_calls
    ]
    fields = {
        "role": message.role,
        "content": message.content,
        "reasoning_content": message.reasoning_content,
    }
    if message.tool_call_id:
        fields |= {"tool_call_id": message.tool_call_id}
    return fields | ({"tool_calls": calls} if calls else {})


def _n_common(a: str, b: str) -> int:
    pairs = zip(a, b, strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _begun(spec: ReplySpec, last: dict[str, Any], continues: str) -> str:
    """What a template that prints no reasoning would print of the message *last*."""
    text = ""
    if spec.reasoning and last["reasoning_content"]:
        text = spec.reasoning.start[0] + last["reasoning_content"]
        if continues == "content":
            text += spec.reasoning.end[0]
    return text + last["content"]
