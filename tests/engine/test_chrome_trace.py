"""
Traces keep the rules of the format that Perfetto reads.

Its own processor is asked in test_perfetto.py, where it is installed. `Checked` has the rules
of the format description, and those that the importer counts as errors: slices of a track lie
in each other or apart, and each step of a flow has one before it.
"""

from __future__ import annotations

import json
import os
from array import array
from collections import defaultdict
from io import StringIO
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.logs import RequestLog, StepLog
from pyllama_raw.engine.watcher import StepRecord
from pyllama_raw.lab.chrome_trace import write_trace
from pyllama_raw.testing import FakeExecutor, fake_limits, fake_parts
from tests.core.support import make_request

N_CASES = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "20"))
FIELDS = {
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"ph", "name", "pid", "ts", "args"},
    "M": {"ph", "name", "pid", "args"},
}
MORE = {"X": {"bind_id", "flow_in", "flow_out"}, "C": set(), "M": {"tid"}}
NAMES = {"process_name", "thread_name", "thread_sort_index"}


class Checked:
    """A trace that was read and keeps all rules; what tests ask of it."""

    def __init__(self, text: str) -> None:
        self.text, trace = text, json.loads(text)
        assert set(trace) == {"displayTimeUnit", "traceEvents"}
        self.events = trace["traceEvents"]
        self.tracks: dict[tuple[int, int], str] = {}
        self.slices = [event for event in self.events if event["ph"] == "X"]
        self.counters = [event for event in self.events if event["ph"] == "C"]
        for event in self.events:
            self._check_fields(event)
        times = [event["ts"] for event in self.events if "ts" in event]
        assert times == sorted(times)
        for track in {(event["pid"], event["tid"]) for event in self.slices}:
            assert track in self.tracks
            self._check_nesting(track)
        self.flows = defaultdict(list)  # slices, by request
        self._check_flows()

    def _check_fields(self, event: dict) -> None:
        kind = event["ph"]
        assert FIELDS[kind] <= set(event) <= FIELDS[kind] | MORE[kind]
        assert type(event["pid"]) is int
        assert type(event.get("tid", 1)) is int
        assert event.get("tid", 1)  # Perfetto takes 0 for the first thread
        assert isinstance(event["args"], dict)
        if kind == "M":
            assert event["name"] in NAMES
            if event["name"] == "thread_name":
                self.tracks[event["pid"], event["tid"]] = event["args"]["name"]
        else:
            assert event["ts"] >= 0
            assert event.get("dur", 0) >= 0
        if kind == "C":
            assert all(type(value) is int for value in event["args"].values())

    def _check_nesting(self, track: tuple[int, int]) -> None:
        open_until: list[int] = []
        for event in self.slices:
            if (event["pid"], event["tid"]) == track:
                start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
                while open_until and open_until[-1] <= start:
                    open_until.pop()
                assert not open_until or start + length <= open_until[-1]
                open_until.append(start + length)

    def _check_flows(self) -> None:
        open_flows: set[str] = set()
        works = [e for e in self.slices if e["name"] in ("prefill", "decode")]
        first = {e["bind_id"]: e["ts"] for e in reversed(works) if "bind_id" in e}
        for event in self.slices:
            bind_id = event.get("bind_id")
            assert (bind_id is None) == (not event.keys() & {"flow_in", "flow_out"})
            if bind_id is not None:
                assert (bind_id in open_flows) == event.get("flow_in", False)
                in_order = event["name"] != "arrival" or event["ts"] < first.get(
                    bind_id, inf
                )
                assert in_order  # of one moment Perfetto reads the longest first
                (open_flows.add if "flow_out" in event else open_flows.discard)(bind_id)
                self.flows[int(bind_id, 16)].append(event)
        assert not open_flows


def trace_of(requests, *, seconds=0.001):
    """Run *requests* on the fake executor; the trace of both logs, and these."""
    steps, ended = StepLog(), RequestLog()
    executor = FakeExecutor(fake_limits(n_slots=2, n_batch=16))
    driver = Driver(
        fake_parts(executor, token_budget=8).scheduler,
        executor,
        lambda: 100 + seconds * executor.n_steps,
        lambda *_: None,
        watchers=[steps, ended],
    )
    for request in requests:
        driver.add([request], driver.clock())
        driver.step()
    while driver.step():
        pass
    file = StringIO()
    write_trace(file, steps, ended)
    return Checked(file.getvalue()), list(steps), list(ended)


def test_slots_are_tracks_and_chunks_are_slices():
    """
    A prompt of 20 tokens is three chunks of a slot, its output one slice of decodes.
    """
    trace, *_ = trace_of([make_request(5, n_prompt=20, max_tokens=4)])

    found = [
        (trace.tracks[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"])
        for e in trace.slices
        if not e["name"].startswith("step")
    ]

    assert sorted(found, key=lambda slice_: slice_[2]) == [
        ("arrivals", "arrival", 0, 1),
        ("slot 0", "prefill", 0.001, 1000),
        ("slot 0", "prefill", 1000.001, 1000),
        ("slot 0", "prefill", 2000.001, 1000),
        ("slot 0", "decode", 3000.001, 3000),
        ("ends", "end", 6000.001, 1),
    ]


def test_a_flow_leads_from_arrival_to_end():
    """
    Through all that was computed for the request, and nothing else.
    """
    trace, *_ = trace_of([make_request(i, n_prompt=12, max_tokens=3) for i in range(3)])

    assert {i: [e["name"] for e in events] for i, events in trace.flows.items()} == {
        i: ["arrival", *["prefill"] * n, "decode", "end"]
        for i, n in enumerate((2, 3, 2))
    }


def test_counters_tell_of_every_step():
    """
    Queue, cells and bytes of the cache, as the step log has them.
    """
    trace, steps, _ = trace_of([make_request(i) for i in range(4)])

    values = defaultdict(list)
    for event in trace.counters:
        values[event["name"]].append(event["args"])

    assert values == {
        "requests": [{"running": s.n_running, "waiting": s.n_waiting} for s in steps],
        "cells": [{"used": s.n_cells_used} for s in steps],
        "cache bytes": [
            {"host": s.n_host_bytes, "disk": s.n_disk_bytes} for s in steps
        ],
    }


VISIT = st.builds(
    make_request, n_prompt=st.integers(1, 30), max_tokens=st.integers(1, 9)
)


@settings(deadline=None, max_examples=N_CASES)
@given(st.lists(VISIT, max_size=8), st.sampled_from([0.0, 1e-9, 3e-7, 0.1, 1 / 3]))
def test_every_trace_keeps_the_rules(visits, seconds):
    """
    However long steps take, and also if they take no time; no token is left out.
    """
    requests = [
        make_request(i, n_prompt=visit.n_prompt, max_tokens=visit.max_tokens)
        for i, visit in enumerate(visits)
    ]
    trace, steps, ended = trace_of(requests, seconds=seconds)
    n_tokens = array("q", [0]) * len(requests)
    for event in trace.slices:
        if event["name"] in ("prefill", "decode"):
            n_tokens[event["args"]["request"]] += event["args"]["tokens"]

    assert list(n_tokens) == [len(r.tokens) + r.max_tokens - 1 for r in requests]
    assert len(steps) == sum(e["name"].startswith("step") for e in trace.slices)
    assert len(ended) == sum(e["name"] == "end" for e in trace.slices)


def test_a_trace_of_nothing_is_one():
    """
    Empty logs give names and no slice; steps alone need no requests.
    """
    empty, alone = StringIO(), StringIO()
    write_trace(empty, [])
    write_trace(alone, [StepRecord(*range(10), chunks=((1, 0, 5),))])

    assert Checked(empty.getvalue()).slices == []
    assert [e["name"] for e in Checked(alone.getvalue()).slices] == [
        "step: ok",
        "prefill",
    ]
