"""
The findings of `tune` for one model on one machine, as a file; and files that are complete or not
there.

Only options that differ from the defaults are in a profile, so that defaults may improve and a
reader sees what was decided.

An output file is written beside its name and renamed at the end. A run that is interrupted leaves
the old file as it was, and its own output in a file that ends in `.part`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, Self

from pydantic import Field, model_validator

from pyllama_raw.errors import ConfigError, reason_of, shown
from pyllama_raw.options.config import EngineConfig
from pyllama_raw.options.frozen import Frozen, wrong


def check_writable(path: Path) -> None:
    """
    Tell before the work that *path* cannot be written after it.

    Raises:
        ConfigError: says why.
    """
    folder = path.resolve().parent
    if path.is_dir():
        raise ConfigError(f"{path} cannot be written: it is a folder")
    if not folder.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {folder}")
    if path.is_file() and _begins_as_model(path):
        raise ConfigError(f"{path} is not replaced: it is a model, name another file")
    if not os.access(path if _is_special(path) else folder, os.W_OK):
        raise ConfigError(f"{path} cannot be written: {folder} does not allow it")


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """
    Open a text file that becomes *path* if the block succeeds.

    If it fails, *path* stays as it was; what was written stays under the name of the
    file object, unless that is nothing. Pipes and devices are written directly.

    Raises:
        ConfigError: there is no way to write *path*.
    """
    check_writable(path)
    if _is_special(path):
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    target = path.resolve()  # a link stays one
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as file:
        try:
            yield file
        except BaseException:
            file.flush()
            if not part.stat().st_size:
                part.unlink()
            raise
    if target.exists():
        part.chmod(target.stat().st_mode)
    part.replace(target)


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _begins_as_model(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:  # nobody may read it
        return False


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
    speculation: Fields = Field(default_factory=dict)
    """Fields of SpeculationConfig."""
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
            reason = reason_of(error)
            raise ConfigError(f"profile {str(file)!r}: {reason}") from error
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
