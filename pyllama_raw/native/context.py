"""
A context: it computes batches, in the thread that computes, until its abort flag is set.

One thread computes for the contexts of all engines of a process. Two that compute slow each
other where there are few CPUs, also while one of them is idle (`_ffi/step/runner.h` says why).

A lane is a chain that a context runs in its graph, one a slot. libllama takes a chain once in its
life and aborts on the second time; so each is spent before any is handed over.
"""

from __future__ import annotations

import os
import weakref
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

from pyllama_raw.errors import ContextFailed, InvalidBatch, InvalidRequest, NativeError
from pyllama_raw.native import libllama
from pyllama_raw.native.batch import Batch, RowBatch
from pyllama_raw.native.kernels import Deterministic, Kernels, Watch
from pyllama_raw.native.libllama import (
    FLOAT32,
    INT32,
    Array,
    Handle,
    check_decode,
    devices,
    ffi,
    last_error,
    lib,
    pointer,
    zeros,
)
from pyllama_raw.native.memory import SlotMemory, check_memory
from pyllama_raw.native.model import Adapter, ControlVector, Lora, Model
from pyllama_raw.native.params import check_threads, context_params
from pyllama_raw.native.sampler import RowSamplers, RowScores, SamplerChain, check_top


class StepOutcome(NamedTuple):
    """
    The outcome of one call. With a code other than 0 nothing was sampled.

    codes[i] is 0, or EXCEPTION for a row whose sampler failed; its token is -1.
    """

    code: int  # of llama_decode, see DECODE_ERRORS
    tokens: list[int]  # one a row
    codes: list[int]  # one a row; empty if none has failed
    decode_ns: int
    sample_ns: int
    cpu_ns: int = 0  # of decode_ns, when the thread had a CPU; 0: a GPU computes


class Context(SlotMemory):
    """
    One llama_context. At most n_outputs_max output rows a batch.

    Args:
        n_seq_max: number of slots.
        abort: stops a decode while it is set; kept alive by the context.
        lanes: lanes[i] runs in the graph for slot i, see set_lanes().
        fast_kernels: our own kernels, where they are usable.
        deterministic: products do not depend on what is computed beside, on x86-64 CPUs;
            "fast": nor does all else, with sums of our kernels (see Kernels.stray).
        watch: notes whose kernels compute, for many contexts; kept alive by the context.
        fields: all others of ContextConfig, all optional; n_ctx and n_threads as numbers.

    Raises:
        ConfigError: a field is out of range.
        ContextFailed: it would not fit the memory, or libllama refused the options.

    Thread:
        One at a time.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_seq_max: int,
        abort: AbortFlag | None = None,
        lanes: Sequence[SamplerChain] = (),
        fast_kernels: bool = True,
        deterministic: Deterministic = False,
        watch: Watch | None = None,
        **fields: Any,
    ) -> None:
        model_ptr = model.ptr
        params = context_params(fields, n_seq_max=n_seq_max)
        # A pooling that the file of such a model states would change its outputs.
        if model.reads_sources:
            params.pooling_type = lib.LLAMA_POOLING_TYPE_NONE
        check_memory(model, params)
        # What C reads later is kept alive by *parents*: lanes, flag, kernels, watch, thread.
        configs = seq_configs(lanes, n_seq_max)
        params.samplers, params.n_samplers = configs, len(lanes)
        parents: list[Handle] = [model, *lanes]
        if abort is not None:
            lib.plr_flag_attach(params, abort.ptr)
            parents.append(abort)  # C reads the flag
        # Other attention reads no cells, or those of several caches.
        has_others = model.n_swa or model.is_recurrent or model.is_hybrid
        one_cache = not (has_others or model.reads_sources)
        self.kernels = Kernels.attached(
            params,
            fast=fast_kernels,
            follows=bool(params.kv_unified) and one_cache,
            deterministic=deterministic,
        )
        if self.kernels is not None:
            # Before the model, because they know its weights by their addresses, and the next
            # model may lie where this one did.
            parents.insert(0, self.kernels)
        # After our kernels, because it notes which nodes they have taken.
        if watch is not None:
            watch.attach(params)
            parents.append(watch)
        self._has_gpu = has_gpu()
        # Others share the thread as long as somebody holds it.
        self._thread = compute_thread()
        parents.append(self._thread)
        since = libllama.mark()
        pointer = lib.plr_context_new(model_ptr, params)
        if pointer == ffi.NULL:
            raise ContextFailed("llama_init_from_model", None, libllama.reason(since))
        # The runner hands steps of this context to the thread. Nobody else owns the context yet.
        runner = lib.plr_runner_new(self._thread.ptr)
        if runner == ffi.NULL:
            lib.llama_free(pointer)
            raise ContextFailed("plr_runner_new", None, last_error())
        super().__init__(pointer, partial(_free, runner, self.kernels), parents=parents)
        self.model = model
        self.has_recurrent_state = model.is_recurrent or model.is_hybrid
        self.has_lanes = bool(lanes)
        self.abort = abort  # the flag that its decodes poll
        self._runner = runner
        self._read_back(params)
        # One step writes its outcome to these, so none is allocated in a step.
        self._tokens = array("i", bytes(4 * self.n_outputs_max))
        self._codes = array("i", bytes(4 * self.n_outputs_max))
        self._tokens_ptr = ffi.from_buffer("llama_token[]", self._tokens)
        self._codes_ptr = ffi.from_buffer("int32_t[]", self._codes)
        self._times = array("q", [0, 0, 0, 0])  # plr_times
        self._times_ptr = ffi.from_buffer("plr_times *", self._times)
        self._plr_step = lib.plr_step
        self._hidden = bytearray()
        self.hidden_bytes = 4 * model.n_embd_out  # of the hidden state of a token

    def _read_back(self, params: Any) -> None:
        """Read the options as libllama has them: padded, capped, rounded."""
        ptr = self.ptr
        self.n_ctx = int(lib.llama_n_ctx(ptr))  # KV cells of all slots
        self.n_ctx_seq = int(lib.llama_n_ctx_seq(ptr))  # most tokens of one slot
        self.n_batch = int(lib.llama_n_batch(ptr))
        self.n_ubatch = int(lib.llama_n_ubatch(ptr))
        self.n_seq_max = int(lib.llama_n_seq_max(ptr))
        self.n_outputs_max = int(params.n_outputs_max)
        self.kv_unified = bool(params.kv_unified)
        causal = self.has_memory and self._is_causal()
        # Without causal attention a batch is computed as a whole.
        self.max_tokens = self.n_batch if causal else self.n_ubatch
        self._n_vocab = self.model.n_vocab

    def _is_causal(self) -> bool:
        """Whether a token sees only those before it."""
        if hasattr(lib, "llama_get_causal_attn"):
            return bool(lib.llama_get_causal_attn(self.ptr))
        # llama.cpp before 0.5 does not tell, and has it from the architecture or the file.
        meta = self.model.meta
        key = f"{meta.get('general.architecture')}.attention.causal"
        is_diffusion = lib.llama_model_is_diffusion(self.model.ptr)
        return meta.get(key) != "false" and not is_diffusion

    def step(
        self,
        batch: Batch | RowBatch,
        samplers: RowSamplers,
        *,
        ahead: bool = False,
    ) -> StepOutcome:
        """
        Compute *batch* and sample its rows, in one C call without the GIL.

        A batch of nothing but sampled rows is advanced: it then holds the sampled tokens
        at their next positions. With *ahead* every batch is advanced, and its tokens
        without a row are gone. A batch with a row that failed, or with drafts, is never
        advanced. A row whose token is a draft of something else than the row before gave is
        not sampled: its token is -1 and its code 0. It is for the caller to cut.

        Args:
            samplers: samplers[i] is for batch.rows[i].
            ahead: compute the advanced batch when no other context waits. The next call is
                then a step of this batch, unchanged, or drop(), before anything else is
                done with the context. Not for rows of embeddings.

        Raises:
            InvalidBatch: more tokens or output rows than the context takes; nothing ran.
                All else comes back as a code.
        """
        n_rows = batch.n_rows
        if n_rows > samplers.capacity:
            text = f"{n_rows} rows to sample, {samplers.capacity} samplers"
            raise InvalidBatch("llama_decode", None, text)
        code = self._call(batch, n_rows, samplers.ptr, ahead)
        # With another code nothing was sampled. Codes of rows are read if one is not 0.
        decode_ns, cpu_ns, sample_ns, n_failed = self._times
        tokens = self._tokens[:n_rows].tolist() if code == 0 else []
        codes = self._codes[:n_rows].tolist() if n_failed else []
        # C has made the batch of the next step; Python counts its rows likewise.
        if ahead and code == 0 and n_rows and not codes:
            assert isinstance(batch, Batch)
            batch.keep_rows()
        used_ns = 0 if self._has_gpu else cpu_ns
        return StepOutcome(code, tokens, codes, decode_ns, sample_ns, used_ns)

    def _call(
        self, batch: Batch | RowBatch, n_rows: int, samplers: Any, ahead: bool
    ) -> int:
        # Rows that see each other are computed in one micro-batch.
        limit = self.max_tokens if batch.is_causal else self.n_ubatch
        if not 0 < batch.n_tokens <= limit or batch.n_outputs > self.n_outputs_max:
            raise self._refusal(batch, limit)
        if batch.is_causal:
            return self._run(batch, n_rows, samplers, ahead)
        # Causality is a switch of the context, for as long as this batch takes.
        lib.llama_set_causal_attn(self.ptr, False)
        try:
            return self._run(batch, n_rows, samplers, ahead)
        finally:
            lib.llama_set_causal_attn(self.ptr, True)

    def _run(
        self, batch: Batch | RowBatch, n_rows: int, samplers: Any, ahead: bool
    ) -> int:
        return int(
            self._plr_step(
                self._runner, self.ptr, batch.raw, n_rows, batch.rows_ptr,
                batch.drafts_ptr, samplers, self._tokens_ptr, self._codes_ptr, self._times_ptr, ahead,
            )
        )  # fmt: skip

    def read_sources(self, batch: Batch) -> StepOutcome:
        """
        Have the encoder of an encoder-decoder model read *batch*, all of it at once.

        Each token of it has an output row, as add_scored() makes them, or libllama warns.
        Decodes of a slot then see its tokens of the last such batch; a slot without any there
        must not be decoded: it and its neighbours would get no numbers. A slot begins behind
        the last position that it holds, which is left as it is. Not while a step is begun
        ahead.

        Raises:
            InvalidBatch: more tokens than one graph takes; nothing ran. All else comes back as
                a code; decodes then see what they saw before.
        """
        if not self.model.reads_sources:
            raise InvalidBatch("llama_encode", None, "the model reads no sources")
        if not 0 < batch.n_tokens <= self.n_ubatch:
            text = (
                f"{batch.n_tokens} tokens, 1 to {self.n_ubatch} are allowed (n_ubatch)"
            )
            raise InvalidBatch("llama_encode", None, text)
        code = int(
            lib.plr_read_sources(self._runner, self.ptr, batch.raw, self._times_ptr)
        )
        decode_ns, cpu_ns, _, _ = self._times
        return StepOutcome(code, [], [], decode_ns, 0, 0 if self._has_gpu else cpu_ns)

    def keep_hidden(self, *, of_rows: bool) -> None:
        """
        Have hidden() give the hidden states of each batch from now on; a model with heads only.

        Args:
            of_rows: those of rows that are sampled; else of all tokens, which takes memory, and
                of some architectures time.

        Raises:
            NativeError: libllama threw.
        """
        n_most = self.n_outputs_max if of_rows else self.max_tokens
        self._hidden = bytearray(n_most * self.hidden_bytes)
        hidden = ffi.from_buffer("float[]", self._hidden)
        # The runner writes there until it is freed, and the buffer must not move or go.
        self._hidden_c = hidden
        code = lib.plr_keep_hidden(self._runner, self.ptr, hidden, of_rows)
        if code:
            raise NativeError("llama_set_embeddings_nextn", code, last_error())

    def hidden(self, start: int, stop: int) -> bytes:
        """Hidden states of places [start, stop) of the last batch, or of its rows."""
        size = self.hidden_bytes
        return bytes(memoryview(self._hidden)[start * size : stop * size])

    def set_lanes(self, lanes: Sequence[SamplerChain]) -> None:
        """
        Let lanes[i] run in the graph for slot i, and nothing for the other slots.

        Of the rows of such a slot only candidates leave the device: score() refuses
        them, and step() samples them with a RowSampler that has n_first. The next
        decode prepares all graphs anew. Not while a step is begun ahead.

        Args:
            lanes: at most n_seq_max, each a top-k, used for the first time; kept alive.

        Raises:
            InvalidRequest: too many, or one was a lane before.
            NativeError: libllama threw; the context cannot be used any more.
        """
        # Lanes of before stay alive, because graphs that are prepared may still have them.
        ptr = self.ptr
        chains = pointers_of(lanes, self.n_seq_max)
        for lane in lanes:
            self.keep(lane)
        code = lib.plr_set_lanes(ptr, self.n_seq_max, chains)
        if code:
            raise NativeError("llama_set_sampler", code, last_error())
        self.has_lanes = bool(lanes)

    def set_adapters(self, adapters: Sequence[tuple[Adapter, float]]) -> None:
        """
        Compute with *adapters*, each at its scale, and with no others.

        The next decode prepares all graphs anew. Not while a step is begun ahead. What is set
        must not be closed.

        Raises:
            NativeError: libllama threw; the context cannot be used any more.
        """
        # libllama takes LoRAs one by one, and one direction for each layer.
        loras = [
            (adapter.ptr, scale)
            for adapter, scale in adapters
            if isinstance(adapter, Lora)
        ]
        vectors = [(v, scale) for v, scale in adapters if isinstance(v, ControlVector)]
        directions = ffi.NULL
        if vectors:
            directions = pointer(_sum(vectors), FLOAT32)
        code = lib.plr_set_adapters(
            self.ptr,
            len(loras),
            ffi.new("struct llama_adapter_lora *[]", [adapter for adapter, _ in loras]),
            ffi.new("float[]", [scale for _, scale in loras]),
            directions,
            self.model.n_layer,
            self.model.n_embd,
        )
        if code:
            raise NativeError("llama_set_adapters_lora", code, last_error())

    def drop(self) -> bool:
        """
        Stop what step() has queued ahead, and wait for it; False if it had not begun.

        If it had, the slots of the batch may hold their tokens of that step.
        """
        assert self.ptr
        return bool(
            lib.plr_drop(self._runner, self.abort.ptr if self.abort else ffi.NULL)
        )

    def decode(self, batch: Batch | RowBatch) -> None:
        """
        Compute *batch*.

        Raises:
            NoKVSpace, InvalidBatch: memory is unchanged.
            DecodeAborted, DecodeFailed: some micro-batches may be applied.
        """
        code = self._call(batch, 0, ffi.NULL, False)
        check_decode(code, last_error())

    def vector(self, slot: int) -> bytes:
        """
        The floats of *slot*, whose last token was in the last batch: scores, or a vector.

        Only with a pooling, other than "none".
        """
        vector = ffi.NULL
        if 0 <= slot < self.n_seq_max:
            vector = lib.llama_get_embeddings_seq(self.ptr, slot)
        if vector == ffi.NULL:
            raise InvalidRequest("slot", slot, "a slot of the last batch")
        # A ranking model gives scores in place of a vector.
        is_rank = lib.llama_pooling_type(self.ptr) == lib.LLAMA_POOLING_TYPE_RANK
        model = self.model
        n_values = model.n_cls_out if is_rank else model.n_embd_out
        return bytes(ffi.buffer(vector, 4 * n_values))

    def token_vectors(self, start: int, stop: int) -> bytes:
        """The floats of places [start, stop) of the last batch; only with pooling "none"."""
        size = 4 * self.model.n_embd_out
        parts = []
        for row in range(start, stop):
            vector = lib.llama_get_embeddings_ith(self.ptr, row)
            if vector == ffi.NULL:
                raise InvalidRequest("row", row, "a row of the last batch")
            parts.append(bytes(ffi.buffer(vector, size)))
        return b"".join(parts)

    def logits(self, row: int) -> array[float]:
        """
        The output row at place *row* of the last batch; with a lane its candidates', sorted.

        Raises:
            InvalidRequest: the last batch has no output there.
        """
        logits = ffi.NULL
        if 0 <= row < self.max_tokens:
            # A lane leaves some candidates on the host, in no order.
            if lib.llama_get_sampled_candidates_count_ith(self.ptr, row):
                n_values = int(lib.llama_get_sampled_logits_count_ith(self.ptr, row))
                candidates = lib.llama_get_sampled_logits_ith(self.ptr, row)
                return array("f", sorted(ffi.unpack(candidates, n_values)))
            logits = lib.llama_get_logits_ith(self.ptr, row)
        if logits == ffi.NULL:
            raise InvalidRequest("row", row, "a row of the last batch with output")
        return array("f", bytes(ffi.buffer(logits, 4 * self._n_vocab)))

    def score(self, rows: Array, tokens: Array, n_top: int) -> RowScores:
        """
        Log-probabilities of tokens[i] in the row at place rows[i] of the last batch.

        Args:
            rows, tokens: int32; output rows that were not sampled: those are changed.

        Raises:
            InvalidRequest: one is no output row, or n_top is too large.
        """
        check_top(n_top)
        n_rows = len(rows)
        logprobs = zeros(FLOAT32, n_rows)
        ids, values = zeros(INT32, n_rows * n_top), zeros(FLOAT32, n_rows * n_top)
        code = lib.plr_score(
            self.ptr, n_rows, pointer(rows, INT32),
            pointer(tokens, INT32, min_size=n_rows), n_top,
            pointer(logprobs, FLOAT32, writable=True),
            pointer(ids, INT32, writable=True),
            pointer(values, FLOAT32, writable=True),
        )  # fmt: skip
        if code:
            raise InvalidRequest("rows", rows.tolist(), "rows of the last batch")
        return RowScores(logprobs, ids, values)

    def set_threads(self, n_threads: int, n_threads_batch: int) -> None:
        """Threads for one-token batches, and for all others. Takes effect at once."""
        lib.llama_set_n_threads(
            self.ptr,
            check_threads("n_threads", n_threads),
            check_threads("n_threads_batch", n_threads_batch),
        )

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """
        Compute in the thread that decodes, and in no other.

        There a failed assertion of libllama is an exception of the call; in a thread of
        libllama's own it ends the process.
        """
        # The numbers go back whatever the block raises.
        before = lib.llama_n_threads(self.ptr), lib.llama_n_threads_batch(self.ptr)
        self.set_threads(1, 1)
        try:
            yield
        finally:
            self.set_threads(*before)

    def _refusal(self, batch: Batch | RowBatch, limit: int) -> InvalidBatch:
        if not 0 < batch.n_tokens <= limit:
            name = "n_batch" if batch.is_causal else "n_ubatch"
            text = f"{batch.n_tokens} tokens, 1 to {limit} are allowed ({name})"
        else:
            limit_text = f"{self.n_outputs_max} are allowed (n_outputs_max)"
            text = f"{batch.n_outputs} output rows, at most {limit_text}"
        return InvalidBatch("llama_decode", None, text)


def _sum(vectors: list[tuple[ControlVector, float]]) -> array[float]:
    import numpy as np

    scaled = [np.frombuffer(v.values, np.float32) * scale for v, scale in vectors]
    return array("f", np.sum(scaled, axis=0, dtype=np.float32).tobytes())


def _free(runner: Any, kernels: Kernels | None, pointer: Any) -> None:
    lib.plr_runner_free(runner)
    lib.llama_free(pointer)
    if kernels is not None:  # freed when this context is counted out
        kernels.close()


def seq_configs(lanes: Sequence[SamplerChain], n_seq_max: int) -> Any:
    """llama_sampler_seq_config[len(lanes)]: lanes[i] is for slot i."""
    pointers = _spend(lanes, n_seq_max)
    return ffi.new("struct llama_sampler_seq_config[]", list(enumerate(pointers)))


def pointers_of(lanes: Sequence[SamplerChain], n_seq_max: int) -> Any:
    """llama_sampler *[n_seq_max], NULL where there is no lane."""
    pointers = _spend(lanes, n_seq_max)
    empty = [ffi.NULL] * (n_seq_max - len(pointers))
    return ffi.new("struct llama_sampler *[]", [*pointers, *empty])


def _spend(lanes: Sequence[SamplerChain], n_seq_max: int) -> list[Any]:
    # Checked before any is spent, since a chain that was spent is of no use.
    if len(lanes) > n_seq_max:
        raise InvalidRequest("lanes", len(lanes), f"at most {n_seq_max} (n_seq_max)")
    return [lane.spend() for lane in lanes]


class AbortFlag(Handle):
    """
    While it is set, a decode of the contexts made with it stops at the next graph node.

    Thread:
        Any. The engine thread clears it before the next step.
    """

    def __init__(self) -> None:
        super().__init__(lib.plr_flag_new(), lib.plr_flag_free)

    def set(self) -> None:
        lib.plr_flag_set(self.ptr, True)

    def clear(self) -> None:
        lib.plr_flag_set(self.ptr, False)


class ComputeThread(Handle):
    """
    Computes the steps of its contexts, in turn; they keep it alive.

    Raises:
        ContextFailed: the system gives no thread.
    """

    def __init__(self) -> None:
        pointer = lib.plr_thread_new()
        if pointer == ffi.NULL:
            raise ContextFailed("plr_thread_new", None, last_error())
        super().__init__(pointer, lib.plr_thread_free)
        self.pid = os.getpid()  # see compute_thread()


_lock = Lock()
_shared: weakref.ref[ComputeThread] | None = None


def has_gpu() -> bool:
    """Whether a thread that computes mostly waits for a GPU."""
    return any(device.kind in ("gpu", "igpu") for device in devices())


def compute_thread() -> ComputeThread:
    """
    The one of this process, made anew if no context uses it.

    Where there is a GPU each context gets a thread of its own, which mostly waits for it.
    """
    global _shared  # noqa: PLW0603 - one a process
    # A thread that waits for a GPU slows nobody, and would keep other contexts waiting.
    if has_gpu():
        return ComputeThread()
    with _lock:
        # It lives as long as a context holds it. A fork has the object and not the thread.
        thread = _shared() if _shared is not None else None
        if thread is None or thread.pid != os.getpid():
            thread = ComputeThread()
            _shared = weakref.ref(thread)
        return thread
