"""`info`: the library, its devices, a model and the limits its engine would have."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyllama_raw import __version__
from pyllama_raw._ffi import build_record
from pyllama_raw.cli.options import engine_config, model_spec
from pyllama_raw.engine.estimate import estimate, fitted, kernels_used, probe_model
from pyllama_raw.engine.info import Capabilities, Operation, probe
from pyllama_raw.engine.layout import (
    SequenceLayout,
    checked_config,
    context_fields,
    layout_of,
    limits_of,
    slot_cost,
    step_fields,
)
from pyllama_raw.errors import PyllamaError, Unsupported
from pyllama_raw.native import libllama
from pyllama_raw.native.context import Context
from pyllama_raw.native.kernels import table
from pyllama_raw.native.model import Model
from pyllama_raw.native.projector import Projector
from pyllama_raw.options.chat_templates import model_template
from pyllama_raw.options.config import EngineConfig
from pyllama_raw.options.models import resolve_model, with_projector
from pyllama_raw.options.sampling import SamplingParams, declared, with_declared

MODEL_FACTS = (
    "desc",
    "ftype",
    "size_bytes",
    "n_params",
    "n_head",
    "n_head_kv",
    "n_swa",
    "is_recurrent",
    "is_hybrid",
)
MEMORY_FACTS = ("can_cut", "can_shift", "images", "sounds")
PROJECTOR_FACTS = ("sees", "hears", "sample_rate", "uses_mrope", "n_embd", "n_bytes")
ANOTHER_BUILD = """\
another build, in the source tree
  CUDA               PYLLAMA_RAW_CMAKE_ARGS=-DGGML_CUDA=ON pip install .
  Vulkan             PYLLAMA_RAW_CMAKE_ARGS=-DGGML_VULKAN=ON pip install .
  any CPU            PYLLAMA_RAW_CPU=any pip install .
  a source           PYLLAMA_RAW_SOURCE=llama.cpp pip install .
  an installed one   PYLLAMA_RAW_PREFIX=/usr pip install .
"""
VOCAB_FACTS = ("kind", "bos", "eos", "add_bos", "add_eos")


def info(options: Namespace) -> int:
    """Run the command; return its exit status."""
    if options.build:
        return show_build(as_json=options.json)
    return show(model_spec(options), engine_config(options), as_json=options.json)


def show(spec: str | Path | None, config: EngineConfig, *, as_json: bool) -> int:
    """Tell of the model *spec* with the options *config*; returns an exit status."""
    facts: dict[str, Any] = {}
    error: PyllamaError | None = None
    try:
        for name, part in _facts(spec, config):
            facts[name] = part
            if not as_json:
                sys.stdout.write("\n".join(_lines(name, part)))
                sys.stdout.flush()
    except PyllamaError as raised:
        error = raised
        facts["error"] = {"type": type(raised).__name__, "message": str(raised)}
    if as_json:
        sys.stdout.write(f"{json.dumps(facts, indent=2)}\n")
    if error is not None:
        sys.stderr.write(f"error: {error}\n")
    return 0 if error is None else 1


def show_build(*, as_json: bool) -> int:
    """Tell how the library was built; nothing is loaded, because loading it may fail."""
    record = build_record()
    if as_json:
        sys.stdout.write(f"{json.dumps(record, indent=2)}\n")
    elif record:
        sys.stdout.write("\n".join([*_lines("build", record), ANOTHER_BUILD]))
    else:
        sys.stderr.write("error: nothing says how the library was built\n")
    return 0 if record else 1


def _facts(spec: str | Path | None, config: EngineConfig) -> Iterator[tuple[str, Any]]:
    yield (
        "library",
        {
            "pyllama_raw": __version__,
            "llama_cpp": libllama.llama_version(),
            "cpu": libllama.cpu_level(),
            "cpu variant": _variant(),
            "system": libllama.system_info(),
        },
    )
    yield (
        "kernels",
        {
            f"{row.computes} by {row.needs}": row.is_usable or f"no: {row.why_not}"
            for row in table()
        },
    )
    yield "devices", {device.name: asdict(device) for device in libllama.devices()}
    path = resolve_model(spec)
    capabilities = probe(path, config.model.kv_overrides)
    yield "file", {"path": str(path), **_file(capabilities)}
    capabilities.check(*Operation)
    config = fitted(path, with_projector(config, spec, path) or config)
    config = checked_config(capabilities.model, config)
    with Model.load(path, **config.resolved_model.loading) as model:
        template = model_template(config.model.chat_template, model.chat_template())
        has_chats = template is not None and "generate" in capabilities.operations
        source = template.source if template is not None and has_chats else None
        yield "model", _model(model) | {"chat_template": source}
        if config.media.mmproj is not None:
            yield "projector", _projector(config.media.mmproj, model)
        yield "memory", _memory(path, config)
        if Operation.GENERATE in capabilities.refusals:
            yield "limits", step_fields(model, config)
            return
        n_slots = config.scheduler.n_slots
        resolved = config.resolved_context
        fields: dict[str, Any] = context_fields(resolved, n_slots, model.n_ctx_train)
        layout = layout_of(model, config)
        with Context(model, n_seq_max=layout.n_seq_max, **fields) as context:
            limits = _limits(context, config, layout)
        yield "limits", limits | {"kernels": kernels_used(model, config)}


def _variant() -> str | None:
    variant = libllama.cpu_variant()
    return None if variant is None else f"{variant.name} ({variant.reason})"


def _file(capabilities: Capabilities) -> dict[str, Any]:
    """Facts that the header states, and those that follow from it."""
    return {
        **asdict(capabilities.model),
        "operations": ", ".join(capabilities.operations) or None,
        **{f"no_{name}": why for name, why in capabilities.refusals.items()},
    }


def _memory(path: Path, config: EngineConfig) -> dict[str, Any]:
    """Reckonings of libllama, and facts that follow from the kind of memory."""
    need, facts = estimate(path, config), probe_model(path, config)
    sizes = {
        f"{device.device}_{name}": size
        for device in need.devices
        for name, size in asdict(device).items()
        if name != "device" and size
    }
    return sizes | {name: getattr(facts, name) for name in MEMORY_FACTS}


def _model(model: Model) -> dict[str, Any]:
    vocab = {f"vocab_{name}": getattr(model.vocab, name) for name in VOCAB_FACTS}
    return {
        **{name: getattr(model, name) for name in MODEL_FACTS},
        **vocab,
        **_sampling(model.meta),
    }


def _projector(path: str | Path, model: Model) -> dict[str, Any]:
    with Projector.load(path, model) as projector:
        facts = {name: getattr(projector, name) for name in PROJECTOR_FACTS}
    return {"path": str(path), **facts}


def _sampling(metadata: Mapping[str, str]) -> dict[str, str]:
    """Sampling as the file declares it, and the reason if it cannot be used."""
    facts = {f"sampling_{key}": text for key, text in declared(metadata).items()}
    try:
        with_declared(SamplingParams(from_model=True), metadata)
    except Unsupported as error:
        facts["sampling_error"] = str(error)
    return facts


def _limits(
    context: Context, config: EngineConfig, layout: SequenceLayout
) -> dict[str, Any]:
    limits = asdict(limits_of(context, config, layout))
    cost = slot_cost(context)
    return {
        **limits,
        "kind": layout.kind.value,
        "snapshot_bytes": f"{cost.base_bytes} + {cost.token_bytes} a token",
        "cache": config.cache.mode,
        "cache_bytes": config.cache.max_bytes,
        "n_ctx": context.n_ctx,
        "n_ubatch": context.n_ubatch,
        "n_threads": config.resolved_context.threads,
        "flash_attn": config.resolved_context.flash_attn,
        "token_budget": config.scheduler.token_budget,
        "max_waiting": config.scheduler.max_waiting,
    }


def _lines(name: str, part: dict[str, Any]) -> Iterator[str]:
    """A heading and one line for each fact."""
    yield name
    width = max(18, *map(len, part))  # values are a column
    for key, value in part.items():
        text = _device(value) if name == "devices" else _shown(value)
        yield f"  {key:<{width}} {text}"
    yield "\n"


def _device(device: dict[str, Any]) -> str:
    free, total = device["memory_free_bytes"], device["memory_total_bytes"]
    memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return f"{device['description']} ({device['kind']}, {memory}, id {device['stable_id']})"


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
