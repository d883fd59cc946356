"""
Loading a model while Python imports what comes next.

A model of some hundred megabytes is loaded by C in about the time in which the rest of
the engine is imported, so a thread does that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from pyllama_raw.engine.model_files import model_files
from pyllama_raw.native import libllama
from pyllama_raw.native.model import Model

if TYPE_CHECKING:
    from pyllama_raw.config import EngineConfig
    from pyllama_raw.engine.parts import EngineParts

NEXT = (
    "pyllama_raw.engine.build",
    "pyllama_raw.engine.loop",
    "pyllama_raw.preparation",
)


def build(
    path: Path,
    config: EngineConfig | None,
    progress: Callable[[float], bool] | None = None,
) -> EngineParts:
    """
    Load the model and make its context; blocks for as long as that takes.

    Args:
        config: None are the defaults; the model need not wait for pydantic then.
        progress: gets the loaded fraction; returning False cancels the load.

    Raises:
        ModelLoadFailed, ContextFailed, LibraryNotBuilt: nothing is left behind.
        Unsupported: the model does not generate text token by token.
    """
    libllama.load()  # first: this, too, needs the interpreter, and C is to begin soon
    importing = Thread(target=_import_all, name="pyllama-import")
    importing.start()
    try:
        fields = {} if config is None else config.model.model_dump()
        files = model_files(path)
        model = Model.load(path, progress=progress, **fields)
        try:
            from pyllama_raw.config import EngineConfig
            from pyllama_raw.engine.build import assemble

            return assemble(model, config or EngineConfig(), files)
        except BaseException:
            model.close()
            raise
    finally:
        importing.join()


def _import_all() -> None:
    """What cannot be imported says so where it is used."""
    for name in NEXT:
        with suppress(ImportError):
            import_module(name)
