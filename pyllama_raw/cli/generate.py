"""`generate`: run many requests on one engine, show each, and sum up: tokens, rates, latencies."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import IO, Any

import anyio

from pyllama_raw.api.engine import AsyncEngine
from pyllama_raw.api.results import EngineStats, percentile
from pyllama_raw.cli.conversation import Conversation
from pyllama_raw.cli.engine_options import engine_config, given, model_spec
from pyllama_raw.cli.flags import AdapterFlag, scales_of
from pyllama_raw.cli.inputs import (
    Input,
    InputRequest,
    Outcome,
    from_file,
    from_prompts,
)
from pyllama_raw.cli.options import SAMPLING
from pyllama_raw.cli.running import output, run
from pyllama_raw.cli.terminal import Terminal
from pyllama_raw.cli.views import JsonLines, LiveText, View, numbered
from pyllama_raw.errors import ConfigError, PyllamaError
from pyllama_raw.media import Audio, Image
from pyllama_raw.options.models import resolve_model, with_projector
from pyllama_raw.options.output_file import check_writable

STATUS_S = 0.25  # between two looks at the engine


@dataclass
class GenerateRun:
    """One call of the command."""

    opening: AbstractAsyncContextManager[AsyncEngine]
    inputs: list[Input]
    view: View
    terminal: Terminal
    summary: IO[str] | None
    adapters: list[AdapterFlag]
    outcomes: list[Outcome] = field(default_factory=list)

    async def main(self) -> int:
        """Return the exit status."""
        started = perf_counter()
        self.terminal.status("loading the model")
        async with self.opening as engine:
            for adapter in self.adapters:
                await engine.load_adapter(adapter.name, adapter.path)
            loaded = perf_counter()
            try:
                await self._serve_all(engine)
            finally:
                self._sum_up(engine, loaded - started, perf_counter() - loaded)
        return 0 if all(outcome.succeeded for outcome in self.outcomes) else 1

    async def _serve_all(self, engine: AsyncEngine) -> None:
        """By as many tasks as the engine takes requests: it never has to refuse one."""
        waiting, limits = iter(self.inputs), engine.info.config.scheduler
        max_requests = limits.n_slots + limits.max_waiting
        n_outputs = max((_n_outputs(item) for item in self.inputs), default=1)
        n_tasks = min(len(self.inputs), max(max_requests // n_outputs, 1))
        async with anyio.create_task_group() as watch:
            if self.terminal.has_status:
                watch.start_soon(self._show_status, engine)
            async with anyio.create_task_group() as tasks:
                for _ in range(n_tasks):
                    tasks.start_soon(self._serve_next, engine, waiting)
            watch.cancel_scope.cancel()

    async def _serve_next(self, engine: AsyncEngine, waiting: Iterator[Input]) -> None:
        for item in waiting:
            outcome = item
            if not isinstance(outcome, Outcome):
                outcome = await self._serve(engine, outcome)
            self.outcomes.append(outcome)
            self.view.finished(outcome)

    async def _serve(self, engine: AsyncEngine, item: InputRequest) -> Outcome:
        try:
            async with engine.generate(
                item.prompt, item.sampling, **item.options
            ) as generation:
                if self.view.is_live and item.sampling.n == 1:
                    async for delta in generation:
                        self.view.text(item.index, delta.text)
                first, *alternatives = await generation.collect_all()
                if item.sampling.n > 1:
                    self.view.text(item.index, numbered([first, *alternatives]))
                return Outcome(item.index, first, alternatives=tuple(alternatives))
        except PyllamaError as error:
            return Outcome(item.index, error=error)

    async def _show_status(self, engine: AsyncEngine) -> None:
        started = perf_counter()
        while True:
            stats, elapsed_s = engine.stats(), perf_counter() - started
            rate = stats.output_tokens / max(elapsed_s, STATUS_S)
            self.terminal.status(
                f"{len(self.outcomes)}/{len(self.inputs)} done, {stats.running} running, "
                f"{stats.output_tokens} tokens, {rate:.1f}/s, {elapsed_s:.0f} s"
            )
            await anyio.sleep(STATUS_S)

    def _sum_up(self, engine: AsyncEngine, load_s: float, wall_s: float) -> None:
        totals = summarize(
            self.outcomes, load_s=load_s, wall_s=wall_s, stats=engine.stats()
        )
        self.terminal.close()
        if self.summary is not None:
            self.summary.write(json.dumps(totals, indent=2) + "\n")
        if self.terminal.has_status:
            self.terminal.say(
                f"{totals['succeeded']}/{len(self.inputs)} succeeded, "
                f"{totals['completion_tokens']} tokens in {wall_s:.1f} s "
                f"({totals['completion_tokens_per_s']:.1f}/s)"
            )


def _n_outputs(item: Input) -> int:
    return 1 if isinstance(item, Outcome) else item.sampling.n


def generate(options: Namespace) -> int:
    """Run the command; return its exit status."""
    if options.model is None and options.prompts and _is_model(options.prompts[0]):
        options.model = options.prompts.pop(0)
    defaults = given(options, SAMPLING)
    inputs = _inputs(options, defaults)
    if options.mmproj is None and (options.images or options.sounds):
        options.mmproj = "auto"
    config = engine_config(options)
    if options.summary is not None:
        check_writable(options.summary)
    spec = model_spec(options)
    path = resolve_model(spec)
    opening = AsyncEngine.open(
        path, with_projector(config, spec, path), needs="generate"
    )
    terminal = Terminal(sys.stdout, sys.stderr)
    view = JsonLines(terminal) if options.jsonl else LiveText(terminal, inputs)
    try:
        with output(options.summary) as summary:
            command = GenerateRun(
                opening, inputs, view, terminal, summary, options.adapters
            )
            return run(command.main)
    finally:
        terminal.close()


def _is_model(text: str) -> bool:
    """Whether a person means a model by *text*, and no prompt."""
    is_name = text.endswith(".gguf") or text.startswith("hf:")
    return is_name and (" " not in text or Path(text).exists())


def _inputs(options: Namespace, defaults: dict[str, Any]) -> list[Input]:
    if bool(options.prompts) == bool(options.input):
        raise ConfigError("give prompts or --input FILE, one of them")
    if options.system is not None and not options.chat:
        raise ConfigError(
            "--system is allowed with --chat only; a line of --input has messages"
        )
    if options.input and (options.images or options.sounds):
        raise ConfigError(
            "--image and --audio are allowed with prompts only; a line has messages"
        )
    of_request = given(options, ["deadline_s"])
    of_request["adapters"] = scales_of(options.adapters)
    if options.input:
        return from_file(options.input, defaults=defaults, options=of_request)
    return from_prompts(
        options.prompts,
        chat=Conversation(options.system) if options.chat else None,
        defaults=defaults,
        options=of_request,
        media=[
            *(Image(path) for path in options.images or ()),
            *(Audio(path) for path in options.sounds or ()),
        ],
    )


def summarize(
    outcomes: Iterable[Outcome], *, load_s: float, wall_s: float, stats: EngineStats
) -> dict[str, Any]:
    """
    The object that `--summary` writes.

    Args:
        wall_s: from the first submission to the last end.
    """
    outcomes = list(outcomes)
    results = [result for outcome in outcomes for result in outcome.results]
    n_prompt = sum(result.usage.prompt_tokens for result in results)
    n_output = sum(result.usage.completion_tokens for result in results)
    n_succeeded = sum(outcome.succeeded for outcome in outcomes)
    first = (result.timings.ttft_s for result in results)
    return {
        "requests": len(outcomes),
        "succeeded": n_succeeded,
        "failed": len(outcomes) - n_succeeded,
        "load_s": load_s,
        "wall_s": wall_s,
        "prompt_tokens": n_prompt,
        "completion_tokens": n_output,
        "cached_tokens": sum(result.usage.cached_tokens for result in results),
        "media_tokens": sum(result.usage.media_tokens for result in results),
        "total_tokens_per_s": (n_prompt + n_output) / wall_s,
        "completion_tokens_per_s": n_output / wall_s,
        "ttft_s": _spread(ttft_s for ttft_s in first if ttft_s is not None),
        "itl_s": _spread(gap for result in results for gap in result.timings.itl_s),
        "host_s_per_step": _host_s_per_step(wall_s, stats),
        "engine": asdict(stats),
    }


def _host_s_per_step(wall_s: float, stats: EngineStats) -> float | None:
    """Time outside libllama: planning, delivery, and whatever waited between steps."""
    if not stats.steps:
        return None
    inside_s = stats.decode_s + stats.sample_s + stats.capture_s + stats.restore_s
    return (wall_s - inside_s) / stats.steps


def _spread(values: Iterable[float]) -> dict[str, float | None]:
    numbers = list(values)
    ranks = {"p50": 50, "p99": 99, "max": 100}
    return {
        name: percentile(numbers, p) if numbers else None for name, p in ranks.items()
    }
