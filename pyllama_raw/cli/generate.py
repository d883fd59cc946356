"""
Commands that run many inputs on one engine: `generate`, and behind it `embed` and `rank`.

`generate` shows each output as live text or as JSON lines, and sums up: tokens, rates, latencies.
`embed` and `rank` have texts in, vectors or scores out.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

import anyio

from pyllama_raw.api.engine import AsyncEngine
from pyllama_raw.api.results import EngineStats, Result, percentile
from pyllama_raw.cli.flags import AdapterFlag, scales_of
from pyllama_raw.cli.inputs import (
    Conversation,
    Input,
    InputRequest,
    Outcome,
    from_file,
    from_prompts,
    lines_of,
)
from pyllama_raw.cli.options import SAMPLING, engine_config, given, model_spec
from pyllama_raw.cli.running import Terminal, opened, output, run
from pyllama_raw.core.request import (
    FinishDetail,
    LengthLimit,
    StopString,
    StopToken,
    TokenLogprobs,
)
from pyllama_raw.errors import ConfigError, InvalidRequest, PyllamaError
from pyllama_raw.media import Audio, Image
from pyllama_raw.options.models import resolve_model, with_projector
from pyllama_raw.options.profile import check_writable, replacing

if TYPE_CHECKING:
    from pyllama_raw.api.vectors import Vectors

STATUS_S = 0.25  # between two looks at the engine


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
        n_of_each = (i.sampling.n for i in self.inputs if not isinstance(i, Outcome))
        n_outputs = max(n_of_each, default=1)
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


class JsonLines:
    """One object a request, as soon as it has ended; nothing else."""

    is_live = False  # wants finished() only

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def text(self, index: int, text: str) -> None:
        """Wait for the end."""

    def finished(self, outcome: Outcome) -> None:
        """Write the line."""
        line = json.dumps(record(outcome), ensure_ascii=False, allow_nan=False)
        self._terminal.write(f"{line}\n")


class LiveText:
    """The text of the first request that has not ended; the others in their turn."""

    is_live = True

    def __init__(self, terminal: Terminal, inputs: list[Input]) -> None:
        self._terminal = terminal
        self._inputs = inputs
        self._turn = 0  # index of the request that is shown
        self._pending: dict[int, list[str]] = {}  # text of later requests
        self._ended: dict[int, Outcome] = {}
        self._last_char = "\n"
        self._title()

    def text(self, index: int, text: str) -> None:
        """Show *text*, or keep it until it is the turn of *index*."""
        if index == self._turn:
            self._write(text)
        else:
            self._pending.setdefault(index, []).append(text)

    def finished(self, outcome: Outcome) -> None:
        """End the request; if it was shown, go on with the next ones."""
        self._ended[outcome.index] = outcome
        while self._turn in self._ended:
            self._end_line(self._ended.pop(self._turn))
            self._turn += 1
            if self._turn < len(self._inputs):
                self._title()
                self._write("".join(self._pending.pop(self._turn, ())))

    def _title(self) -> None:
        if len(self._inputs) > 1:
            self._write(f"[{self._turn}] {_title_of(self._inputs[self._turn])}\n")

    def _end_line(self, outcome: Outcome) -> None:
        result = outcome.result
        if result is not None:
            self._write(_instead_of_text(result))
        if self._last_char != "\n":
            self._write("\n")
        if outcome.error is not None:
            self._terminal.say(f"[{outcome.index}] error: {outcome.error}")
        elif not outcome.succeeded and result is not None:
            self._terminal.say(f"[{outcome.index}] ended: {result.finish_reason}")
        if self._turn + 1 < len(self._inputs):
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self._last_char = text[-1]
            self._terminal.write(text)


View = JsonLines | LiveText


def record(outcome: Outcome) -> dict[str, Any]:
    """The object that stands for *outcome* in a JSON line."""
    result = outcome.result
    if result is None:
        assert outcome.error is not None
        kind = type(outcome.error).__name__
        error = {"type": kind, "message": str(outcome.error)}
        return {"index": outcome.index, "error": error}
    if outcome.alternatives:
        choices = [{"choice": r.index} | _fields(r) for r in outcome.results]
        return {"index": outcome.index, "choices": choices}
    return {"index": outcome.index} | _fields(result)


def _fields(result: Result) -> dict[str, Any]:
    timings = asdict(result.timings)
    timings.pop("itl_s")
    fields: dict[str, Any] = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "finish_detail": _detail(result.finish_detail),
        "usage": asdict(result.usage),
        "timings": timings,
        "sampler": None if result.sampler is None else result.sampler._asdict(),
    }
    if result.reasoning:
        fields["reasoning"] = result.reasoning
    if result.tool_calls:
        fields["tool_calls"] = [asdict(call) for call in result.tool_calls]
    for name in ("logprobs", "prompt_logprobs"):
        if items := getattr(result, name):
            fields[name] = [_logprobs(item) for item in items]
    return fields


def _detail(detail: FinishDetail | None) -> dict[str, Any] | None:
    match detail:
        case StopToken(token_id):
            return {"stop_token_id": token_id}
        case StopString(text):
            return {"stop_string": text}
        case LengthLimit():
            return {"limit": detail}
    return None


def _logprobs(item: TokenLogprobs) -> dict[str, Any]:
    return {
        "token_id": item.token_id,
        "logprob": _finite(item.logprob),
        "top": [(token, _finite(logprob)) for token, logprob in item.top],
    }


def _finite(number: float) -> float | None:
    """JSON has no infinity."""
    return number if isfinite(number) else None


def _instead_of_text(result: Result) -> str:
    """Calls, which a person sees below the text; or tokens, where there is no vocabulary."""
    if result.tool_calls:
        calls = "\n".join(
            f"{call.name}({call.arguments})" for call in result.tool_calls
        )
        return f"\n{calls}" if result.text else calls
    if result.text or result.reasoning:
        return ""
    return " ".join(map(str, result.token_ids))


def numbered(results: Sequence[Result]) -> str:
    """The texts of several outputs, each after its index."""
    return "".join(f"({result.index}) {result.text}\n" for result in results)


def _title_of(item: Input) -> str:
    if isinstance(item, Outcome):
        return "(no request)"
    prompt = item.prompt
    last = prompt[-1] if prompt and not isinstance(prompt, str) else prompt
    text = last if isinstance(last, str) else str(prompt)
    if isinstance(last, dict):
        text = str(last.get("content"))
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- vectors and ranks ---------------------------------------------------------------


def embed(options: Namespace) -> int:
    """Run the command; return its exit status."""
    texts = _texts(options)
    if options.tokens and (options.npy or options.pooling):
        raise ConfigError("--tokens is not allowed with --npy or --pooling")
    if options.npy is not None:
        check_writable(options.npy)

    with opened(options, "embed") as (engine, terminal):
        progress = _progress(terminal, len(texts))
        shape = options.dimensions, not options.raw
        how: dict[str, Any] = {"truncate": options.truncate, "progress": progress}
        if options.tokens:
            _tell(engine.embed_tokens(texts, *shape, **how))
            return 0
        vectors = engine.embed(texts, *shape, options.pooling, **how)
        if options.npy is None:
            _tell(vectors)
        else:
            _save(options.npy, vectors)
    return 0


def rank(options: Namespace) -> int:
    """Run the command; return its exit status."""
    documents = _texts(options)

    with opened(options, "rank") as (engine, terminal):
        progress = _progress(terminal, len(documents))
        ranked = engine.rank(options.query, documents, progress=progress)
        _write(
            {
                "index": document.index,
                "score": document.score,
                "document": documents[document.index],
            }
            for document in ranked
        )
    return 0


def _progress(terminal: Terminal, n_texts: int) -> Callable[[int], None]:
    return lambda n_done: terminal.status(f"{n_done}/{n_texts} done")


def _texts(options: Namespace) -> list[str]:
    if bool(options.texts) == bool(options.input):
        raise ConfigError("give texts or --input FILE, one of them")
    if options.texts:
        return list(options.texts)
    lines = enumerate(lines_of(options.input), 1)
    return [_text(number, line) for number, line in lines if line.strip()]


def _text(number: int, line: bytes) -> str:
    """
    The text of one line.

    A line that begins as JSON does must be a JSON string, or an object with "text". Any other
    line is itself the text, because files of plain lines are what people have.
    """
    text = line.decode("utf-8", "replace").strip()
    if text[0] not in '"{':
        return text
    allowed = 'a JSON string, an object with "text", or plain text'
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"line {number}", text, allowed) from error
    if isinstance(value, dict):
        value = value.get("text")
    if not isinstance(value, str):
        raise InvalidRequest(f"line {number}", text, allowed)
    return value


def _tell(vectors: Iterable[Any]) -> None:
    _write({"index": i, "embedding": v.tolist()} for i, v in enumerate(vectors))


def _write(lines: Iterable[dict[str, Any]]) -> None:
    for line in lines:
        sys.stdout.write(f"{json.dumps(line)}\n")


def _save(path: Path, vectors: Vectors) -> None:
    import numpy as np

    with replacing(path) as file:
        np.save(cast(TextIO, file).buffer, vectors)
