#!/usr/bin/env python3
"""
Be llama-server for the tests of llama.cpp's own server: `LLAMA_SERVER_BIN_PATH` names this.

It is `pyllama-llama-server` with the same arguments, but for three things. Models of the tests lie on
a hub: a tiny random one of its class stands for each. Tests count on memory that slots do not share, so
it is divided unless they say otherwise. And they compare names of headers letter by letter.
`python -m scripts.try_llama_tests` runs those tests.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pyllama_raw.cli.llama_server import main
from pyllama_raw.serve.connections import Connection
from scripts.tiny_models import vocab
from tests.support.tiny import tiny_model, tiny_projector

MODELS = {  # the first whose name is in that of the file
    "stories15M_MOE": "llama-moe",
    "bert-bge-small": "bert",
    "jina-reranker": "bert-rank",
}
PROJECTOR = "gemma3"
FILL = {
    "tokenizer.ggml.fim_pre_token_id": vocab.MASK,
    "tokenizer.ggml.fim_suf_token_id": vocab.SEP,
    "tokenizer.ggml.fim_mid_token_id": vocab.UNKNOWN,
}
TEMPLATES = {  # that llama-server has by name
    "command-r": """{% for m in messages %}<|START_OF_TURN_TOKEN|>
{{- '<|' + {'user': 'USER', 'system': 'SYSTEM'}.get(m.role, 'CHATBOT') + '_TOKEN|>' }}
{{- m.content }}<|END_OF_TURN_TOKEN|>{% endfor %}{% if add_generation_prompt -%}
<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}""",
    "llama3": """{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt -%}
<|start_header_id|>assistant<|end_header_id|>

{% endif %}""",
}
WITH_VALUE = ("--hf-repo", "--hf-file", "--alias")


def arguments(line: list[str]) -> list[str]:
    """*line* with a file in place of a model of a hub, and a text in that of a template's name."""
    values = {
        name: line[at + 1] for at, name in enumerate(line[:-1]) if name in WITH_VALUE
    }
    own: list[str] = []
    words = iter(line)
    for word in words:
        if word in ("--hf-repo", "--hf-file"):
            next(words)
        elif word == "--chat-template":
            name = next(words)
            own += [word, TEMPLATES.get(name, name)]
        else:
            own.append(word)
    file = f"{values.get('--hf-repo')}/{values.get('--hf-file')}"
    overrides = dict(FILL) if "infill" in file else {}
    if "tinygemma3" in file:
        projector, model = tiny_projector(PROJECTOR)
        own += [] if "--no-mmproj" in line else ["--mmproj", str(projector)]
    else:
        part = next((part for part in MODELS if part in file), None)
        model = tiny_model(MODELS[part] if part else "llama")
    pairs = ",".join(f"{key}=int:{value}" for key, value in overrides.items())
    own += ["--model", str(model), *(["--override-kv", pairs] if pairs else [])]
    own += [] if "--kv-unified" in line else ["--no-kv-unified"]
    return own if "--alias" in values else [*own, "--alias", "default"]


class TitledTransport:
    """A transport that writes names of headers with large letters, such as Content-Type."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write a part of an answer; a head begins with the version."""
        if data.startswith(b"HTTP/1.1 "):
            head, end, body = bytes(data).partition(b"\r\n\r\n")
            first, *lines = head.split(b"\r\n")
            pairs = [line.partition(b": ") for line in lines]
            titled = [name.title() + colon + value for name, colon, value in pairs]
            data = b"\r\n".join([first, *titled]) + end + body
        self._transport.write(data)


def title_headers() -> None:
    """Have all connections write so."""
    original = Connection.connection_made
    Connection.connection_made = lambda self, transport: original(  # type: ignore[assignment, method-assign]
        self, TitledTransport(transport)
    )


if __name__ == "__main__":
    title_headers()
    sys.exit(main(arguments(sys.argv[1:])))
