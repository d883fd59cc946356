"""
Runners: an engine here, a process, or a service far away, all used in the same way.

    async with RemoteRunner("http://127.0.0.1:8000/v1", "assistant") as runner:
        async with runner.generate("The sky is") as run:
            async for delta in run:
                print(delta.text, end="")

Importing this package opens no library and needs no extra; a RemoteRunner needs `runners`.
"""

from pyllama_raw.core.residency import Claim, ModelState
from pyllama_raw.runners.cached import (
    CachedModel,
    CachedRunner,
    ModelEvent,
    ModelStatus,
)
from pyllama_raw.runners.capabilities import Cost, Prices, RunnerCapabilities
from pyllama_raw.runners.child import Draft, LlamaOptions, LlamaServer
from pyllama_raw.runners.guards import Backoff, Breaker, Limits, Timeouts
from pyllama_raw.runners.local import LocalRunner, MockRunner
from pyllama_raw.runners.model_cache import ModelCache
from pyllama_raw.runners.packet import TensorPacket, infer
from pyllama_raw.runners.pool import (
    Managed,
    ManagedState,
    Pool,
    RunnerManager,
)
from pyllama_raw.runners.remote import (
    COMPATIBLE,
    LLAMA_SERVER,
    OPENAI,
    PYLLAMA,
    Dialect,
    RemoteRunner,
)
from pyllama_raw.runners.runner import (
    Estimate,
    ModelRunner,
    RebuildCause,
    RunHandle,
    RunnerCounts,
    RunnerHealth,
    RunnerKind,
    RunnerMemory,
    RunnerMetadata,
)
from pyllama_raw.runners.spawned import OwnServer, Program, SpawnedRunner

__all__ = [
    "COMPATIBLE",
    "LLAMA_SERVER",
    "OPENAI",
    "PYLLAMA",
    "Backoff",
    "Breaker",
    "CachedModel",
    "CachedRunner",
    "Claim",
    "Cost",
    "Dialect",
    "Draft",
    "Estimate",
    "Limits",
    "LlamaOptions",
    "LlamaServer",
    "LocalRunner",
    "Managed",
    "ManagedState",
    "MockRunner",
    "ModelCache",
    "ModelEvent",
    "ModelRunner",
    "ModelState",
    "ModelStatus",
    "OwnServer",
    "Pool",
    "Prices",
    "Program",
    "RebuildCause",
    "RemoteRunner",
    "RunHandle",
    "RunnerCapabilities",
    "RunnerCounts",
    "RunnerHealth",
    "RunnerKind",
    "RunnerManager",
    "RunnerMemory",
    "RunnerMetadata",
    "SpawnedRunner",
    "TensorPacket",
    "Timeouts",
    "infer",
]
