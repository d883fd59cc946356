"""
The server behind llama-server's arguments: what these come to, and how it tells what it does.

Rules:
1. Where nobody says, the service has llama-server's defaults: its port, its sampling, as many cells
   as the model was trained for, one model whatever name a request has.
2. Memory is shared: a slot may have all cells, unless --no-kv-unified divides them.
3. The log goes to stderr. Programs wait for "server is listening on", and look for libllama's lines
   of memory if they ask for a verbose log.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pyllama_raw.cli.llama_arguments import DEFAULT, GLOBAL, Arguments, sections
from pyllama_raw.cli.running import Terminal, run
from pyllama_raw.cli.serve import LoadingLines
from pyllama_raw.engine.info import Operation, probe
from pyllama_raw.errors import ModelNotFound
from pyllama_raw.options.chat_templates import AUTO
from pyllama_raw.options.config import EngineConfig
from pyllama_raw.options.models import (
    fetched_file,
    fetched_models,
    resolve_model,
    resolve_projector,
)
from pyllama_raw.serve.deployment import Deployment, models_of
from pyllama_raw.serve.keys import VARIABLE
from pyllama_raw.serve.run import deploy

PARTS = ("model", "context", "scheduler", "cache", "media", "speculation", "engine")
PORT = 8080
DRAIN_S = 3.0  # programs that end a server wait 5 s and more
FIT_CTX = 4096
N_UBATCH = 512
ENDS_WITH = "PYLLAMA_RAW_ENDS_WITH"
PROCESSES = "PYLLAMA_RAW_MODEL_PROCESSES"
CHILD = "LLAMA_SERVER_ROUTER_PORT"  # a router of llama-server started this
SLEEP = "loading.sleep_idle_s"
VERBOSE = 4  # from here on libllama's lines are told
MAIN = "main: server is listening on"


def serve(parsed: Arguments) -> int:
    """Run the server until it is told to end; return its exit status."""
    own = parsed.part("own")
    _log_to_stderr(own)
    if keys := own.get("api_keys"):
        # Keys of llama-server see all, and change nothing that needs a key of its own.
        os.environ[VARIABLE] = ",".join(f"monitor {key}" for key in keys)
    terminal = Terminal(sys.stdout, sys.stderr)
    deployment = deployment_of(parsed)
    loading = LoadingLines(terminal, deployment.models)
    say = partial(_say, terminal)
    reread = partial(deployment_of, parsed) if is_router(parsed) else None
    starting = partial(deploy, deployment, loading, say, prepare=fill_in, reread=reread)
    run(starting, use_uvloop=find_spec("uvloop") is not None)
    return 0


def _say(terminal: Terminal, line: str) -> None:
    """Tell the address in the line that is looked for, and in our own."""
    terminal.say(f"{MAIN} {line.rsplit(maxsplit=1)[-1]} - starting the main loop")
    terminal.say(line)


def _log_to_stderr(own: Mapping[str, Any]) -> None:
    """Tell warnings, and in a verbose log all of libllama's lines."""
    if own.get("log_disable"):
        return
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file := own.get("log_file"):
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    is_verbose = own.get("verbose") or own.get("verbosity", 0) >= VERBOSE
    log, lines = (
        logging.getLogger("pyllama_raw"),
        logging.getLogger("pyllama_raw.libllama"),
    )
    log.setLevel(logging.WARNING)
    lines.setLevel(logging.INFO if is_verbose else logging.WARNING)
    for handler in handlers:
        log.addHandler(handler)


# -- what the arguments come to ----------------------------------------------------------


def deployment_of(parsed: Arguments) -> Deployment:
    """
    All that the server runs.

    Raises:
        ConfigError: names what is wrong.
    """
    own, service = parsed.part("own"), parsed.part("service")
    open_facts = {"metrics": own.get("metrics", False), "slots": own.get("slots", True)}
    open_facts |= {"page": own.get("ui", True), "props": own.get("props", False)}
    kwargs = own.get("template_kwargs", {}) | parsed.part("own.template_kwargs")
    if "enable_thinking" in kwargs:  # templates know it by two names
        kwargs.setdefault("thinking", kwargs["enable_thinking"])
    kwargs.setdefault("enable_thinking", True)
    models = dict(_models(parsed))
    sources = {name: entry.pop("source", "preset") for name, entry in models.items()}
    service = {
        "in_place_of": "llama-server",
        "any_model": not is_router(parsed),
        "drain_s": DRAIN_S,
        "metrics_names": ["llamacpp"],
        "cors_origins": ["*"],
        "defaults": parsed.part("defaults"),
        "template_kwargs": kwargs,
        "tells_prompts": own.get("verbose", False),
        "closed": [name for name, is_open in open_facts.items() if not is_open],
        "aliases": {
            alias: name
            for name, entry in models.items()
            for alias in entry.pop("aliases")
        },
        **service,
    }
    fields: dict[str, Any] = {"port": PORT, **parsed.part("listen"), "service": service}
    if hosts := own.get("hosts"):
        fields["host"] = ",".join(hosts)
    fields["reuse_port"] = own.get("reuse_port", False)
    fields["ends_with"] = (
        "stdin" if CHILD in os.environ else os.environ.get(ENDS_WITH, "signal")
    )
    fields["loading"] = parsed.part("loading")
    if os.environ.get(PROCESSES) == "1":
        fields["loading"]["model_processes"] = True
    if is_router(parsed):
        fields["loading"]["on_demand"] = True
    fields["models"] = models
    fields["sources"] = sources
    return Deployment.of(fields)


def is_router(parsed: Arguments) -> bool:
    """Whether no model is named, so that requests name those of a folder, of a file or of the cache."""
    own = parsed.part("own")
    return "model" not in own and "hf_repo" not in own


def _models(parsed: Arguments) -> Iterator[tuple[str, dict[str, Any]]]:
    """The entry of each model; none if no model is named."""
    own, folder = parsed.part("own"), parsed.part("loading").get("models_dir")
    if not is_router(parsed):
        name, entry = _entry(parsed, None)
        is_cached = parsed.part("loading") or os.environ.get(PROCESSES) == "1"
        yield name, entry | ({"load_on_start": True} if is_cached else {})
        return
    # Models of the cache give way to those of a folder. Presets say more of both, and name others.
    values: dict[str, dict[str, Any]] = {}
    sources: dict[str, str] = {}
    for fetched in fetched_models():
        sources[fetched.name] = "cache"
        values[fetched.name] = {"own.model": str(fetched.path)}
        if fetched.projector is not None:
            values[fetched.name]["media.mmproj"] = str(fetched.projector)
    if folder is not None:
        for name, files in models_of(folder).items():
            sources[name] = "models_dir"
            values[name] = {"own.model": files["path"]}
            if "media" in files:
                values[name]["media.mmproj"] = files["media"]["mmproj"]
    presets = {name: Arguments(dict(places)) for name, places in values.items()}
    if "presets" in own:
        file = Path(own["presets"])
        parts = sections(file)
        of_all = parts.pop(GLOBAL, {})
        parts.pop(DEFAULT, None)
        sources |= dict.fromkeys(parts, "preset")
        for name in {**presets, **parts}:
            preset = presets.setdefault(name, Arguments())
            preset.read_section(of_all, file, skips_unknown=False)
            preset.read_section(parts.get(name, {}), file, skips_unknown=False)
        _list_once(presets)
    for name, preset in presets.items():
        # The command line counts for all models.
        preset.values |= parsed.values
        starts = bool(preset.values.get("own.on_startup"))
        key, entry = _entry(preset, name)
        if SLEEP in preset.values and SLEEP not in parsed.values:
            entry["sleep_idle_s"] = preset.values[SLEEP]
        entry["source"] = sources.get(name, "preset")
        yield key, entry | ({"load_on_start": True} if starts else {})


def _list_once(presets: dict[str, Arguments]) -> None:
    """Make a model of the cache another name of the preset that names it, where this says so."""
    for name, preset in [*presets.items()]:
        own = preset.part("own")
        if not own.get("is_listed_once") or "hf_repo" not in own:
            continue
        file = str(fetched_file(_hub_spec(own)))
        for other in [*presets]:
            if other != name and presets[other].values.get("own.model") == file:
                del presets[other]
                preset.values["own.alias"] = [*own.get("alias", ()), other]


def _hub_spec(own: Mapping[str, Any]) -> str:
    """The name here of a model of a hub, by its file or by the word of its quantisation."""
    repo, colon, quant = own["hf_repo"].partition(":")
    file = own.get("hf_file")
    return f"hf:{repo}/{file}" if file else f"hf:{repo}{colon}{quant}"


def _entry(parsed: Arguments, name: str | None) -> tuple[str, dict[str, Any]]:
    """The name of a model and its entry, with its other names."""
    own = parsed.part("own")
    parts = {part: parsed.part(part) for part in PARTS}
    model, context, scheduler = parts["model"], parts["context"], parts["scheduler"]
    path = own.get("model") or _hub_spec(own)
    # The name is the first by the alphabet, and without any that which was parsed.
    aliases = sorted({*own.get("alias", ()), *([name] if name else ())})
    model_name = name or (aliases[0] if aliases else own.get("hf_repo") or path)
    # Words of one option that are two of ours.
    if model.get("devices") == ["none"]:
        del model["devices"]
        model["n_gpu_layers"] = 0
    if own.get("mmproj_auto") is False:
        parts["media"].pop("mmproj", None)
    elif path.startswith("hf:"):
        parts["media"].setdefault("mmproj", AUTO)
    if own.get("cache") is False:
        parts["cache"]["mode"] = "off"
    elif parts["cache"].get("max_bytes") == 0:
        parts["cache"]["mode"] = "live"
    if "n_batch" in context or "n_ubatch" in context:
        n_batch = context.get("n_batch", 2048)
        context["n_ubatch"] = min(context.get("n_ubatch", N_UBATCH), n_batch)
    if (per_slot := own.get("ctx_per_slot")) and not context.get("n_ctx"):
        context["n_ctx"] = per_slot * scheduler.get("n_slots", 4)
    if context.get("n_ctx") == 0:  # as many as the model was trained for
        del context["n_ctx"]
    parts["engine"].setdefault("fit_ctx", FIT_CTX if own.get("fit", True) else 0)
    model.setdefault("chat_template", AUTO)
    scale = 0.0 if own.get("adapters_off") else 1.0
    adapters = [
        {"name": Path(file).stem, "path": file, "scale": scale * effect}
        for file, effect in own.get("adapters", ())
    ]
    entry = {"path": path, "aliases": aliases, **parts}
    return model_name, entry | ({"adapters": adapters} if adapters else {})


def fill_in(
    path: str | None, config: EngineConfig | None
) -> tuple[str | None, EngineConfig | None]:
    """
    A model file and options with what llama-server takes by itself where nobody says: as many cells
    as the model was trained for, and the projector of its repository, if that has one.

    Thread: a worker, because files may have to be fetched.
    """
    if config is None:
        return path, config
    file = resolve_model(path)
    if str(config.media.mmproj) == AUTO:
        try:
            projector = resolve_projector(AUTO, path, file)
        except ModelNotFound:
            projector = None
        media = config.media.model_copy(update={"mmproj": projector})
        config = config.model_copy(update={"media": media})
    if config.context.n_ctx is not None:
        return str(file), config
    able = probe(file, config.model.kv_overrides)
    n_ctx = max(able.model.n_ctx_train, config.scheduler.n_slots)
    if Operation.GENERATE not in able.operations or not able.model.n_ctx_train:
        return str(file), config
    context = config.context.model_copy(update={"n_ctx": n_ctx})
    return str(file), config.model_copy(update={"context": context})
