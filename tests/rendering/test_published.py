"""Templates of published models take the chats that clients send."""

import pytest

from pyllama_raw.prompts.rendering.template import CompiledTemplate
from tests.rendering.published import REFUSING, compiled_templates

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather now",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}
USER = {"role": "user", "content": "Hello there"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWER = {"role": "tool", "tool_call_id": "abcdefghi", "content": "Sunny"}
SAID = {
    role: [{"role": role, "content": "Be brief."}, USER]
    for role in ("system", "developer")
}
PARTS = [{"type": "text", "text": text} for text in ("One.", "Two.")]

NO_SYSTEM = REFUSING | {"google-gemma-2-2b-it"}
NO_CALLS = NO_SYSTEM | {
    "HuggingFaceTB-SmolLM3-3B", "LFM2-8B-A1B", "LFM2.5-Instruct",
    "ibm-granite-granite-3.3-2B-Instruct", "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}  # fmt: skip
NO_TOOLS = {
    "HuggingFaceTB-SmolLM3-3B", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-ai-DeepSeek-V3.1",
    "google-gemma-2-2b-it", "llama-cpp-rwkv-world", "microsoft-Phi-3.5-mini-instruct",
}  # fmt: skip


@pytest.fixture(scope="module")
def templates() -> dict[str, CompiledTemplate]:
    return compiled_templates()


def without(templates, messages, *words, **options) -> set[str]:
    """Names of the templates that refuse *messages*, or do not print all *words*."""
    found = set()
    for name, template in templates.items():
        try:
            text, _ = template.render(messages, **options)
        except Exception:  # noqa: BLE001 - templates are programs of strangers
            text = ""
        if not all(word in text for word in words):
            found.add(name)
    return found


def test_a_chat_without_tools_is_taken(templates):
    """
    Also where the template expects tools.
    """
    assert without(templates, [USER], "Hello there") == REFUSING & templates.keys()


def test_parts_are_never_shown_as_a_list(templates):
    """
    Their texts are printed by the template, or as lines.
    """
    chat = [{"role": "user", "content": PARTS}]
    texts = [t.render(chat)[0] for name, t in templates.items() if name not in REFUSING]
    n_lines = sum("One.\nTwo." in text for text in texts)

    assert sum("One.Two." in text for text in texts) >= 19
    assert all("One." in text and "Two." in text for text in texts)
    assert [text for text in texts if "'text'" in text or '"text"' in text] == []
    assert n_lines > 0


@pytest.mark.parametrize("role", SAID)
def test_system_and_developer_are_heard(templates, role):
    """
    What a template does not take of them is text of the user.
    """
    assert without(templates, SAID[role], "Be brief.") == REFUSING & templates.keys()


def test_tools_are_printed_or_known_not_to_be(templates):
    """
    A template tells by its prompts whether it prints tools.
    """
    silent = {name for name, template in templates.items() if not template.takes.tools}

    assert silent == NO_TOOLS & templates.keys()
    assert without(templates, [USER], "get_weather", tools=[TOOL]) == (
        silent | REFUSING & templates.keys()
    )


def test_calls_are_printed(templates):
    """
    Arguments in JSON reach every template that knows calls of tools.
    """
    chat = [USER, CALLED, ANSWER]

    assert without(templates, chat, "get_weather", "Paris", tools=[TOOL]) == (
        NO_CALLS & templates.keys()
    )
