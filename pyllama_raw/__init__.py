"""
Text generation on libllama: continuous batching behind an async API.

Importing this package needs no native library; the first model does. Each name is imported when it
is first asked for, because programs that start ours wait for its version and its devices. More names
are in `pyllama_raw.results`, `pyllama_raw.errors` and `pyllama_raw.policy`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyllama_raw.options import __version__ as __version__

if TYPE_CHECKING:
    from pyllama_raw.api.blocking import Engine, generate, score
    from pyllama_raw.api.engine import AsyncEngine
    from pyllama_raw.api.generation import Generation
    from pyllama_raw.api.model import Model, devices, estimate_memory, probe
    from pyllama_raw.api.results import Delta, Result, Usage
    from pyllama_raw.core.request import FinishReason
    from pyllama_raw.errors import ConfigError, PyllamaError, QueueFull, RequestError
    from pyllama_raw.media import Audio, Image
    from pyllama_raw.options.config import (
        CacheConfig,
        ContextConfig,
        DraftConfig,
        EmbeddingConfig,
        EngineConfig,
        LeaseConfig,
        LogConfig,
        MediaConfig,
        ModelConfig,
        SchedulerConfig,
        SpeculationConfig,
    )
    from pyllama_raw.options.profile import Profile
    from pyllama_raw.options.requests import ChatOptions, RequestOptions
    from pyllama_raw.options.sampling import SamplingParams
    from pyllama_raw.prompts.messages import Message
    from pyllama_raw.prompts.prompt import Prompt

__all__ = [
    "AsyncEngine",
    "Audio",
    "CacheConfig",
    "ChatOptions",
    "ConfigError",
    "ContextConfig",
    "Delta",
    "DraftConfig",
    "EmbeddingConfig",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "Generation",
    "Image",
    "LeaseConfig",
    "LogConfig",
    "MediaConfig",
    "Message",
    "Model",
    "ModelConfig",
    "Profile",
    "Prompt",
    "PyllamaError",
    "QueueFull",
    "RequestError",
    "RequestOptions",
    "Result",
    "SamplingParams",
    "SchedulerConfig",
    "SpeculationConfig",
    "Usage",
    "devices",
    "estimate_memory",
    "generate",
    "probe",
    "score",
]

_NAMES = {  # of each module
    "api.blocking": ("Engine", "generate", "score"),
    "api.engine": ("AsyncEngine",),
    "api.model": ("Model", "devices", "estimate_memory", "probe"),
    "errors": ("ConfigError", "PyllamaError", "QueueFull", "RequestError"),
    "media": ("Audio", "Image"),
    "options.config": (
        "CacheConfig",
        "ContextConfig",
        "DraftConfig",
        "EmbeddingConfig",
        "EngineConfig",
        "LeaseConfig",
        "LogConfig",
        "MediaConfig",
        "ModelConfig",
        "SchedulerConfig",
        "SpeculationConfig",
    ),
    "options.profile": ("Profile",),
    "options.requests": ("ChatOptions", "RequestOptions"),
    "options.sampling": ("SamplingParams",),
    "prompts.messages": ("Message",),
    "prompts.prompt": ("Prompt",),
    "results": ("Delta", "FinishReason", "Generation", "Result", "Usage"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name of __all__; from then on it is a plain global."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES[name]}")
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
