"""
generate() and score(): single calls, for programs that are not async and for notebooks.

The engine of the last call is kept for the next call with the same model and options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, TypeGuard, overload

from pyllama_raw.api.blocking import Engine
from pyllama_raw.api.results import Result, Score
from pyllama_raw.options.arguments import (
    SINGLE,
    checked_params,
    checked_top,
    reading_prompt,
)
from pyllama_raw.options.config import ContextConfig, EngineConfig, SchedulerConfig
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.prompts.messages import Message
from pyllama_raw.prompts.prompt import Prompt

SCORING = EngineConfig(
    context=ContextConfig(n_outputs_max=256), scheduler=SchedulerConfig(n_slots=1)
)

Prompts = Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[Message]]


@overload
def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str
    prompt: str | Sequence[int] | Sequence[Message],
    params: SamplingParams | None = None,
    *,
    model: str | Path | None = None,
    config: EngineConfig | None = None,
) -> Result: ...


@overload
def generate(
    prompt: Prompts,
    params: SamplingParams | None = None,
    *,
    model: str | Path | None = None,
    config: EngineConfig | None = None,
) -> list[Result]: ...


def generate(
    prompt: Prompt | Prompts,
    params: SamplingParams | None = None,
    *,
    model: str | Path | None = None,
    config: EngineConfig | None = None,
) -> Result | list[Result]:
    """
    Complete one prompt, or several at once; any thread may call.

    The model is kept for the next call, until one names another model or options, or the
    program ends. An event loop that runs in this thread waits: await AsyncEngine there.

    Args:
        prompt: text, token ids or chat messages, or a list of such prompts; a list gives
            a list of results in the same order.
        model: a GGUF file; None: the default model, downloaded if need be.
    """
    params = checked_params(params)
    are_several = are_many(prompt)  # a mistake is told before a model is loaded

    with kept.engine(model, config) as engine:
        if are_several:
            return engine.complete_many(prompt, params)  # type: ignore[arg-type]
        return engine.complete(prompt, params)  # type: ignore[arg-type]


def score(
    prompt: Prompt,
    n_top: int = 0,
    *,
    model: str | Path | None = None,
    config: EngineConfig | None = None,
) -> Score:
    """
    How likely the model finds each token of one prompt; see AsyncEngine.score.

    Args:
        n_top: most likely tokens listed at each place, 0 to 20.
        model: a GGUF file; None: the default model, downloaded if need be.
        config: None: one slot, and many output rows a step.
    """
    n_listed = checked_top(n_top)

    with kept.engine(model, SCORING if config is None else config) as engine:
        return engine.score(prompt, n_listed)


def are_many(prompt: Any) -> TypeGuard[Prompts]:
    """Whether *prompt* is a list of prompts: its items are neither ids nor messages."""
    with reading_prompt(prompt):
        if isinstance(prompt, SINGLE) or not len(prompt):
            return False
        return hasattr(prompt[0], "__len__") and not isinstance(prompt[0], Mapping)


class Kept:
    """At most one engine that nobody uses, for whoever asks for the same one."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._key: tuple[object, ...] | None = None
        self._engine: Engine | None = None
        self._n_users = 0

    @contextmanager
    def engine(
        self, model: str | Path | None, config: EngineConfig | None
    ) -> Iterator[Engine]:
        """The one that is kept, or a new one; who comes while it is loaded waits."""
        key = (model, config, _stamp(model))
        with self._lock:
            if not (self._fits(key) or self._n_users):
                self._close()
                self._engine, self._key = (
                    Engine.open(model, config, needs="generate"),
                    key,
                )
            shared = self._engine if self._fits(key) else None
            self._n_users += shared is not None
        if shared is None:  # the kept one is another, and in use
            with Engine.open(model, config, needs="generate") as own:
                yield own
            return
        try:
            yield shared
        finally:
            with self._lock:
                self._n_users -= 1

    def close(self) -> None:
        """Free what is kept."""
        with self._lock:
            self._close()

    def _fits(self, key: tuple[object, ...]) -> bool:
        return self._engine is not None and self._engine.alive and self._key == key

    def _close(self) -> None:
        engine, self._engine, self._key = self._engine, None, None
        if engine is not None:
            engine.close()


def _stamp(model: str | Path | None) -> tuple[int, int] | None:
    """Changes with the file; None if *model* is not the name of one."""
    try:
        found = Path(model).stat() if model is not None else None
    except (OSError, TypeError, ValueError):
        return None  # opening it says what is wrong
    return None if found is None else (found.st_mtime_ns, found.st_size)


kept = Kept()
