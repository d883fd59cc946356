"""
An engine without a model, for tests of programs that use one.

    async with fake_engine() as engine:
        result = await engine.complete("hello", SamplingParams(max_tokens=4))

The fakes keep the contracts of what they stand for and assert that others do: a
scheduler that writes a wrong plan fails here, not in C.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pyllama_raw import AsyncEngine, EngineConfig, SchedulerConfig
from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.engine.info import (
    Capabilities,
    EngineInfo,
    ModelClass,
    ModelInfo,
    SpecialToken,
    VocabInfo,
    capabilities_of,
)
from pyllama_raw.engine.logs import NO_LOGS, Logs
from pyllama_raw.engine.parts import EngineParts
from pyllama_raw.engine.requests import Admission
from pyllama_raw.engine.watcher import PolicyLog
from pyllama_raw.testing.executor import (
    FakeExecutor,
    FakeFlag,
    NextToken,
    fake_logprobs,
    letters,
)

BOS, EOS = 256, 257


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
        return dict.fromkeys(_CONTROL, True)

    def tokenize(
        self, text: str, *, add_special: bool, parse_special: bool
    ) -> array[int]:
        """One token a byte of UTF-8."""
        tokens = array("i", [BOS] if add_special else [])
        parts = _SPLIT(text) if parse_special else [text]
        for number, part in enumerate(parts):
            tokens.extend([_CONTROL[part]] if number % 2 else part.encode())
        return tokens

    def piece(self, token: int, special: bool = False) -> bytes:
        """The byte of *token*."""
        if token < 256:
            return bytes([token])
        name = {token: name for name, token in _CONTROL.items()}[token]
        return name.encode() if special else b""

    @property
    def pieces(self) -> Sequence[bytes]:
        """All of them."""
        return [self.piece(token) for token in range(self.n_tokens)]


_CONTROL = {"<s>": BOS, "</s>": EOS}
_SPLIT = re.compile("(</?s>)").split  # each second part is a control token


__all__ = [
    "BOS",
    "EOS",
    "FakeExecutor",
    "FakeFlag",
    "FakeVocab",
    "NextToken",
    "fake_engine",
    "fake_limits",
    "fake_logprobs",
    "fake_parts",
    "letters",
]


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
    logs: Logs = NO_LOGS,
    **scheduler_options: Any,
) -> EngineParts:
    """
    Parts of an engine that runs on *executor*.

    Args:
        scheduler_options: arguments of the `Scheduler` by name.
    """
    executor = executor or FakeExecutor(fake_limits())
    vocab = FakeVocab()
    options = {"report": PolicyLog()} | scheduler_options
    scheduler = Scheduler(executor.limits, vocab.pieces, **options)
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
        partial(
            _describe,
            executor.limits,
            limits,
            metadata or {},
            has_template=chat_template is not None,
        ),
        _capabilities(executor.limits, vocab, chat_template),
        metadata=metadata or {},
        logs=logs,
        decoder_start=BOS if executor.limits.n_source else None,
    )


def _capabilities(
    limits: ContextLimits, vocab: FakeVocab, chat_template: str | None
) -> Capabilities:
    info = ModelInfo(
        architecture="t5" if limits.n_source else "fake",
        model_class=ModelClass.ENCODER_DECODER
        if limits.n_source
        else ModelClass.DECODER_ONLY,
        pooling=None,
        is_causal=True,
        n_ctx_train=limits.n_ctx_slot,
        n_vocab=vocab.n_tokens,
        n_embd=1,
        embedding_dimensions=1,
        labels=(),
        n_layer=1,
        n_expert=0,
        n_files=1,
        has_rank_head=False,
        has_chat_template=chat_template is not None,
        decoder_start_token_id=BOS if limits.n_source else None,
    )
    return capabilities_of(info)


def _describe(
    limits: ContextLimits,
    scheduler: SchedulerConfig,
    metadata: Mapping[str, str],
    *,
    has_template: bool,
) -> EngineInfo:
    return EngineInfo(
        model_path="fake.gguf",
        description="fake",
        n_params=0,
        model_bytes=0,
        vocab=VocabInfo(
            n_tokens=FakeVocab.n_tokens,
            bos=SpecialToken(BOS, "<s>"),
            eos=SpecialToken(EOS, "</s>"),
            adds_bos=FakeVocab.add_bos,
            adds_eos=FakeVocab.add_eos,
            fill={},
        ),
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
        can_cut=limits.kind.can_cut,
        kernels={},
        devices=(),
        versions={},
        config=EngineConfig(scheduler=scheduler),
        chat_template="model" if has_template else None,
    )


def fake_engine(executor: FakeExecutor | None = None, **options: Any) -> AsyncEngine:
    """
    An engine on *executor*, to be used as `async with`.

    Args:
        options: as of fake_parts(), such as `logs`, and of the `Scheduler`, such as `policy`, which
            is an instance here; an `EngineConfig` is none of them.
    """
    return AsyncEngine(fake_parts(executor, **options))
