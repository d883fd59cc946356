"""
Chat templates by name, for models whose file has none, or another one than is wanted.

A template is given as its text, as a name of TEMPLATES, or as the path of a file. The same rule
holds wherever one is given. Text that is none of these is refused, because Jinja would print it as
it is, and the model would see nothing of the chat.

The templates here are our own words for formats that models were trained on. They print roles that
a format has; the chat is changed for the others (`prompts/rendering/template.py`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

MAX_BYTES = 2**20  # of a file
JINJA = ("{{", "{%")  # every template has one that prints something of a chat

_ASKS = "{% if add_generation_prompt %}"
_ONLY_USERS = """\
{% if message.role not in ("user", "assistant") %}\
{{ raise_exception("the format has no role " + message.role) }}{% endif %}"""

_CHATML = (
    "{% for message in messages %}"
    '{{ "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}'
    "{% endfor %}" + _ASKS + '{{ "<|im_start|>assistant\\n" }}{% endif %}'
)
_HERMES = """\
{%- set first = messages[0].content if messages[0].role == "system" else "" %}
{%- if tools %}
    {{- "<|im_start|>system\\n" + (first + "\\n\\n" if first else "") }}
    {{- "# Tools\\n\\nYou may call these functions. Their signatures are JSON schemas:\\n" }}
    {{- "<tools>" }}
    {%- for tool in tools %}{{- "\\n" + (tool | tojson) }}{%- endfor %}
    {{- "\\n</tools>\\n\\nFor each call, write its name and arguments as a JSON object:\\n" }}
    {{- '<tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call>' }}
    {{- "<|im_end|>\\n" }}
{%- elif first %}
    {{- "<|im_start|>system\\n" + first + "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {%- if loop.first or loop.previtem.role != "tool" %}{{- "<|im_start|>user" }}{%- endif %}
        {{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- "<|im_end|>\\n" }}{%- endif %}
    {%- elif not (loop.first and message.role == "system") %}
        {{- "<|im_start|>" + message.role + "\\n" + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- "\\n" if message.content or not loop.first else "" }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + "}\\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}"""
_LLAMA2 = (
    '{% set system = messages[0].content if messages[0].role == "system" else "" %}'
    '{% for message in messages %}{% if message.role == "user" %}'
    '{{ bos_token + "[INST] " }}{% if system and loop.index0 == 1 %}'
    '{{ "<<SYS>>\\n" + system + "\\n<</SYS>>\\n\\n" }}{% endif %}'
    '{{ message.content + " [/INST]" }}{% elif message.role == "assistant" %}'
    '{{ " " + message.content + " " + eos_token }}{% endif %}{% endfor %}'
)
_LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    '{% set role = "ipython" if message.role == "tool" else message.role %}'
    '{{ "<|start_header_id|>" + role + "<|end_header_id|>\\n\\n" }}'
    '{{ message.content.strip() + "<|eot_id|>" }}{% endfor %}'
    + _ASKS
    + '{{ "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{% endif %}'
)
_GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    + _ONLY_USERS
    + '{% set role = "model" if message.role == "assistant" else "user" %}'
    '{{ "<start_of_turn>" + role + "\\n" + message.content.strip() + "<end_of_turn>\\n" }}'
    "{% endfor %}" + _ASKS + '{{ "<start_of_turn>model\\n" }}{% endif %}'
)
_MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    + _ONLY_USERS
    + '{% if message.role == "user" %}{{ "[INST] " + message.content + "[/INST]" }}'
    '{% else %}{{ " " + message.content + eos_token }}{% endif %}{% endfor %}'
)
_PHI3 = (
    "{% for message in messages %}"
    '{{ "<|" + message.role + "|>\\n" + message.content + "<|end|>\\n" }}{% endfor %}'
    + _ASKS
    + '{{ "<|assistant|>\\n" }}{% endif %}'
)
_PHI4 = (
    "{% for message in messages %}"
    '{{ "<|im_start|>" + message.role + "<|im_sep|>" + message.content + "<|im_end|>" }}'
    "{% endfor %}" + _ASKS + '{{ "<|im_start|>assistant<|im_sep|>" }}{% endif %}'
)
_ZEPHYR = (
    "{% for message in messages %}"
    '{{ "<|" + message.role + "|>\\n" + message.content + eos_token + "\\n" }}{% endfor %}'
    + _ASKS
    + '{{ "<|assistant|>\\n" }}{% endif %}'
)
_VICUNA = (
    '{{ bos_token }}{% for message in messages %}{% if message.role == "system" %}'
    '{{ message.content + "\\n\\n" }}{% elif message.role == "assistant" %}'
    '{{ "ASSISTANT: " + message.content + eos_token + "\\n" }}{% else %}'
    '{{ "USER: " + message.content + "\\n" }}{% endif %}{% endfor %}'
    + _ASKS
    + '{{ "ASSISTANT:" }}{% endif %}'
)
_ALPACA = (
    '{% for message in messages %}{% if message.role == "system" %}'
    '{{ message.content + "\\n\\n" }}{% elif message.role == "assistant" %}'
    '{{ "### Response:\\n" + message.content + eos_token + "\\n\\n" }}{% else %}'
    '{{ "### Instruction:\\n" + message.content + "\\n\\n" }}{% endif %}{% endfor %}'
    + _ASKS
    + '{{ "### Response:\\n" }}{% endif %}'
)
_GRANITE = (
    "{% for message in messages %}"
    '{{ "<|start_of_role|>" + message.role + "<|end_of_role|>" + message.content }}'
    '{{ "<|end_of_text|>\\n" }}{% endfor %}'
    + _ASKS
    + '{{ "<|start_of_role|>assistant<|end_of_role|>" }}{% endif %}'
)
_COMMAND_R = (
    "{% for message in messages %}"
    '{% set role = "CHATBOT" if message.role == "assistant" else message.role.upper() %}'
    '{{ "<|START_OF_TURN_TOKEN|><|" + role + "_TOKEN|>" + message.content.strip() }}'
    '{{ "<|END_OF_TURN_TOKEN|>" }}{% endfor %}'
    + _ASKS
    + '{{ "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>" }}{% endif %}'
)

TEMPLATES = {
    "chatml": _CHATML,
    "hermes": _HERMES,  # ChatML that prints tools
    "llama2": _LLAMA2,
    "llama3": _LLAMA3,
    "gemma": _GEMMA,
    "mistral": _MISTRAL,
    "phi3": _PHI3,
    "phi4": _PHI4,
    "zephyr": _ZEPHYR,
    "vicuna": _VICUNA,
    "alpaca": _ALPACA,
    "granite": _GRANITE,
    "command-r": _COMMAND_R,
}
ALIASES = {
    "chatmltools": "hermes",
    "qwen": "hermes",
    "phi": "phi3",
    "mistralinstruct": "mistral",
    "commandr": "command-r",
}
# A version behind a name, as of qwen2.5 or gemma-3, that the format is the same for.
VERSIONED = ("qwen", "gemma", "llama3", "granite")
FALLBACK = "chatml"
FALLBACK_SOURCE = f"{FALLBACK} (fallback)"
AUTO = "auto"  # a model without a template has the fallback
ALLOWED = (
    "a Jinja template that reads `messages`, the path of one, or a name: "
    f"{', '.join(TEMPLATES)}"
)


class ChatTemplate(NamedTuple):
    """A chat template, and where it is from."""

    text: str
    source: str  # "model", FALLBACK_SOURCE, a name of TEMPLATES, a path, or "text"


def named_template(value: str) -> ChatTemplate | None:
    """The template that *value* is a name of; None: it is no name."""
    word = re.sub(r"[\s._-]", "", value[:64].lower())
    name = ALIASES.get(word, word)
    if name not in TEMPLATES:
        bases = (base for base in VERSIONED if re.fullmatch(rf"{base}\d+", word))
        base = next(bases, name)
        name = ALIASES.get(base, base)
    return ChatTemplate(TEMPLATES[name], name) if name in TEMPLATES else None


def given_template(value: str) -> ChatTemplate:
    """
    The template that *value* is: a text, a name, or the path of a file, which is read.

    Raises:
        ValueError: it is none of these; the message says what is wrong with a file.
    """
    if any(mark in value for mark in JINJA):
        return ChatTemplate(value, "text")
    if (template := named_template(value)) is not None:
        return template
    text = _file(value)
    if not any(mark in text for mark in JINJA):
        raise ValueError("the file is no Jinja template")
    return ChatTemplate(text, value)


def model_template(option: str | None, own: str | None) -> ChatTemplate | None:
    """
    The template for the chats of a model.

    Args:
        option: of the user; None: the model's own; AUTO: that, or the fallback.
        own: in the file of the model, a stranger's, so a path is no path there.

    Raises:
        ValueError: *option* is none.
    """
    if option is not None and option != AUTO:
        return given_template(option)
    if own:
        template = None if any(mark in own for mark in JINJA) else named_template(own)
        return ChatTemplate(own if template is None else template.text, "model")
    if option == AUTO:
        return ChatTemplate(TEMPLATES[FALLBACK], FALLBACK_SOURCE)
    return None


def _file(path: str) -> str:
    """The text of a file. Raises ValueError."""
    try:
        if not path or "\n" in path or not Path(path).is_file():  # a pipe may never end
            raise ValueError("there is no template or file of this name")
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"the file has more than {MAX_BYTES} bytes")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("the file is no text in UTF-8") from None
    except OSError as error:
        raise ValueError(f"the file cannot be read: {error.strerror}") from error
