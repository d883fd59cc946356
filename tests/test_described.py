"""
What an editor, help(), a JSON schema and `--help` say of the options: one text.

tests/snapshots/ holds all of it, so that a change is read before it is made. To write it
anew: PYLLAMA_RAW_UPDATE=1 .venv/bin/pytest tests/test_described.py
"""

import inspect
import json
import os
import pydoc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path

import pytest
from pydantic import BaseModel

from pyllama_raw import (
    CacheConfig,
    ContextConfig,
    Delta,
    EmbeddingConfig,
    EngineConfig,
    LogConfig,
    ModelConfig,
    Profile,
    RequestOptions,
    Result,
    SamplingParams,
    SchedulerConfig,
    Usage,
)
from pyllama_raw.cli.command import _parser
from pyllama_raw.cli.flag_help import help_of
from pyllama_raw.options.described import descriptions
from pyllama_raw.results import (
    CacheStats,
    Capabilities,
    EngineStats,
    ModelInfo,
    Ranked,
    Score,
    Timings,
)

SNAPSHOTS = Path(__file__).parent / "snapshots"
OPTIONS: tuple[type[BaseModel], ...] = (
    SamplingParams,
    EngineConfig,
    ModelConfig,
    ContextConfig,
    SchedulerConfig,
    CacheConfig,
    EmbeddingConfig,
    LogConfig,
    Profile,
)
OTHERS = (
    *(RequestOptions, Delta, Result, Usage, Timings, Score, EngineStats, CacheStats),
    *(Capabilities, ModelInfo, Ranked),
)


def command_help(*words: str) -> str:
    """What `pyllama-raw ... --help` prints to a terminal of 80 columns."""
    parser = _parser()
    for word in words:
        choices = next(
            a.choices for a in parser._actions if isinstance(a.choices, dict)
        )
        parser = choices[word]
    return parser.format_help()


def help_text(*kinds: type) -> str:
    return "\n\n".join(f"{kind.__name__}\n\n{inspect.getdoc(kind)}" for kind in kinds)


SHOWN: dict[str, Callable[[], str]] = {
    "help_sampling_params": lambda: help_text(SamplingParams),
    "help_engine_config": lambda: help_text(*OPTIONS[1:-1]),
    "generate": lambda: command_help("generate"),
    "tune": lambda: command_help("tune"),
    "bench": lambda: command_help("bench") + command_help("bench", "run"),
    "schema_sampling_params": lambda: schema(SamplingParams),
    "schema_engine_config": lambda: schema(EngineConfig),
}


def schema(kind: type[BaseModel]) -> str:
    return json.dumps(kind.model_json_schema(), indent=1)


@pytest.mark.parametrize("name", SHOWN)
def test_all_that_is_said_of_options_is_known(name: str, monkeypatch):
    """
    Help, `--help` and JSON schemas are those of tests/snapshots, to the letter.
    """
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    text, file = SHOWN[name]().rstrip() + "\n", SNAPSHOTS / f"{name}.txt"
    if os.environ.get("PYLLAMA_RAW_UPDATE"):
        file.write_text(text)

    assert text == file.read_text()


@pytest.mark.parametrize("kind", [*OPTIONS, *OTHERS], ids=lambda kind: kind.__name__)
def test_every_field_is_described(kind: type):
    """
    No option and no field of a result is without a docstring of its own.
    """
    names = set(getattr(kind, "model_fields", ()) or kind.__annotations__)
    if is_dataclass(kind):
        names = set(kind.__dataclass_fields__)

    assert names - set(descriptions(kind)) == set()


@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
def test_help_and_schema_say_the_same(kind: type[BaseModel]):
    """
    help() shows each description, and so does the JSON schema.
    """
    told = pydoc.render_doc(kind, renderer=pydoc.plaintext)
    properties = kind.model_json_schema()["properties"]

    said = descriptions(kind)
    assert [
        line for text in said.values() for line in text.splitlines() if line not in told
    ] == []
    assert {name: about["description"] for name, about in properties.items()} == said


def test_no_start_waits_for_descriptions():
    """
    The package and its options are imported without a look at any source.
    """
    script = """
import pyllama_raw.options.config, pyllama_raw.options.profile, pyllama_raw.options.sampling
from pyllama_raw.options import described

print(described._classes.cache_info().currsize)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=True
    )

    assert done.stdout == "0\n"


def test_a_program_without_sources_runs_without_descriptions():
    """
    Help then names options, and their defaults are still there.
    """
    kind = type("Options", (SamplingParams,), {"__module__": "pyllama_raw.frozen_away"})
    foreign = type("Options", (), {"__module__": "pyllama_raw.frozen_away"})

    assert descriptions(kind) == descriptions(SamplingParams)
    assert descriptions(foreign) == {}
    assert help_of(foreign, "n_slots", 8) == "n_slots (8)"
