#!/usr/bin/env python3
"""
Be llama-server for the tests of llama.cpp's own server: `LLAMA_SERVER_BIN_PATH` names this.

Flags become options of pyllama_raw.serve, and each model of the tests, which lies on a hub, a
tiny random one of its class. `python -m scripts.try_llama_tests` runs those tests.

What llama-server's command line decides and no option of ours does is put before the
application: whether templates think, and endpoints that it has only with a flag.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import anyio
import uvicorn

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    MediaConfig,
    ModelConfig,
    SchedulerConfig,
)
from pyllama_raw.serve import ServeConfig, make_app
from scripts.mutations import gguf_file
from scripts.tiny_models import vocab
from scripts.tiny_models.gguf_values import encode
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
CHAT_PATHS = ("/chat/completions", "/apply-template")
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
POOLINGS = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}
WITHOUT = {"slots": ("/slots", 501), "metrics": ("/metrics", 501), "ui": ("/", 404)}


def main() -> None:
    """Answer until a signal comes."""
    anyio.run(serve, parsed(sys.argv[1:]))


def parsed(arguments: list[str]) -> Namespace:
    """What the tests' ServerProcess passes; other flags are refused."""
    parser = ArgumentParser(allow_abbrev=False)
    for name in ("alias", "chat-template", "chat-template-file", "cors-origins"):
        parser.add_argument(f"--{name}")
    for name in ("api-key", "hf-repo", "hf-file", "media-path", "pooling", "reasoning"):
        parser.add_argument(f"--{name}")
    for name in ("tags", "-ctk", "-ctv", "-fa", "reasoning-format", "cache-ram"):
        parser.add_argument(name if name.startswith("-") else f"--{name}")
    for name in ("port", "seed", "batch-size", "ubatch-size", "threads", "ctx-size"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("parallel", "n-predict", "n-gpu-layers"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("offline", "embedding", "reranking", "metrics", "kv-unified"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("swa-full", "verbose", "context-shift", "no-mmproj", "cont-batching"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--no-cache-idle-slots", action="store_true")
    parser.add_argument("--backend_sampling", action="store_true")
    parser.add_argument("--slots", action=BooleanOptionalAction)
    parser.add_argument("--jinja", action=BooleanOptionalAction)
    parser.add_argument("--ui", action=BooleanOptionalAction, default=True)
    parser.add_argument("--lora", action="append", default=[])
    parser.add_argument("--temp", type=float)
    parser.add_argument("--host", default="127.0.0.1")
    return parser.parse_args(arguments)


async def serve(flags: Namespace) -> None:
    """Open the engine and answer at each host."""
    if flags.api_key:
        os.environ["PYLLAMA_RAW_API_KEYS"] = flags.api_key
    config: dict[str, Any] = {"any_model": True, "metrics_names": ["llamacpp"]}
    config["media_path"] = flags.media_path
    config["cors_origins"] = [flags.cors_origins or "*"]
    values = {"seed": flags.seed, "temperature": flags.temp}
    values["max_tokens"] = flags.n_predict if (flags.n_predict or -1) > 0 else None
    config["defaults"] = {n: v for n, v in values.items() if v is not None}
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model, engine_config = resolved(flags, Path(folder))
        engine = await stack.enter_async_context(AsyncEngine.open(model, engine_config))
        for file in flags.lora:
            await engine.load_adapter(Path(file).stem, file)
        name = min((flags.alias or "default").split(","))
        app = Front(make_app({name: engine}, ServeConfig(**config)), flags)
        server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", lifespan="off", http="h11")
        )
        await server.serve([listener(h, flags.port) for h in flags.host.split(",")])


def listener(host: str, port: int) -> socket.socket:
    """A socket that waits at *host*."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((host, port))
    return server


def resolved(flags: Namespace, folder: Path) -> tuple[Path, EngineConfig]:
    """The file and the options; a model of another template is written to *folder*."""
    file = f"{flags.hf_repo}/{flags.hf_file}"
    overrides: dict[str, int] = {**FILL} if "infill" in file else {}
    media = MediaConfig()
    if "tinygemma3" in file:
        projector, model = tiny_projector(PROJECTOR)
        media = MediaConfig(mmproj=projector)
    else:
        name = next((MODELS[part] for part in MODELS if part in file), "llama")
        model = tiny_model(name)
    if flags.pooling:
        architecture = "bert" if "bert" in file else "llama"
        overrides |= {f"{architecture}.pooling_type": POOLINGS[flags.pooling]}
    template = TEMPLATES.get(flags.chat_template, flags.chat_template)
    if flags.chat_template_file:
        template = Path(flags.chat_template_file).read_text()
    if template is not None and template != "chatml":  # that is the model's own
        model = with_template(model, template, folder / "model.gguf")
    n_batch = flags.batch_size or 2048
    context = ContextConfig(
        n_ctx=flags.ctx_size,
        n_batch=n_batch,
        n_ubatch=min(flags.ubatch_size or 512, n_batch),
        kv_unified=flags.kv_unified,
    )
    full = "shift" if flags.context_shift else "stop"
    scheduler = SchedulerConfig(n_slots=flags.parallel or 4, context_full=full)
    options = ModelConfig(kv_overrides=overrides)
    return model, EngineConfig(
        model=options, context=context, scheduler=scheduler, media=media
    )


def with_template(model: Path, template: str, path: Path) -> Path:
    """Write *model* with another chat template to *path*."""
    file = gguf_file.read(model)
    file.values[b"tokenizer.chat_template"] = encode(template)
    path.write_bytes(file.encode())
    return path


class Front:
    """ASGI in front of the application: values and endpoints by the flags."""

    def __init__(self, app: Any, flags: Namespace) -> None:
        self._app = app
        self._closed = {
            path: status
            for flag, (path, status) in WITHOUT.items()
            if not getattr(flags, flag)
        }
        self._thinks, self._tells = flags.reasoning != "off", flags.verbose

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request; the tests look for names of headers as llama-server writes them."""

        async def answer(message: Any) -> None:
            headers = message.get("headers", ())
            if headers:
                message["headers"] = [(name.title(), value) for name, value in headers]
            await send(message)

        await self._answer(scope, receive, answer)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if path in self._closed:
            start = {"type": "http.response.start", "status": self._closed[path]}
            failure = {"error": {"message": "the flag is not given", "type": "off"}}
            await send({**start, "headers": [(b"content-type", b"application/json")]})
            await send(
                {"type": "http.response.body", "body": json.dumps(failure).encode()}
            )
        elif scope.get("method") == "POST" and path.endswith(CHAT_PATHS):
            await self._app(*await self._filled(scope, receive), send)
        else:
            await self._app(scope, receive, send)

    async def _filled(self, scope: Any, receive: Any) -> tuple[Any, Any]:
        """The request with the variable of its template, if it gives none."""
        body, has_more = b"", True
        while has_more:
            message = await receive()
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
        fields = json.loads(body)
        if isinstance(fields, dict):
            fields.setdefault("chat_template_kwargs", {"enable_thinking": self._thinks})
            fields.setdefault("verbose", self._tells)
        body = json.dumps(fields).encode()
        size = (b"content-length", str(len(body)).encode())
        headers = [h for h in scope["headers"] if h[0] != b"content-length"]
        parts = [{"type": "http.request", "body": body}]

        async def again() -> Any:
            return parts.pop() if parts else await receive()

        return {**scope, "headers": [*headers, size]}, again


if __name__ == "__main__":
    main()
