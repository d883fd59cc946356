"""
Options made smaller where memory is short: first the cells, then the layers on devices.

Rules:
1. Options that fit stay as they are, and so do all where no estimate can be made: the opening
   then says what is wrong.
2. n_ctx becomes the most that fits, but at least the floor `fit_ctx`.
3. Where the floor does not fit, devices keep as many layers as they have room for.
4. A margin of each device stays free.
5. Where memory is plenty, nothing is reckoned, because that takes a tenth of a second.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from logging import getLogger
from pathlib import Path

from pyllama_raw.engine.build import context_fields
from pyllama_raw.engine.capabilities import probe
from pyllama_raw.engine.estimate import MemoryEstimate, Outline, estimate
from pyllama_raw.errors import ContextFailed, NativeError, Unsupported
from pyllama_raw.native.libllama import devices
from pyllama_raw.native.memory_need import HOST, available_bytes
from pyllama_raw.options.config import EngineConfig

MARGIN_BYTES = 2**30  # of a device, or a 16th of a small one
CELLS = 256  # llama.cpp rounds n_ctx to these, of each slot if kv_unified is off

PLENTY_BYTES = 2**30  # beside weights, cells and rows

Room = dict[str, int]  # bytes by device
Fits = Callable[[EngineConfig], bool]

_log = getLogger(__name__)


def fitted(
    path: Path,
    config: EngineConfig,
    *,
    has_weights: bool = False,
    room: Room | None = None,
) -> EngineConfig:
    """
    Return *config*, with fewer cells and layers where memory asks for that.

    Args:
        has_weights: the model is loaded already, so its layers stay where they are.
        room: bytes of each device that may be used. None: what is free now.
    """
    if not config.fit_ctx:
        return config
    try:
        room = _free(config.fit_margin_bytes) if room is None else room
        if _is_plenty(path, config, room):
            return config
        chosen = _fitted(path, config, room, has_weights)
    except (NativeError, Unsupported):
        return config
    changes = []
    if chosen.context != config.context:
        changes.append(f"n_ctx={chosen.context.n_ctx}")
    if chosen.model != config.model:
        changes.append(f"n_gpu_layers={chosen.model.n_gpu_layers}")
    if changes:
        _log.warning("memory is short: %s", ", ".join(changes))
    return chosen


def _fitted(
    path: Path, config: EngineConfig, room: Room, has_weights: bool
) -> EngineConfig:
    with Outline(path, config) as outline:

        def fits(tried: EngineConfig) -> bool:
            with suppress(ContextFailed):  # not even the list of cells fits
                return _fits(outline.memory(tried), room, has_weights=has_weights)
            return False

        if fits(config):
            return config
        if outline.generates:
            config = _fewer_cells(config, outline.model.n_ctx_train, fits)
        if has_weights or fits(config):
            return config
        n_layer = outline.model.n_layer
    return _fewer_layers(path, config, n_layer, room)


def _fewer_cells(config: EngineConfig, n_ctx_train: int, fits: Fits) -> EngineConfig:
    n_slots, wanted = config.scheduler.n_slots, config.resolved_context
    n_ctx = context_fields(wanted, n_slots, n_ctx_train)["n_ctx"]
    unit = CELLS if wanted.kv_unified else CELLS * n_slots
    all_units = -(-n_ctx // unit)
    least = min(-(-config.fit_ctx // unit), all_units)

    def with_units(n: int) -> EngineConfig:
        if n == all_units:
            return config
        context = config.context.model_copy(update={"n_ctx": n * unit})
        return config.model_copy(update={"context": context})

    return with_units(_most(least, all_units, lambda n: fits(with_units(n))))


def _fewer_layers(
    path: Path, config: EngineConfig, n_layer: int, room: Room
) -> EngineConfig:
    places = {name: n_bytes for name, n_bytes in room.items() if name != HOST}
    asked, all_layers = config.model.n_gpu_layers, n_layer + 1  # and the output
    most = min(asked, all_layers) if asked >= 0 else all_layers
    if not places:
        return config

    def with_layers(n: int) -> EngineConfig:
        if n == most:
            return config
        model = config.model.model_copy(update={"n_gpu_layers": n})
        return config.model_copy(update={"model": model})

    def fits(n: int) -> bool:
        with suppress(ContextFailed):
            return _fits(estimate(path, with_layers(n)), places)
        return False

    return with_layers(_most(0, most, fits))


def _most(least: int, wanted: int, fits: Callable[[int], bool]) -> int:
    """
    The largest number up to *wanted* that fits; *least* where none above it does.

    From below, because each try of many cells costs the memory of their list.
    """
    low, high = least, min(max(2 * least, 1), wanted)
    while low < high and fits(high):
        low, high = high, min(2 * high, wanted)
    between = range(low + 1, high)
    return low + bisect_right(between, False, key=lambda n: not fits(n))


def _is_plenty(path: Path, config: EngineConfig, room: Room) -> bool:
    """
    Whether half of the host's memory is more than an engine can take, if it has no device.

    That is each weight twice, since some are put in another order, cells of 32 bits as wide as
    the model, two rows of the vocabulary for each token of a step, and what is left besides.
    """
    model = probe(path, config.model.kv_overrides).model
    if set(room) != {HOST} or model.n_files > 1 or config.media.mmproj is not None:
        return False
    n_slots, wanted = config.scheduler.n_slots, config.resolved_context
    n_ctx: int = context_fields(wanted, n_slots, model.n_ctx_train)["n_ctx"]
    cells = 2 * 4 * n_ctx * model.n_layer * model.n_embd
    rows = 2 * 4 * max(wanted.n_ubatch, wanted.n_outputs_max or 0) * model.n_vocab
    needed = 2 * path.stat().st_size + cells + rows + PLENTY_BYTES
    return needed < room[HOST] // 2


def _fits(memory: MemoryEstimate, room: Room, *, has_weights: bool = False) -> bool:
    return all(
        one.total_bytes - has_weights * one.weights_bytes <= room[one.device]
        for one in memory.devices
        if one.device in room
    )


def _free(margin_bytes: int | None) -> Room:
    """Free bytes by device, without the margin; None is the usual one."""
    room = {}
    for device in devices():
        if device.kind in ("cpu", "gpu", "igpu"):
            free, total = device.memory_free_bytes, device.memory_total_bytes
            usable = available_bytes() if device.name == HOST else None
            free = free if usable is None else min(free, usable)
            usual = min(MARGIN_BYTES, total // 16)
            room[device.name] = free - (usual if margin_bytes is None else margin_bytes)
    return room
