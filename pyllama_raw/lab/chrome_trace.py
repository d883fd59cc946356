"""
Logs as a trace in the JSON that Chrome began and Perfetto opens.

Slots are tracks. A chunk of a prompt is a slice; decodes of a request that follow each other
are one slice. Another track has the steps. Arrivals and ends of requests are slices of 1 us at
most. A flow joins all slices of a request. Counters are running and waiting requests, cells
in use, and the bytes of the cache.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from operator import itemgetter
from typing import IO, Any

from pyllama_raw.engine.request_log import RequestRecord
from pyllama_raw.engine.watcher import StepRecord

SLOTS, REQUESTS = 1, 2  # processes
# Threads; Perfetto takes 0 for the first one of the process.
STEPS_TRACK, ARRIVALS, ENDS = 1, 1, 2
FIRST_SLOT = 2
MARK_NS = 1000

Event = dict[str, Any]


@dataclass(slots=True)
class Slice:
    """A piece of a track, in ns since the beginning of the trace."""

    name: str
    process: int
    thread: int
    start: int
    end: int
    args: dict[str, Any]
    request_id: int | None = None  # whose flow goes through it
    flow: dict[str, Any] = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, bool, int, int]:
        """Of one moment an end is last; what lies in another follows."""
        is_end = (self.process, self.thread) == (REQUESTS, ENDS)
        return self.start, is_end, -self.process, self.start - self.end

    def event(self) -> Event:
        """As JSON has it."""
        return {
            "ph": "X",
            "name": self.name,
            "cat": "pyllama_raw",
            "pid": self.process,
            "tid": self.thread,
            "ts": self.start / 1000,
            "dur": (self.end - self.start) / 1000,
            "args": self.args,
        } | self.flow


def write_trace(
    file: IO[str],
    steps: Iterable[StepRecord],
    requests: Iterable[RequestRecord] = (),
) -> None:
    """Write all as one JSON object, an event a line."""
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    for number, event in enumerate(trace_events(tuple(steps), tuple(requests))):
        file.write((",\n" if number else "") + json.dumps(event))
    file.write("\n]}\n")


def trace_events(
    steps: Sequence[StepRecord], requests: Sequence[RequestRecord]
) -> Iterator[Event]:
    """Names of tracks, then slices and counters in the order of time."""
    moments = [step.at_s for step in steps] + [each.submitted_s for each in requests]
    clock = Clock(min(moments, default=0.0))
    slices = [
        *_slices(steps, clock),
        *_marks(requests, clock, ARRIVALS, "arrival"),
        *_marks(requests, clock, ENDS, "end"),
    ]
    slices.sort(key=lambda each: each.order)
    _join(slices)
    counters = [event for step in steps for event in _counters(step, clock)]
    yield from _names(slices)
    events = chain((each.event() for each in slices), counters)
    yield from sorted(events, key=itemgetter("ts"))


class Clock:
    """Moments as whole ns since 1 ns before *start_s*."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s

    def __call__(self, at_s: float) -> int:
        return round((at_s - self._start_s) * 1e9) + 1


def _slices(steps: Sequence[StepRecord], clock: Clock) -> list[Slice]:
    """The steps, and what slots did in them."""
    slices: list[Slice] = []
    decoding: dict[tuple[int, int], Slice] = {}  # went on in the step before
    for step, start, end in _spans(steps, clock):
        slices.append(_step_slice(step, start, end))
        still: dict[tuple[int, int], Slice] = {}
        for place in step.decodes:
            known = decoding.get(place)
            if known is None:
                known = _work_slice(*place, (start, end))
                slices.append(known)
            known.end = end
            known.args["tokens"] += 1
            still[place] = known
        for request_id, slot, n_tokens in step.chunks:
            chunk = _work_slice(request_id, slot, (start, end), n_tokens)
            slices.append(chunk)
        decoding = still
    return slices


def _spans(
    steps: Sequence[StepRecord], clock: Clock
) -> Iterator[tuple[StepRecord, int, int]]:
    """Each step with its start and end; rounding makes no two of them overlap."""
    starts = [clock(step.at_s) for step in steps]
    for step, (start, following) in zip(steps, pairwise([*starts, 2**63]), strict=True):
        yield step, start, max(min(clock(step.at_s + step.seconds), following), start)


def _step_slice(step: StepRecord, start: int, end: int) -> Slice:
    args = step._asdict()
    for name in ("at_s", "decodes", "chunks"):
        del args[name]
    return Slice(f"step: {step.status}", SLOTS, STEPS_TRACK, start, end, args)


def _work_slice(
    request_id: int, slot: int, span: tuple[int, int], n_tokens: int = 0
) -> Slice:
    """A chunk of *n_tokens*; 0: decodes, of which none is counted yet."""
    args = {"request": request_id, "tokens": n_tokens}
    name = "prefill" if n_tokens else "decode"
    return Slice(name, SLOTS, slot + FIRST_SLOT, *span, args, request_id)


def _marks(
    requests: Sequence[RequestRecord], clock: Clock, thread: int, name: str
) -> list[Slice]:
    """
    A short slice for each of *requests*; those of one moment lie in each other.

    Arrivals are 1 ns early: of one moment Perfetto reads the longest slice first, and a flow
    begins with the first one that it reads.
    """
    if thread == ARRIVALS:
        moments = [clock(each.submitted_s) - 1 for each in requests]
    else:
        moments = [clock(each.finished_s) for each in requests]
    ordered = sorted(set(moments))
    ends = {
        moment: min(moment + MARK_NS, following)
        for moment, following in pairwise([*ordered, 2**63])
    }
    return [
        Slice(name, REQUESTS, thread, at, ends[at], _facts(each), each.request_id)
        for each, at in zip(requests, moments, strict=True)
    ]


def _facts(request: RequestRecord) -> dict[str, Any]:
    facts = request._asdict()
    del facts["hash_ids"]
    return facts


def _join(slices: Iterable[Slice]) -> None:
    """Lead a flow through the slices of each request, in their order."""
    chains = defaultdict[int, list[Slice]](list)
    for each in slices:
        if each.request_id is not None:
            chains[each.request_id].append(each)
    for request_id, of_one in chains.items():
        for before, after in pairwise(of_one):
            before.flow |= {"bind_id": hex(request_id), "flow_out": True}
            after.flow |= {"bind_id": hex(request_id), "flow_in": True}


def _counters(step: StepRecord, clock: Clock) -> Iterator[Event]:
    """What there was after *step*."""
    values: dict[str, dict[str, int]] = {
        "requests": {"running": step.n_running, "waiting": step.n_waiting},
        "cells": {"used": step.n_cells_used},
        "cache bytes": {"host": step.n_host_bytes, "disk": step.n_disk_bytes},
    }
    at = clock(step.at_s + step.seconds) / 1000
    for name, args in values.items():
        yield {"ph": "C", "name": name, "pid": SLOTS, "ts": at, "args": args}


def _names(slices: Iterable[Slice]) -> Iterator[Event]:
    """What processes and tracks are called, the steps above the slots."""
    named = {
        (SLOTS, STEPS_TRACK): "steps",
        (REQUESTS, ARRIVALS): "arrivals",
        (REQUESTS, ENDS): "ends",
    }
    for process, name in ((SLOTS, "slots"), (REQUESTS, "requests")):
        args = {"name": name}
        yield {"ph": "M", "name": "process_name", "pid": process, "args": args}
    for process, thread in sorted({(each.process, each.thread) for each in slices}):
        name = named.get((process, thread), f"slot {thread - FIRST_SLOT}")
        about = {"ph": "M", "pid": process, "tid": thread}
        yield about | {"name": "thread_name", "args": {"name": name}}
        yield about | {"name": "thread_sort_index", "args": {"sort_index": thread}}
