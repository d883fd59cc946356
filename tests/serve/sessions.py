"""Ten turns in the shapes of Codex and of Claude Code, made by hand from documented fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

N_TURNS = 10
SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}
RULES = "You are a careful engineer. Read before you write, and tell what you did. " * 8


def billing(turn: int) -> str:
    """The line that changes with each request."""
    return (
        f"x-anthropic-billing-header: cc_version=2.1.{turn}.{turn * 7919:04x}; "
        f"cc_entrypoint=cli; cch={turn * 104729:05x};"
    )


def claude_code() -> Iterator[dict[str, Any]]:
    """Bodies of `/v1/messages`; the status of git changes in what the user says last."""
    cached = {"cache_control": {"type": "ephemeral"}}
    messages: list[dict[str, Any]] = []
    for turn in range(N_TURNS):
        status = f"gitStatus: M file{turn}.py"
        content: list[dict[str, Any]] = [{"type": "text", "text": f"Go on: {turn}."}]
        if messages:
            result = {"type": "tool_result", "tool_use_id": f"toolu_{turn - 1}"}
            content.insert(0, result | {"content": f"line {turn} of the file"})
        content.append({"type": "text", "text": f"<system-reminder>{status}"} | cached)
        messages.append({"role": "user", "content": content})
        yield {
            "max_tokens": 4,
            "system": [
                {"type": "text", "text": billing(turn)},
                {"type": "text", "text": "You are Claude Code."},
                {"type": "text", "text": RULES} | cached,
            ],
            "messages": [*messages],
            "tools": [
                {"name": "Bash", "description": "Runs.", "input_schema": SCHEMA},
                {"name": "Read", "description": "Reads.", "input_schema": SCHEMA},
            ],
            "metadata": {"user_id": "user_1"},
            "extra_body": {"context_management": {"edits": []}},
        }
        content.pop()  # the status is said anew each time
        use = {"type": "tool_use", "id": f"toolu_{turn}", "name": "Bash"}
        calls = [use | {"input": {"command": f"cat file{turn}.py"}}]
        written = [{"type": "text", "text": f"I read file {turn}."}, *calls]
        messages.append({"role": "assistant", "content": written})


def codex() -> Iterator[dict[str, Any]]:
    """Bodies of `/v1/responses`, which have all items each time."""
    words = "<environment_context><cwd>/project</cwd></environment_context>"
    items: list[dict[str, Any]] = [
        {
            "type": "message",
            "role": role,
            "content": [{"type": "input_text", "text": text}],
        }
        for role, text in (("developer", "Be brief."), ("user", words))
    ]
    for turn in range(N_TURNS):
        content = {"type": "input_text", "text": f"Go on: {turn}."}
        items.append({"type": "message", "role": "user", "content": [content]})
        yield {
            "instructions": RULES,
            "input": [*items],
            "tools": [
                {
                    "type": "function",
                    "name": "shell",
                    "description": "Runs.",
                    "strict": False,
                    "parameters": SCHEMA,
                },
                {
                    "type": "custom",
                    "name": "apply_patch",
                    "format": {"type": "grammar"},
                },
                {"type": "web_search"},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "session",
            "max_output_tokens": 4,
            "extra_body": {"client_metadata": {"turn": str(turn)}},
        }
        call = {"type": "function_call", "call_id": f"call_{turn}", "name": "shell"}
        output = {"type": "function_call_output", "call_id": f"call_{turn}"}
        items += [
            call | {"arguments": f'{{"command": "cat file{turn}.py"}}'},
            output | {"output": f"line {turn} of the file"},
        ]
