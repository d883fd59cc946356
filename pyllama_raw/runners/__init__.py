"""
Runners: an engine here, a process, or a service far away, all used in the same way.

    async with RemoteRunner("http://127.0.0.1:8000/v1", "assistant") as runner:
        async with runner.generate("The sky is") as run:
            async for delta in run:
                print(delta.text, end="")

Importing this package opens no library and needs no extra; a RemoteRunner needs `runners`. Clients of
services, child processes and pools are imported when their names are first asked for, because a server
of models that are here needs none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyllama_raw.core.residency import Claim, ModelState
from pyllama_raw.runners.cached import (
    CachedModel,
    CachedRunner,
    ModelEvent,
    ModelStatus,
)
from pyllama_raw.runners.capabilities import Cost, Prices, RunnerCapabilities
from pyllama_raw.runners.guards import Backoff, Breaker, Limits, Timeouts
from pyllama_raw.runners.local import LocalRunner, MockRunner
from pyllama_raw.runners.model_cache import ModelCache
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

if TYPE_CHECKING:
    from pyllama_raw.runners.child import Draft, LlamaOptions, LlamaServer
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

_LATER = ("pool", "remote", "spawned", "child", "packet")  # modules of the other names


def __getattr__(name: str) -> Any:
    """Import a name of __all__; from then on it is a plain global."""
    for module in _LATER if name in __all__ else ():
        names = vars(import_module(f"{__name__}.{module}"))
        if name in names:
            return globals().setdefault(name, names[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
