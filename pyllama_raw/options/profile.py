"""
The findings of `tune` for one model on one machine, as a file.

Only options that differ from the defaults are in it, so that defaults may improve and a
reader sees what was decided.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from pyllama_raw.errors import ConfigError, shown
from pyllama_raw.options.config import EngineConfig
from pyllama_raw.options.frozen import Frozen, wrong
from pyllama_raw.options.output_file import replacing

Fields = dict[str, Any]


class Settings(Frozen):
    """Fields of EngineConfig and its parts by name, checked like those."""

    model: Fields = Field(default_factory=dict)
    """Fields of ModelConfig."""
    context: Fields = Field(default_factory=dict)
    """Fields of ContextConfig."""
    scheduler: Fields = Field(default_factory=dict)
    """Fields of SchedulerConfig."""
    cache: Fields = Field(default_factory=dict)
    """Fields of CacheConfig."""
    embedding: Fields = Field(default_factory=dict)
    """Fields of EmbeddingConfig."""
    media: Fields = Field(default_factory=dict)
    """Fields of MediaConfig."""
    log: Fields = Field(default_factory=dict)
    """Fields of LogConfig."""
    engine: Fields = Field(default_factory=dict)
    """Fields of EngineConfig that belong to no part."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in self.engine:
            if name in Settings.model_fields:
                raise wrong(f"engine.{name}", self.engine[name], "it as a part")
        self.engine_config()
        return self

    def updated(self, other: Mapping[str, Fields]) -> Settings:
        """Settings with the fields of *other*, by part, instead of these."""
        mine = self.model_dump()
        return Settings(**mine | {n: mine.get(n, {}) | other[n] for n in other})

    def engine_config(self) -> EngineConfig:
        return EngineConfig(**self.model_dump(exclude={"engine"}), **self.engine)


class Measured(Frozen):
    """Figures of one setting on the machine that it was measured on."""

    prefill_tok_per_s: float
    """Prompt tokens a second."""
    decode_tok_per_s: float
    """Output tokens a second of all streams together."""
    perplexity: float | None = None
    """The perplexity of the bundled text. None: not asked."""


class MachineFacts(Frozen):
    """Facts of a machine that make speeds comparable."""

    cpu: str
    """The name of the CPU."""
    n_cpus: int
    """CPUs that the process may use."""


class Profile(Frozen):
    """The model file and options to open it with, and what they were measured to give."""

    version: Literal[1] = 1
    """Version of this file's form."""
    path: Path | None = None
    """The model file. None: the default model."""
    settings: Settings = Settings()
    """Options that differ from the defaults."""
    before: Measured | None = None
    """Speed with the file that was given and the defaults."""
    after: Measured | None = None
    """Speed with this profile."""
    machine: MachineFacts | None = None
    """The machine that it was measured on."""
    model_bytes: int | None = None
    """Size of the model file."""
    others_cpus: float | None = None
    """CPUs that other processes kept busy meanwhile. None: not known."""

    @classmethod
    def load(cls, file: str | Path) -> Self:
        """
        Read *file*.

        Raises:
            ConfigError: it cannot be read or holds no profile; names what is wrong.
        """
        file = _path_of(file)
        try:
            fields = json.loads(file.read_text("utf-8"))
            if not isinstance(fields, dict):
                raise ConfigError("it is no JSON object")
            loaded = cls(**fields)
            if not fields.keys() & {"path", "settings"}:
                missing = "give a path, or settings, as `tune --out` writes them"
                raise ConfigError(f"it has no options: {missing}")
        except RecursionError:
            reason = "it nests too deeply, a profile has 3 levels"
            raise ConfigError(f"profile {str(file)!r}: {reason}") from None
        except (OSError, ValueError) as error:  # ConfigError is one
            raise ConfigError(f"profile {str(file)!r}: {error}") from error
        return loaded

    def save(self, file: str | Path) -> None:
        """Write it as JSON; a file that was there is replaced at once, or stays."""
        with replacing(_path_of(file)) as written:
            written.write(self.model_dump_json(indent=2) + "\n")

    def engine_config(self, /, **parts: Fields) -> EngineConfig:
        """
        The options as an EngineConfig.

        Args:
            parts: fields by the parts of Settings, which win over the profile's.

        Raises:
            ConfigError: names the part or the field that is wrong.
        """
        return self.settings.updated(parts).engine_config()


def _path_of(file: str | Path) -> Path:
    try:
        return Path(file)
    except Exception as error:
        raise ConfigError(f"profile={shown(file)}: give the path of a file") from error
