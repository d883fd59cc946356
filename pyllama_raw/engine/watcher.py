"""
The one channel for what an engine tells of itself: logs, events, metrics, spans.

A program of yours may watch, too: `engine.watch(watcher)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyllama_raw.core.request import Finished, Request
from pyllama_raw.core.scheduling.slot_change import SlotChange
from pyllama_raw.engine.engine_state import EngineState


class StepRecord(NamedTuple):
    """One step; what its time depends on, and what was there after it."""

    at_s: float  # when it was planned, on the engine clock
    seconds: float  # from then until its result was taken in
    n_prefill: int  # tokens of prompts
    n_decode: int  # streams that went on by a token
    n_context: int  # cells that all its tokens looked at
    n_saved: int  # tokens captured into host memory or files
    n_loaded: int  # tokens copied or restored
    n_running: int
    n_waiting: int
    n_cells_used: int
    n_host_bytes: int = 0  # of snapshots in host memory
    n_disk_bytes: int = 0  # of files
    n_preempted: int = 0  # in this step
    budget: int | None = None  # tokens it could have; None: it had no prompt to divide
    host_s: float = 0.0  # of planning, of taking the result in and of telling it
    decode_s: float = 0.0  # in llama_decode; also what ran before it was planned
    sample_s: float = 0.0  # of choosing tokens
    restore_s: float = 0.0  # of copying back from host memory or files
    status: str = "ok"  # how the decode ended
    decodes: tuple[tuple[int, int], ...] = ()  # request_id, slot
    chunks: tuple[tuple[int, int, int], ...] = ()  # request_id, slot, tokens
    warms_up: bool = False  # a request of it only warms the engine up; logs say so


class Watcher:
    """
    Methods that an engine calls in the thread that runs steps; they must return soon.

    A subclass has those that it needs; times are on the engine clock. A watcher that raises
    is told nothing more.
    """

    def came(self, requests: Sequence[Request], submitted: float) -> None:
        """*requests* wait now. Context variables are those of the caller of the requests."""

    def changed(self, change: SlotChange, request_id: int, now: float) -> None:
        """A request got a slot, or gave it up and waits again."""

    def stepped(self, step: StepRecord) -> None:
        """A step has run, and its events are told."""

    def ended(self, request: Request, end: Finished) -> None:
        """
        A request has ended, also one that came before anybody watched.

        Context variables are those of its caller.
        """

    def engine(self, state: EngineState, now: float) -> None:
        """The state of the engine: told first, when it changes, and last of all at the end."""
