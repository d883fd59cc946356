"""
Text generation on libllama: continuous batching behind an async API.

Importing this package needs no native library; the first model does. Names that no
program needs before its model is loaded are imported when first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyllama_raw.api import AsyncEngine
from pyllama_raw.errors import (
    AdapterLimit,
    AdapterLoadFailed,
    AdapterNotFound,
    BadGrammar,
    BadMedia,
    BadSchema,
    ClosedError,
    ConfigError,
    ContextFailed,
    DeadlineExceeded,
    EmbeddingFailed,
    EncodeFailed,
    EngineFault,
    EngineStalled,
    EngineStopped,
    InvalidRequest,
    InvalidSampling,
    LibraryNotBuilt,
    ModelLoadFailed,
    ModelNotFound,
    NativeError,
    ProjectorLoadFailed,
    PromptTooLong,
    PyllamaError,
    QueueFull,
    RequestError,
    TextTooLong,
    Unsupported,
)
from pyllama_raw.messages import Message
from pyllama_raw.model import Model
from pyllama_raw.options import ChatOptions, RequestOptions
from pyllama_raw.prompt import Prompt

if TYPE_CHECKING:
    from pyllama_raw.blocking import BlockingEvents, BlockingGeneration, Engine
    from pyllama_raw.config import (
        CacheConfig,
        ContextConfig,
        EmbeddingConfig,
        EngineConfig,
        LogConfig,
        MediaConfig,
        ModelConfig,
        SchedulerConfig,
    )
    from pyllama_raw.core.memory.cache_stats import CacheStats
    from pyllama_raw.core.request import (
        CacheTier,
        FinishDetail,
        FinishReason,
        LengthLimit,
        SamplerUse,
        StopString,
        StopToken,
        TokenLogprobs,
    )
    from pyllama_raw.engine.adapters import AdapterInfo
    from pyllama_raw.engine.capabilities import Capabilities, Operation
    from pyllama_raw.engine.info import EngineInfo
    from pyllama_raw.engine.model_info import ModelClass, ModelInfo, Pooling
    from pyllama_raw.engine.request_log import RequestRecord
    from pyllama_raw.engine.step_log import StepRecord
    from pyllama_raw.events import (
        EngineEvent,
        Events,
        EventsLost,
        RequestEvent,
        RequestState,
    )
    from pyllama_raw.generation import Generation
    from pyllama_raw.health import Health, HealthState
    from pyllama_raw.media import Audio, Image
    from pyllama_raw.profile import Profile
    from pyllama_raw.ranking import Ranked
    from pyllama_raw.results import (
        Delta,
        EngineState,
        EngineStats,
        Result,
        Score,
        Timings,
        Usage,
    )
    from pyllama_raw.sampling.params import SamplingParams
    from pyllama_raw.sync import generate, score

__version__ = "0.1.0"  # pyproject.toml reads it here

__all__ = [
    "AdapterInfo",
    "AdapterLimit",
    "AdapterLoadFailed",
    "AdapterNotFound",
    "AsyncEngine",
    "Audio",
    "BadGrammar",
    "BadMedia",
    "BadSchema",
    "BlockingEvents",
    "BlockingGeneration",
    "CacheConfig",
    "CacheStats",
    "CacheTier",
    "Capabilities",
    "ChatOptions",
    "ClosedError",
    "ConfigError",
    "ContextConfig",
    "ContextFailed",
    "DeadlineExceeded",
    "Delta",
    "EmbeddingConfig",
    "EmbeddingFailed",
    "EncodeFailed",
    "Engine",
    "EngineConfig",
    "EngineEvent",
    "EngineFault",
    "EngineInfo",
    "EngineStalled",
    "EngineState",
    "EngineStats",
    "EngineStopped",
    "Events",
    "EventsLost",
    "FinishDetail",
    "FinishReason",
    "Generation",
    "Health",
    "HealthState",
    "Image",
    "InvalidRequest",
    "InvalidSampling",
    "LengthLimit",
    "LibraryNotBuilt",
    "LogConfig",
    "MediaConfig",
    "Message",
    "Model",
    "ModelClass",
    "ModelConfig",
    "ModelInfo",
    "ModelLoadFailed",
    "ModelNotFound",
    "NativeError",
    "Operation",
    "Pooling",
    "Profile",
    "ProjectorLoadFailed",
    "Prompt",
    "PromptTooLong",
    "PyllamaError",
    "QueueFull",
    "Ranked",
    "RequestError",
    "RequestEvent",
    "RequestOptions",
    "RequestRecord",
    "RequestState",
    "Result",
    "SamplerUse",
    "SamplingParams",
    "SchedulerConfig",
    "Score",
    "StepRecord",
    "StopString",
    "StopToken",
    "TextTooLong",
    "Timings",
    "TokenLogprobs",
    "Unsupported",
    "Usage",
    "generate",
    "score",
]

# Where to look for the names that are imported later: the first that has one is right.
_LATER = (
    *("config", "sampling.params", "results", "core.request"),
    *("core.memory.cache_stats", "generation", "engine.info", "profile"),
    *(
        "engine.capabilities",
        "engine.model_info",
        "ranking",
        "blocking",
        "sync",
        "media",
    ),
    *("events", "health", "engine.step_log", "engine.request_log"),
    "engine.adapters",
)


def __getattr__(name: str) -> Any:
    """Import a name of __all__; from then on it is a plain global."""
    for module in _LATER if name in __all__ else ():
        found = vars(import_module(f"{__name__}.{module}"))
        if name in found:
            return globals().setdefault(name, found[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
