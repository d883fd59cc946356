"""
generate() and score(): single calls, for programs that are not async and for notebooks.

Each call opens an engine of its own: for several calls, open an `Engine`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
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

    The model is loaded for this call and freed after it: an `Engine` keeps it for several.
    An event loop that runs in this thread waits: await AsyncEngine there.

    Args:
        prompt: text, token ids or chat messages, or a list of such prompts; a list gives
            a list of results in the same order.
        model: a GGUF file; None: the default model, downloaded if need be.
    """
    params = checked_params(params)
    are_several = are_many(prompt)  # a mistake is told before a model is loaded

    with Engine.open(model, config, needs="generate") as engine:
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
    Tell how likely the model finds each token of one prompt; see AsyncEngine.score.

    Args:
        n_top: most likely tokens listed at each place, 0 to 20.
        model: a GGUF file; None: the default model, downloaded if need be.
        config: None: one slot, and many output rows a step.
    """
    n_listed = checked_top(n_top)

    with Engine.open(model, config or SCORING, needs="generate") as engine:
        return engine.score(prompt, n_listed)


def are_many(prompt: Any) -> TypeGuard[Prompts]:
    """Whether *prompt* is a list of prompts: its items are neither ids nor messages."""
    with reading_prompt(prompt):
        if isinstance(prompt, SINGLE) or not len(prompt):
            return False
        return hasattr(prompt[0], "__len__") and not isinstance(prompt[0], Mapping)
