"""
Loading a model while Python imports what comes next.

A model of some hundred megabytes is loaded by C in about the time in which the rest of
the engine is imported, so a thread does that.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib import import_module
from logging import getLogger
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from pyllama_raw.engine.info import Operation, capabilities_of, model_info, probe
from pyllama_raw.engine.shared_models import ModelUse, Report, open_model
from pyllama_raw.engine.watcher import pass_on_lines
from pyllama_raw.native import libllama
from pyllama_raw.native.gguf import NO_OVERRIDES

if TYPE_CHECKING:
    from pyllama_raw.engine.parts import EngineParts, Inheritance
    from pyllama_raw.options.config import EngineConfig

_log = getLogger(__name__)

NEXT = (
    "pyllama_raw.engine.build",
    "pyllama_raw.engine.logs",
    "pyllama_raw.engine.thread",
    "pyllama_raw.api.session",
)


def build(
    path: Path,
    config: EngineConfig | None,
    needs: str | None = None,
    report: Report = lambda _: True,
    inheritance: Inheritance | None = None,
) -> EngineParts:
    """
    Load the model and make its context; blocks for as long as that takes.

    Args:
        config: None are the defaults; the model need not wait for pydantic then.
        needs: an operation that the model must be able to do; None: any.
        report: gets the loaded fraction; returning False cancels the load.
        inheritance: what there is of earlier parts of the engine.

    Raises:
        ModelLoadFailed, ContextFailed, LibraryNotBuilt: nothing is left behind.
        Unsupported: the model is of no use here; no weight was read.
    """
    libllama.load()  # first: this, too, needs the interpreter, and C is to begin soon
    overrides = NO_OVERRIDES if config is None else config.model.kv_overrides
    options: dict[str, Any] = {}
    # The header tells what is refused before a weight is read.
    capabilities = probe(path, overrides)
    capabilities.check(*_wanted(needs))
    if config is not None:
        from pyllama_raw.engine.layout import checked_config

        checked_config(capabilities.model, config)
        # Where memory is short, fewer cells and layers.
        if config.fit_ctx:
            from pyllama_raw.engine.estimate import fitted

            config = fitted(path, config)
        from pyllama_raw.options.config import OF_CHATS

        options = config.resolved_model.model_dump(
            exclude_defaults=True, exclude={*OF_CHATS}
        )
    # C loads the model, and Python imports what comes next.
    importing = Thread(target=_import_all, name="pyllama-import")
    importing.start()
    try:
        use = open_model(path, options, report)
        return build_on(use, config, needs, inheritance)
    finally:
        importing.join()


def build_on(
    use: ModelUse,
    config: EngineConfig | None,
    needs: str | None = None,
    inheritance: Inheritance | None = None,
) -> EngineParts:
    """Like build(), of a model that is loaded; *use* is closed with the parts."""
    with ExitStack() as undo:
        undo.callback(pass_on_lines)
        undo.callback(use.close)
        # C has loaded the model, and the thread has imported these meanwhile.
        from pyllama_raw.engine.build import assemble, assemble_embedder
        from pyllama_raw.engine.life import Restarts
        from pyllama_raw.engine.logs import open_logs
        from pyllama_raw.options.config import EngineConfig

        config, model = config or EngineConfig(), use.model
        # What the model can do, by its header, and by what libllama makes of it.
        capabilities = capabilities_of(model_info(model.path, model.header))
        if model.is_recurrent or model.is_hybrid:
            capabilities = capabilities.without(
                "the model keeps a recurrent state of its texts",
                Operation.EMBED,
                Operation.RANK,
            )
        capabilities.check(*_wanted(needs))
        if Operation.GENERATE in capabilities.operations:
            memory = None if inheritance is None else inheritance.memory
            parts = assemble(use, config, capabilities, memory)
        else:
            parts = assemble_embedder(use, config, capabilities)
        undo.callback(parts.release)
        # Logs and the budget of restarts may be those of the session before.
        logs = restarts = None
        if inheritance is not None:
            restarts = inheritance.restarts
            logs = (
                inheritance.logs.share()
                if inheritance.log_config == config.log
                else None
            )
        engine = replace(
            parts,
            metadata=model.meta,
            labels=model.labels,
            model_files=use.files,
            logs=logs or open_logs(config.log),
            restarts=restarts or Restarts(config.max_restarts),
        )
        if config.warm_up:
            engine.executor.warm_up()
        undo.pop_all()
    pass_on_lines()
    limits = engine.scheduler.limits
    text = "opened %s: %d slots, %d cells"
    _log.info(text, model.path, limits.n_slots, limits.n_cells)
    return engine


def _wanted(needs: str | None) -> Iterable[Operation]:
    return Operation if needs is None else (Operation(needs),)


def _import_all() -> None:
    """Import all of NEXT; what cannot be imported says so where it is used."""
    for name in NEXT:
        with suppress(ImportError):
            import_module(name)
