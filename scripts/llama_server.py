#!/usr/bin/env python3
"""
Be llama-server for the tests of llama.cpp's own server: `LLAMA_SERVER_BIN_PATH` names this.

It is `pyllama-llama-server` with the same arguments, but for the models of the tests, which lie on a
hub: a tiny random one of its class stands for each. `python -m scripts.try_llama_tests` runs
those tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pyllama_raw.cli.llama_server import main
from scripts.tiny_models import vocab
from tests.tiny import tiny_model, tiny_projector

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
    return own if "--alias" in values else [*own, "--alias", "default"]


if __name__ == "__main__":
    sys.exit(main(arguments(sys.argv[1:])))
