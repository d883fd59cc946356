"""
An engine without a model, for tests of programs that use one.

    async with fake_engine() as engine:
        result = await engine.complete("hello", SamplingParams(max_tokens=4))

The fakes keep the contracts of what they stand for and assert that others do: a
scheduler that writes a wrong plan fails here, not in C.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Event
from typing import Any

from pyllama_raw.api import AsyncEngine
from pyllama_raw.config import EngineConfig, SchedulerConfig
from pyllama_raw.core.admission import Admission
from pyllama_raw.core.limits import ContextLimits
from pyllama_raw.core.request import Request, SamplerUse, TokenLogprobs
from pyllama_raw.core.scheduler import Scheduler
from pyllama_raw.core.stats import StepTimes
from pyllama_raw.core.step import (
    Computed,
    Decode,
    DecodeStatus,
    Held,
    Output,
    RowFailed,
    Sampled,
    Score,
    Scored,
    StepPlan,
    StepResult,
    Work,
)
from pyllama_raw.engine.abort import AbortGate
from pyllama_raw.engine.capabilities import Capabilities, capabilities_of
from pyllama_raw.engine.info import EngineInfo
from pyllama_raw.engine.model_info import ModelClass, ModelInfo
from pyllama_raw.engine.parts import EngineParts
from pyllama_raw.errors import DecodeFailed, SamplingFailed
from pyllama_raw.sampling.params import SamplingParams
from pyllama_raw.testing.memory import FakeMemory

BOS, EOS = 256, 257

NextToken = Callable[[Sequence[int]], int]


def letters(tokens: Sequence[int]) -> int:
    """A letter that depends on all *tokens*, whatever runs beside."""
    return ord("a") + (sum(tokens) * 31 + len(tokens) * 7) % 26


def fake_logprobs(n_before: int, token: int, n_top: int) -> TokenLogprobs:
    """What the fake model says of *token* after *n_before* others."""
    logprob = -n_before / 8
    top = tuple((token + i, logprob - i) for i in range(n_top))
    return TokenLogprobs(token, logprob, top)


class FakeVocab:
    """Tokens 0 to 255 are bytes; 256 and 257 are the control tokens <s> and </s>."""

    n_tokens = 258
    bos: int | None = BOS
    eos: int | None = EOS
    sep: int | None = None
    add_bos = True
    add_eos = False
    add_sep = False
    eog_tokens = frozenset({EOS})

    @property
    def special_texts(self) -> Mapping[str, bool]:
        """Both control tokens."""
        return dict.fromkeys(_CONTROL.values(), True)

    def tokenize(
        self, text: str, *, add_special: bool, parse_special: bool
    ) -> array[int]:
        """One token a byte of UTF-8."""
        tokens = array("i", [BOS] if add_special else [])
        while parse_special and (found := _first_control(text)):
            before, token, text = found
            tokens.extend(before.encode())
            tokens.append(token)
        tokens.extend(text.encode())
        return tokens

    def piece(self, token: int, special: bool = False) -> bytes:
        """The byte of *token*."""
        if token < 256:
            return bytes([token])
        return _CONTROL[token].encode() if special else b""

    @property
    def pieces(self) -> Sequence[bytes]:
        """All of them."""
        return [self.piece(token) for token in range(self.n_tokens)]


_CONTROL = {BOS: "<s>", EOS: "</s>"}


def _first_control(text: str) -> tuple[str, int, str] | None:
    """(before, token, after) of the first control token in *text*."""
    found = [
        (text.find(name), token) for token, name in _CONTROL.items() if name in text
    ]
    if not found:
        return None
    at, token = min(found)
    return text[:at], token, text[at + len(_CONTROL[token]) :]


class FakeFlag:
    """An abort flag that can be waited for."""

    def __init__(self) -> None:
        self._event = Event()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        self._event.clear()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Stand in for a long decode that polls the flag."""
        return self._event.wait(timeout_s)


class FakeExecutor:
    """
    Runs plans on lists instead of a context.

    Args:
        next_token: the sampler; gets all tokens of the slot.
        failures: what the decode of the n-th step ends with, instead of OK.
        poison: what a decode ends with if it has a work of that request_id.
        failing_rows: (step, request_id) whose sampler fails.
        on_step: called with the step's number and plan before it is computed.
        n_more: tokens that a work samples beyond the first, where memory has room.
    """

    def __init__(
        self,
        limits: ContextLimits,
        flag: FakeFlag | None = None,
        *,
        next_token: NextToken = letters,
        failures: Mapping[int, DecodeStatus] | None = None,
        poison: Mapping[int, DecodeStatus] | None = None,
        failing_rows: frozenset[tuple[int, int]] = frozenset(),
        on_step: Callable[[int, StepPlan], None] | None = None,
        n_more: Callable[[Work], int] = lambda _: 0,
    ) -> None:
        self.limits = limits
        self.flag = flag or FakeFlag()
        self._gate = AbortGate(self.flag)
        self.n_steps = 0
        self.plans: list[StepPlan] = []
        self.opened: set[int] = set()
        self.memory = FakeMemory(limits)
        self._asked: dict[int, SamplingParams] = {}  # by request_id
        self._next_token = next_token
        self._failures = dict(failures or {})
        self._poison = dict(poison or {})
        self._failing_rows = failing_rows
        self._on_step = on_step
        self._n_more = n_more

    @property
    def times(self) -> StepTimes:
        return StepTimes()

    def open(self, request: Request) -> None:
        assert request.request_id not in self.opened
        self.opened.add(request.request_id)
        if isinstance(request.sampling, SamplingParams):
            self._asked[request.request_id] = request.sampling

    def close(self, request_id: int) -> SamplerUse | None:
        """Tells that the tokens came from the host, for known ids."""
        known = request_id in self.opened
        self.opened.discard(request_id)
        self._asked.pop(request_id, None)
        return SamplerUse("host", "it is a fake") if known else None

    def stop(self, request_id: int | None = None) -> None:
        """Set the flag if nobody wants the running step."""
        self._gate.stop(request_id)

    def execute(self, plan: StepPlan) -> StepResult:
        self._gate.enter(plan.works)
        try:
            return self._execute(plan)
        finally:
            self._gate.leave()

    def _execute(self, plan: StepPlan) -> StepResult:
        """Check *plan* against the memory, then compute it or fail as told."""
        step, self.n_steps = self.n_steps, self.n_steps + 1
        self.plans.append(plan)
        saved, lost = self.memory.run(plan.moves)
        assert not lost
        self._check(plan)
        if self._on_step is not None:
            self._on_step(step, plan)
        status = self._failures.get(step, DecodeStatus.OK)
        for work in plan.works:
            status = self._poison.get(work.request_id, status)
        if plan.works and self.flag.is_set:
            status = DecodeStatus.ABORTED
        elif status is DecodeStatus.OK and self._is_full(plan):
            status = DecodeStatus.NO_SPACE
        return self._finish(step, plan, status)._replace(saved=saved)

    def _finish(self, step: int, plan: StepPlan, status: DecodeStatus) -> StepResult:
        match status:
            case DecodeStatus.OK:
                return self._compute(step, plan)
            case DecodeStatus.NO_SPACE:
                return StepResult(status)
            case DecodeStatus.ABORTED:
                return self._abort(plan)
            case DecodeStatus.INVALID:
                return StepResult(status, error=DecodeFailed("fake", -1, "as told"))
            case DecodeStatus.FAILED:
                self.memory.clear()
                return StepResult(status, error=DecodeFailed("fake", -3, "as told"))

    def _abort(self, plan: StepPlan) -> StepResult:
        """Half of the works are computed; a last token without its row is dropped."""
        for work in plan.works[: len(plan.works) // 2]:
            self._append(work)
            if work.samples:
                self.memory.slots[work.slot].pop()
        held = [Held(len(self.memory.slots[work.slot])) for work in plan.works]
        return StepResult(DecodeStatus.ABORTED, tuple(held))

    def _compute(self, step: int, plan: StepPlan) -> StepResult:
        return StepResult(
            outputs=tuple(self._output(step, work) for work in plan.works)
        )

    def _output(self, step: int, work: Work) -> Output:
        before = len(self.memory.slots[work.slot])
        self._append(work)
        asked = self._asked.get(work.request_id, SamplingParams())
        output = self._sample(step, work, asked.logprobs)
        if type(work) is not Score:
            return output
        n_top = asked.prompt_logprobs or 0
        scores = (
            fake_logprobs(before + i + 1, token, n_top)
            for i, token in enumerate(work.targets)
        )
        return Scored(tuple(scores), output)

    def _sample(
        self, step: int, work: Work, n_top: int | None
    ) -> Sampled | RowFailed | Computed:
        if not work.samples:
            return Computed()
        if (step, work.request_id) in self._failing_rows:
            return RowFailed(SamplingFailed("fake", None, "as told"))
        seen = self.memory.tokens(work.slot)
        n_before = len(seen)
        for left in range(self._n_more(work), -1, -1):
            seen.append(self._next_token(seen))
            if not left or not self._has_room(work.slot):
                break
            self.memory.write(work.slot, seen[-1:])
        tokens = tuple(seen[n_before:])
        if n_top is None:
            return Sampled(tokens)
        logprobs = (fake_logprobs(n, t, n_top) for n, t in enumerate(tokens, n_before))
        return Sampled(tokens, tuple(logprobs))

    def _has_room(self, slot: int) -> bool:
        """Whether another token of *slot* leaves room for a step of all."""
        limits, memory = self.limits, self.memory
        n_free = limits.n_cells - memory.n_used if limits.unified else limits.n_cells
        is_full = len(memory.slots[slot]) >= limits.n_ctx_slot - 1
        return n_free > limits.n_batch and not is_full

    def _append(self, work: Work) -> None:
        self.memory.write(work.slot, work.tokens)

    def _is_full(self, plan: StepPlan) -> bool:
        if not self.limits.unified:
            return False
        return self.memory.n_used + plan.n_tokens > self.limits.n_cells

    def _check(self, plan: StepPlan) -> None:
        """The rules of core.step and of libllama."""
        assert plan.n_tokens <= self.limits.n_batch
        n_rows = sum(_count_rows(work) for work in plan.works)
        assert n_rows <= (self.limits.n_outputs or self.limits.n_slots)
        slots = [work.slot for work in plan.works]
        assert len(set(slots)) == len(slots), "one work a slot"
        for work in plan.works:
            assert len(work.tokens) > 0
            assert work.request_id in self.opened, "open() comes first"
            assert work.start == len(self.memory.slots[work.slot]), "without a gap"
            assert len(work.tokens) == 1 or type(work) is not Decode


def _count_rows(work: Work) -> int:
    """Output rows of *work*; the targets are those of its tokens that have one."""
    if type(work) is not Score:
        return int(work.samples)
    assert len(work.targets) == len(work.tokens) - work.samples
    assert work.targets[:-1] == work.tokens[1 : len(work.targets)]
    return len(work.tokens)


def fake_limits(**changes: Any) -> ContextLimits:
    """A small context: four slots of 128 positions that share 512 cells."""
    fields: dict[str, Any] = {
        "n_slots": 4,
        "n_ctx_slot": 128,
        "n_batch": 64,
        "n_cells": 512,
    }
    return ContextLimits(**(fields | changes))


def fake_parts(
    executor: FakeExecutor | None = None,
    *,
    chat_template: str | None = None,
    release: Callable[[], None] = lambda: None,
    metadata: Mapping[str, str] | None = None,
    max_waiting: int = 1024,
    max_waiting_tokens: int = 2**20,
    **scheduler_options: Any,
) -> EngineParts:
    """Parts of an engine that runs on *executor*."""
    executor = executor or FakeExecutor(fake_limits())
    vocab = FakeVocab()
    scheduler = Scheduler(executor.limits, vocab.pieces, **scheduler_options)
    limits = SchedulerConfig(
        n_slots=executor.limits.n_slots,
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
    )
    return EngineParts(
        scheduler,
        executor,
        vocab,
        chat_template,
        release,
        Admission(limits.n_slots, max_waiting, max_waiting_tokens),
        partial(_describe, executor.limits, limits, metadata or {}),
        _capabilities(executor.limits, vocab, chat_template),
        metadata=metadata or {},
    )


def _capabilities(
    limits: ContextLimits, vocab: FakeVocab, chat_template: str | None
) -> Capabilities:
    info = ModelInfo(
        architecture="fake",
        model_class=ModelClass.DECODER_ONLY,
        pooling=None,
        is_causal=True,
        n_ctx_train=limits.n_ctx_slot,
        n_vocab=vocab.n_tokens,
        n_embd=1,
        n_layer=1,
        n_expert=0,
        n_files=1,
        has_rank_head=False,
        has_chat_template=chat_template is not None,
    )
    return capabilities_of(info)


def _describe(
    limits: ContextLimits, scheduler: SchedulerConfig, metadata: Mapping[str, str]
) -> EngineInfo:
    return EngineInfo(
        model_path="fake.gguf",
        metadata=metadata,
        n_slots=limits.n_slots,
        n_ctx=limits.n_cells,
        n_ctx_slot=limits.n_ctx_slot,
        n_batch=limits.n_batch,
        n_ubatch=limits.n_batch,
        n_threads=1,
        n_threads_batch=1,
        type_k="f16",
        type_v="f16",
        flash_attn="auto",
        kv_unified=limits.unified,
        kernels={},
        devices=(),
        versions={},
        config=EngineConfig(scheduler=scheduler),
    )


def fake_engine(executor: FakeExecutor | None = None, **options: Any) -> AsyncEngine:
    """An engine on *executor*, to be used as `async with`."""
    return AsyncEngine(fake_parts(executor, **options))
