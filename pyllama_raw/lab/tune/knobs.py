"""
Knobs that are tried: one a line, its default first.

A choice is the fields it sets, by part of EngineConfig, so a knob may set several. A new
option is a new line here; search and measurement know of none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyllama_raw.errors import ConfigError
from pyllama_raw.options.profile import Settings

Choice = Mapping[str, dict[str, Any]]
Point = tuple[int, ...]  # the choice of each knob, by index


@dataclass(frozen=True, slots=True)
class Knob:
    """Something to turn, and the positions it has."""

    name: str
    choices: tuple[Choice, ...]


def knobs(n_cpus: int, n_threads: int) -> tuple[Knob, ...]:
    """
    The table for a machine; what matters most is turned first.

    Args:
        n_cpus: logical CPUs that may be used.
        n_threads: the default.
    """
    counts = (n_cpus, n_cpus - 1, n_cpus // 2, n_cpus // 4)
    threads = dict.fromkeys(n for n in counts if n > 0 and n != n_threads)
    wide = {"n_threads_batch": n_cpus}  # prompts gain from threads that streams do not
    return (
        _knob("threads", "context", *({"n_threads": n} for n in threads)),
        _knob("threads for prompts", "context", wide),
        # Left as in the file, for our kernels, or in libllama's order, as for AMX.
        _knob("weights", "model", *({"use_extra_bufts": on} for on in (False, True))),
        _knob("flash attention", "context", {"flash_attn": "off"}),
        _knob("KV layout", "context", {"kv_unified": False}),
        _knob("KV type", "context", {"type_k": "q8_0", "type_v": "q8_0"}),
        _knob("ubatch", "context", *({"n_ubatch": n} for n in (256, 1024))),
        _knob("sampler placement", "engine", {"sampler_placement": "backend"}),
        _knob("token budget", "scheduler", *({"token_budget": n} for n in (256, 1024))),
    )


def _knob(name: str, part: str, *choices: dict[str, Any]) -> Knob:
    return Knob(name, ({}, *({part: fields} for fields in choices)))


def settings_of(table: Sequence[Knob], point: Point) -> Settings | None:
    """Settings of *point*; None if its choices do not fit each other."""
    settings = Settings()
    try:
        for knob, index in zip(table, point, strict=True):
            settings = settings.updated(knob.choices[index])
    except ConfigError:
        return None
    context = settings.engine_config().context
    if context.n_threads_batch and context.n_threads_batch == context.threads:
        return None  # as many threads for prompts as there are without it
    return settings
