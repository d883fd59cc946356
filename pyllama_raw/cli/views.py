"""Views of the outputs of many requests: as live text, or as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from pyllama_raw.api.results import Result
from pyllama_raw.cli.inputs import Input, Outcome
from pyllama_raw.cli.terminal import Terminal
from pyllama_raw.core.request import (
    FinishDetail,
    LengthLimit,
    StopString,
    StopToken,
    TokenLogprobs,
)


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
