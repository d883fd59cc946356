"""What slots did, and how full the engine was, over time; from a step log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from pyllama_raw.engine.watcher import StepRecord
from pyllama_raw.lab.plot.style import COLOURS, canvas, legend

MAX_BARS = 900  # of a picture: more are not told apart
MAX_LABELS = 120
MAX_POINTS = 4000
PROMPT, STREAM = COLOURS[1], COLOURS[0]


class Bar(NamedTuple):
    """A request in a slot, while it computed its prompt or went on as a stream."""

    slot: int
    start: float
    end: float
    request_id: int
    is_prompt: bool


def bars(steps: Iterable[StepRecord]) -> list[Bar]:
    """Steps of one request that follow each other are one bar."""
    found: list[Bar] = []
    last: dict[int, tuple[int, int]] = {}  # step and index of the last bar, by slot
    for number, step in enumerate(steps):
        works = [(i, slot, False) for i, slot in step.decodes]
        works += [(i, slot, True) for i, slot, _ in step.chunks]
        for request_id, slot, is_prompt in works:
            end = step.at_s + step.seconds
            then, index = last.get(slot, (-2, -1))
            before = found[index] if then == number - 1 else None
            if before is not None and before[3:] == (request_id, is_prompt):
                found[index] = before._replace(end=end)
            else:
                index = len(found)
                found.append(Bar(slot, step.at_s, end, request_id, is_prompt))
            last[slot] = number, index
    return found


def gantt(steps: Sequence[StepRecord]) -> Figure | None:
    """A track for each slot; a busy log is cut to its beginning, which the title says."""
    found = bars(steps)
    if not found:
        return None
    shown = sorted(found, key=lambda bar: bar.start)[:MAX_BARS]
    start = min(bar.start for bar in shown)
    n_slots = max(bar.slot for bar in shown) + 1
    height = min(1.6 + 0.28 * n_slots, 9.0)
    figure, (ax,) = canvas(1, width=11, height=height)
    for is_prompt, colour, label in (
        (True, PROMPT, "prompt"),
        (False, STREAM, "stream"),
    ):
        mine = [bar for bar in shown if bar.is_prompt is is_prompt]
        for slot in sorted({bar.slot for bar in mine}):
            spans = [(b.start - start, b.end - b.start) for b in mine if b.slot == slot]
            ax.broken_barh(
                spans, (slot - 0.42, 0.84), color=colour, edgecolor="white", lw=0.4
            )
        ax.plot([], [], color=colour, lw=6, label=label)
    end = max(bar.end for bar in shown) - start
    _name(ax, shown, start, end)
    cut = f", the first {end:.3g} s" if len(shown) < len(found) else ""
    ax.set_title(f"Slots over time{cut}; numbers are requests", loc="left")
    ax.set(xlabel="seconds", ylabel="slot", xlim=(0, end), ylim=(n_slots - 0.4, -0.6))
    ax.set_yticks(range(0, n_slots, -(-n_slots // 16)))
    ax.grid(visible=False)
    return legend(figure)


def _name(ax: object, shown: Sequence[Bar], start: float, end: float) -> None:
    """The request in the middle of each bar that is long enough."""
    wide = [bar for bar in shown if bar.end - bar.start > end / 45]
    for bar in wide[:MAX_LABELS]:
        ax.text(  # type: ignore[attr-defined]
            (bar.start + bar.end) / 2 - start,
            bar.slot,
            str(bar.request_id),
            ha="center",
            va="center",
            color="white",
            fontsize=7,
        )


def load(steps: Sequence[StepRecord]) -> Figure | None:
    """Who runs and who waits, cells, and tokens of each step."""
    if not steps:
        return None
    every = -(-len(steps) // MAX_POINTS)
    some = steps[::every]
    times = [step.at_s - steps[0].at_s for step in some]
    figure, (requests, cells, tokens) = canvas(1, 3, width=9, height=6)
    series = (
        (requests, [step.n_waiting for step in some], "waiting", 1),
        (requests, [step.n_running for step in some], "running", 0),
        (cells, [step.n_cells_used for step in some], "KV cells in use", 2),
        (tokens, [step.n_decode for step in some], "stream tokens", 0),
    )
    for ax, values, label, index in series:
        ax.step(times, values, where="post", color=COLOURS[index], lw=1.2, label=label)
    prompts = [step for step in some if step.n_prefill]
    tokens.scatter(
        [step.at_s - steps[0].at_s for step in prompts],
        [step.n_prefill for step in prompts],
        s=4,
        color=PROMPT,
        label="prompt tokens",
    )
    for ax, label in zip(
        figure.axes, ("requests", "cells", "tokens a step"), strict=True
    ):
        ax.set_ylabel(label)
        ax.set_ylim(bottom=0)
        ax.set_xlim(0, times[-1] or 1)
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    figure.axes[-1].set_xlabel("seconds")
    return figure
