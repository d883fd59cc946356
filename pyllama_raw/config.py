"""Options of an engine."""

from pyllama_raw.options.config import (
    CacheConfig,
    ContextConfig,
    EmbeddingConfig,
    EngineConfig,
    LogConfig,
    MediaConfig,
    ModelConfig,
    SchedulerConfig,
)
from pyllama_raw.options.profile import Profile
from pyllama_raw.options.requests import ChatOptions, RequestOptions
from pyllama_raw.options.sampling import SamplingParams

__all__ = [
    "CacheConfig",
    "ChatOptions",
    "ContextConfig",
    "EmbeddingConfig",
    "EngineConfig",
    "LogConfig",
    "MediaConfig",
    "ModelConfig",
    "Profile",
    "RequestOptions",
    "SamplingParams",
    "SchedulerConfig",
]
