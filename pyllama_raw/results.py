"""Results of engines."""

from pyllama_raw.api.blocking import BlockingEvents, BlockingGeneration
from pyllama_raw.api.events import (
    EngineEvent,
    Events,
    EventsLost,
    RequestEvent,
    RequestState,
)
from pyllama_raw.api.facts import Health, HealthState
from pyllama_raw.api.generation import Generation
from pyllama_raw.api.results import (
    Delta,
    EngineStats,
    LabelScore,
    Likelihood,
    Ranked,
    Result,
    Score,
    Timings,
    Usage,
)
from pyllama_raw.api.vectors import Vectors
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
from pyllama_raw.core.stats import CacheStats, SlotFile, SlotStats
from pyllama_raw.engine.adapters import AdapterInfo
from pyllama_raw.engine.estimate import Device, DeviceMemory, MemoryEstimate, ModelProbe
from pyllama_raw.engine.info import (
    Capabilities,
    EngineInfo,
    EngineState,
    ModelClass,
    ModelInfo,
    Operation,
    Pooling,
    SpecialToken,
    VocabInfo,
)
from pyllama_raw.engine.logs import RequestRecord
from pyllama_raw.engine.watcher import StepRecord, Watcher

__all__ = [
    "AdapterInfo",
    "BlockingEvents",
    "BlockingGeneration",
    "CacheStats",
    "CacheTier",
    "Capabilities",
    "Delta",
    "Device",
    "DeviceMemory",
    "EngineEvent",
    "EngineInfo",
    "EngineState",
    "EngineStats",
    "Events",
    "EventsLost",
    "FinishDetail",
    "FinishReason",
    "Generation",
    "Health",
    "HealthState",
    "LabelScore",
    "LengthLimit",
    "Likelihood",
    "MemoryEstimate",
    "ModelClass",
    "ModelInfo",
    "ModelProbe",
    "Operation",
    "Pooling",
    "Ranked",
    "RequestEvent",
    "RequestRecord",
    "RequestState",
    "Result",
    "SamplerUse",
    "Score",
    "SlotFile",
    "SlotStats",
    "SpecialToken",
    "StepRecord",
    "StopString",
    "StopToken",
    "Timings",
    "TokenLogprobs",
    "Usage",
    "Vectors",
    "VocabInfo",
    "Watcher",
]
