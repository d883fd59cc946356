"""
Parts that an engine is put together from, and what the next parts inherit of them.

build.py makes the real ones, `testing` those of the fakes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.engine.adapters import AdapterHost
from pyllama_raw.engine.info import Capabilities, EngineInfo
from pyllama_raw.engine.life import EngineExecutor, Restarts
from pyllama_raw.engine.logs import NO_LOGS, Logs
from pyllama_raw.engine.requests import Admission
from pyllama_raw.engine.shared_models import ModelFile
from pyllama_raw.engine.state_files import SpanKeys
from pyllama_raw.options.sampling import SamplingParams

if TYPE_CHECKING:
    from pyllama_raw.engine.embed_executor import EmbedExecutor
    from pyllama_raw.engine.media_desk import MediaDesk
    from pyllama_raw.engine.state_files import DiskWriter
    from pyllama_raw.native.kernels import Watch
    from pyllama_raw.options.config import EngineConfig, LogConfig

T = TypeVar("T")


class Reading(Protocol):
    """Calls a function that reads the vocabulary, which is not freed meanwhile."""

    def __call__(self, function: Callable[[], T], /) -> T:
        """Return what *function* does. Raises ClosedError if the vocabulary is freed."""


def at_once(function: Callable[[], T], /) -> T:
    """A Reading where nobody frees the vocabulary."""
    return function()


class TextVocab(Protocol):
    """The part of a vocabulary that turns prompts into tokens."""

    n_tokens: int  # token ids are below this
    bos: int | None  # begins a text
    eos: int | None  # ends a text
    sep: int | None  # stands between two texts
    add_bos: bool  # whether add_special puts bos in front
    add_eos: bool  # whether add_special puts eos behind
    add_sep: bool  # whether sep stands between two texts

    @property
    def eog_tokens(self) -> frozenset[int]:
        """Tokens that end generation."""

    @property
    def special_texts(self) -> Mapping[str, bool]:
        """
        Texts that tokenize() finds before all else, and whether each is control.

        Control tokens are found only if *parse_special*.
        """

    def tokenize(
        self, text: str, *, add_special: bool, parse_special: bool
    ) -> array[int]:
        """Tokens of *text*; any thread may call."""

    @property
    def pieces(self) -> Sequence[bytes]:
        """Bytes of every token, control tokens have none; good as long as it is held."""

    def piece(self, token: int, special: bool = False) -> bytes:
        """Bytes of *token*; control tokens have some only if *special*."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """One scheduler and one executor that fit each other, and what they stand on."""

    scheduler: Scheduler
    executor: EngineExecutor
    vocab: TextVocab
    chat_template: str | None
    release: Callable[[], None]  # frees all of it; called once, after the last step
    admission: Admission  # counts the requests that the engine takes on
    describe: Callable[[], EngineInfo]  # also after the release
    capabilities: Capabilities
    cache_scope: str = "shared"  # "salt": only requests with a salt share prefixes
    files: DiskWriter | None = None  # of the executor; None: nothing is kept in files
    logs: Logs = NO_LOGS  # of steps and requests
    make_rules: Callable[[SamplingParams, Reading], object] = lambda *_: None
    metadata: Mapping[str, str] = field(default_factory=dict)  # of the model file
    labels: tuple[str, ...] = ()  # of the scores that the model gives
    texts: EmbedExecutor | None = None  # None: texts do not become vectors
    span_keys: SpanKeys = field(default_factory=SpanKeys)  # of prompts and of files
    media: MediaDesk | None = None  # None: prompts are text
    adapter_host: AdapterHost | None = None  # None: the engine takes no adapters
    max_adapter_bytes: int = 0
    watch: Watch | None = None  # notes whose kernels compute; None: nobody does
    # What begins an output, if an encoder reads the prompt; None: outputs go on with it.
    decoder_start: int | None = None
    restarts: Restarts = field(default_factory=Restarts)  # after failures
    # What states of slots are of; None: nobody knows. Thread: a worker.
    state_name: Callable[[], str | None] = lambda: None
    # As suspend() gave it, of an engine that sleeps until it is woken; None: it is awake.
    memory: object = None
    model_files: tuple[ModelFile, ...] = ()  # as they were before the load
    template_process: bool = True  # chat templates run in a process of their own

    def clear_cache(self, salt: str | None) -> int:
        """See AsyncEngine.clear_cache. Thread: the engine's."""
        n_bytes = 0 if self.media is None else self.media.encoder.clear(salt)
        return n_bytes + self.scheduler.clear_cache(salt)


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """
    The memory of an engine without requests, whose context and weights are freed.

    The scheduler knows what idle slots hold, which is in `state`, and the snapshots and files.
    """

    scheduler: Scheduler
    state: object  # as EngineExecutor.suspend() gives it
    span_keys: SpanKeys  # of the prompts that the scheduler knows
    files: tuple[ModelFile, ...]  # of the model
    config: EngineConfig

    def fits(self, files: tuple[ModelFile, ...], config: EngineConfig) -> bool:
        """Whether a context of a model of *files* is what this one was."""
        return bool(files) and files == self.files and config == self.config


@dataclass(frozen=True, slots=True)
class Inheritance:
    """Things that the next parts of an engine have of earlier ones."""

    logs: Logs
    log_config: LogConfig | None
    memory: KeptMemory | None = None
    restarts: Restarts | None = None  # that count for the next parts, too
