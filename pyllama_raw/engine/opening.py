"""
Loading a model while Python imports what comes next.

A model of some hundred megabytes is loaded by C in about the time in which the rest of
the engine is imported, so a thread does that.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from pyllama_raw.engine.info import operations, probe
from pyllama_raw.engine.shared_models import ModelUse, Report, open_model
from pyllama_raw.native import libllama
from pyllama_raw.native.gguf import NO_OVERRIDES

if TYPE_CHECKING:
    from pyllama_raw.engine.parts import EngineParts, Inheritance
    from pyllama_raw.options.config import EngineConfig, ModelConfig

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
    capabilities.check(*operations(needs))
    if config is not None:
        # The defaults are right for every model, so they need not be checked, and do not wait
        # for the modules that do it.
        from pyllama_raw.engine.estimate import checked_and_fitted

        config = checked_and_fitted(path, capabilities.model, config)
        options = config.resolved_model.opening
    # C loads the model, and Python imports what comes next.
    importing = Thread(target=_import_all, name="pyllama-import")
    importing.start()
    try:
        use = open_model(path, options, report)
        return _built(use, config, needs, inheritance)
    finally:
        importing.join()


def build_shared(
    use: ModelUse,
    loaded: ModelConfig,
    config: EngineConfig | None,
    needs: str | None = None,
    inheritance: Inheritance | None = None,
) -> EngineParts:
    """
    As build(), on a model that was loaded with the options *loaded*.

    *use* is closed with the parts, and where there are none.
    """
    from pyllama_raw.engine.estimate import on_loaded  # as build() does

    with ExitStack() as undo:
        undo.callback(use.close)
        config = on_loaded(use, loaded, config)
        undo.pop_all()
    return _built(use, config, needs, inheritance)


def _built(
    use: ModelUse,
    config: EngineConfig | None,
    needs: str | None,
    inheritance: Inheritance | None,
) -> EngineParts:
    # Python has imported it while C loaded the model.
    from pyllama_raw.engine.build import build_on

    return build_on(use, config, needs, inheritance)


def _import_all() -> None:
    """Import all of NEXT; what cannot be imported says so where it is used."""
    for name in NEXT:
        with suppress(ImportError):
            import_module(name)
