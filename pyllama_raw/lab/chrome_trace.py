"""
Logs as a trace in the JSON that Chrome began and Perfetto opens.

Slots are tracks. A chunk of a prompt is a slice; decodes of a request that follow each other
are one slice. Another track has the steps. Arrivals and ends of requests are slices of 1 us at
most. A flow joins all slices of a request. Counters are running and waiting requests, cells
in use, and the bytes of the cache.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import IO, Any

from pyllama_raw.cli.running import output
from pyllama_raw.engine.logs import RequestRecord, read_records
from pyllama_raw.engine.watcher import StepRecord
from pyllama_raw.errors import ConfigError

SLOTS, REQUESTS = 1, 2  # processes
# Threads; Perfetto takes 0 for the first one of the process.
STEPS_TRACK, ARRIVALS, ENDS = 1, 1, 2
FIRST_SLOT = 2
MARK_NS = 1000
HIDDEN = {"at_s", "decodes", "chunks", "hash_ids"}  # of records

Event = dict[str, Any]  # times in ns
Span = tuple[int, int]


def write_trace(
    file: IO[str],
    steps: Iterable[StepRecord],
    requests: Iterable[RequestRecord] = (),
) -> None:
    """Write all as one JSON object, an event a line: names of tracks, then all by time."""
    events = _events(tuple(steps), tuple(requests))
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    file.write(",\n".join(json.dumps(_in_us(event)) for event in events))
    file.write("\n]}\n")


def _in_us(event: Event) -> Event:
    return event | {key: event[key] / 1000 for key in ("ts", "dur") if key in event}


def _events(
    steps: Sequence[StepRecord], requests: Sequence[RequestRecord]
) -> list[Event]:
    moments = [step.at_s for step in steps] + [
        request.submitted_s for request in requests
    ]
    start_s = min(moments, default=0.0)

    def clock(at_s: float) -> int:
        return round((at_s - start_s) * 1e9) + 1

    # Of one moment Perfetto reads the longest slice first, and a flow begins with the first
    # slice that it reads: so an arrival is 1 ns early.
    arrivals = [clock(request.submitted_s) - 1 for request in requests]
    ends = [clock(request.finished_s) for request in requests]
    slices = [
        *_slices(steps, clock),
        *_marks("arrival", ARRIVALS, requests, arrivals),
        *_marks("end", ENDS, requests, ends),
    ]
    slices.sort(key=_order)
    _join(slices)
    counters = [event for step in steps for event in _counters(step, clock)]
    return [*_names(slices), *sorted([*slices, *counters], key=itemgetter("ts"))]


def _order(event: Event) -> tuple[int, bool, int, int]:
    """Order of events: of one moment an end is last; an inner slice follows its outer one."""
    return event["ts"], event["name"] == "end", -event["pid"], -event["dur"]


def _slices(
    steps: Sequence[StepRecord], clock: Callable[[float], int]
) -> Iterator[Event]:
    """The steps, and what slots did in them; rounding makes no two steps overlap."""
    starts = [*(clock(step.at_s) for step in steps), 2**63]
    spans = [
        (start, max(min(clock(step.at_s + step.seconds), following), start))
        for step, (start, following) in zip(steps, pairwise(starts), strict=True)
    ]
    for step, span in zip(steps, spans, strict=True):
        yield _slice(f"step: {step.status}", SLOTS, STEPS_TRACK, span, _facts(step))
    streams: dict[tuple[int, int], Event] = {}  # that went on in the step before
    for step, span in zip(steps, spans, strict=True):
        before, streams = streams, {}
        for place in step.decodes:
            stream = before.get(place) or _work("decode", *place, span)
            stream["dur"] = span[1] - stream["ts"]
            stream["args"]["tokens"] += 1
            streams[place] = stream
            if place not in before:
                yield stream
        for request_id, slot, n_tokens in step.chunks:
            yield _work("prefill", request_id, slot, span, n_tokens)


def _work(
    name: str, request_id: int, slot: int, span: Span, n_tokens: int = 0
) -> Event:
    args = {"request": request_id, "tokens": n_tokens}
    return _slice(name, SLOTS, slot + FIRST_SLOT, span, args)


def _marks(
    name: str, track: int, requests: Sequence[RequestRecord], moments: Sequence[int]
) -> Iterator[Event]:
    """A short slice for each of *requests*; those of one moment lie in each other."""
    following = dict(pairwise([*sorted(set(moments)), 2**63]))
    for request, at in zip(requests, moments, strict=True):
        span = at, min(at + MARK_NS, following[at])
        yield _slice(name, REQUESTS, track, span, _facts(request))


def _slice(name: str, process: int, track: int, span: Span, args: Event) -> Event:
    start, end = span
    times = {"ts": start, "dur": end - start}
    about = {"ph": "X", "name": name, "cat": "pyllama_raw", "pid": process}
    return about | {"tid": track, **times, "args": args}


def _facts(record: StepRecord | RequestRecord) -> Event:
    facts = record._asdict().items()
    return {name: value for name, value in facts if name not in HIDDEN}


def _join(slices: Iterable[Event]) -> None:
    """Lead a flow through the slices of each request, in their order."""
    of_requests = defaultdict[int | None, list[Event]](list)
    for item in slices:
        args = item["args"]
        of_requests[args.get("request", args.get("request_id"))].append(item)
    of_requests.pop(None, None)  # the steps
    for request_id, of_one in of_requests.items():
        for before, after in pairwise(of_one):
            before |= {"bind_id": hex(request_id or 0), "flow_out": True}
            after |= {"bind_id": hex(request_id or 0), "flow_in": True}


def _counters(step: StepRecord, clock: Callable[[float], int]) -> Iterator[Event]:
    """Counts of requests, cells and bytes after *step*."""
    values: dict[str, dict[str, int]] = {
        "requests": {"running": step.n_running, "waiting": step.n_waiting},
        "cells": {"used": step.n_cells_used},
        "cache bytes": {"host": step.n_host_bytes, "disk": step.n_disk_bytes},
    }
    at = clock(step.at_s + step.seconds)
    for name, args in values.items():
        yield {"ph": "C", "name": name, "pid": SLOTS, "ts": at, "args": args}


def _names(slices: Iterable[Event]) -> Iterator[Event]:
    """Names of processes and tracks, the steps above the slots."""
    names = {
        (SLOTS, STEPS_TRACK): "steps",
        (REQUESTS, ARRIVALS): "arrivals",
        (REQUESTS, ENDS): "ends",
    }
    for process, name in ((SLOTS, "slots"), (REQUESTS, "requests")):
        args = {"name": name}
        yield {"ph": "M", "name": "process_name", "pid": process, "args": args}
    for process, track in sorted({(item["pid"], item["tid"]) for item in slices}):
        name = names.get((process, track), f"slot {track - FIRST_SLOT}")
        about = {"ph": "M", "pid": process, "tid": track}
        yield about | {"name": "thread_name", "args": {"name": name}}
        yield about | {"name": "thread_sort_index", "args": {"sort_index": track}}


def trace(options: Namespace) -> int:
    """Run the command `trace`; return its exit status."""
    try:
        steps, requests = read_records(options.steps, StepRecord), []
        if options.requests is not None:
            requests = read_records(options.requests, RequestRecord)
    except ValueError as error:
        raise ConfigError(f"no log: {error}") from error
    with output(options.out) as file:
        assert file is not None
        write_trace(file, steps, requests)
    return 0
