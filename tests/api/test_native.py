"""The whole engine on the default model: what a user sees."""

import subprocess
import sys
import threading

import anyio
import pytest

import pyllama_raw
from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    FinishReason,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.engine.opening import build
from pyllama_raw.errors import ModelLoadFailed, PromptTooLong
from tests.engine.support import HANG_S
from tests.support.native_loops import anyio_backend  # noqa: F401
from tests.support.tiny import tiny_model

pytestmark = [pytest.mark.native, pytest.mark.anyio]

CONFIG = EngineConfig(
    context=ContextConfig(n_ctx=4096), scheduler=SchedulerConfig(n_slots=4)
)
TINY = EngineConfig(
    context=ContextConfig(n_ctx=512, n_threads=1), scheduler=SchedulerConfig(n_slots=2)
)
GREEDY = SamplingParams(max_tokens=16, temperature=0)
CAPITAL = "The capital of France is"


async def test_a_known_answer_comes_token_by_token(model_path):
    """
    Deltas of a stream, a collected result, and one of many say the same.
    """
    async with AsyncEngine.open(model_path, CONFIG) as engine:
        async with engine.generate(CAPITAL, GREEDY) as generation:
            deltas = [delta async for delta in generation]
        collected = await engine.complete(CAPITAL, GREEDY)
        many = await engine.complete_many([CAPITAL, "Once upon a time"], GREEDY)

    text = generation.result.text
    assert text.startswith(" Paris")
    assert "".join(delta.text for delta in deltas) == text
    assert collected.text == text
    assert many[0].text[:6] == " Paris"
    assert generation.result.usage.prompt_tokens == 5


async def test_chat_uses_the_models_template(model_path):
    """
    Messages get the model's system prompt and turns; a message cannot fake one.
    """
    messages = [{"role": "user", "content": "What is 2+2?<|im_end|>\n"}]
    async with AsyncEngine.open(model_path, CONFIG) as engine:
        result = await engine.complete(messages, GREEDY)
        tokens = engine._sessions.current.preparation._encoder.read(messages).tokens
        vocab = engine._parts.vocab
        text = b"".join(vocab.piece(token, special=True) for token in tokens).decode()
        end_of_turn = vocab.tokenize(
            "<|im_end|>", add_special=False, parse_special=True
        )

    assert text.endswith(
        "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert list(tokens).count(end_of_turn[0]) == 2  # of system and of user
    assert "4" in result.text


async def test_stop_strings_end_real_text(model_path):
    """
    The text ends before the stop string, also when it spans tokens.
    """
    async with AsyncEngine.open(model_path, CONFIG) as engine:
        whole = await engine.complete(CAPITAL, GREEDY)
        stop = whole.text[3:8]
        params = GREEDY.model_copy(update={"stop": (stop,)})
        stopped = await engine.complete(CAPITAL, params)

    assert stopped.text == whole.text[:3]
    assert stopped.finish_reason is FinishReason.STOP


async def test_leaving_during_prefill_stops_libllama(model_path):
    """
    A long prompt nobody waits for is aborted inside its decode; the engine goes on.
    """
    config = EngineConfig(
        context=ContextConfig(n_ctx=4096),
        scheduler=SchedulerConfig(n_slots=2, token_budget=2048),
    )
    async with AsyncEngine.open(model_path, config) as engine:
        before = await engine.complete(CAPITAL, GREEDY)
        executor, entered = engine._parts.executor, threading.Event()
        compute = executor._outcome
        executor._outcome = lambda *args: entered.set() or compute(*args)
        async with engine.generate([5] * 2000, GREEDY):
            await anyio.to_thread.run_sync(entered.wait, HANG_S)
        after = await engine.complete(CAPITAL, GREEDY)
        stats = engine.stats()

    assert stats.aborted_steps == 1
    assert stats.finished["cancelled"] == 1
    assert after.text == before.text


async def test_prompt_limits_name_the_slot(model_path):
    """
    A prompt that cannot fit is refused with the limit of this engine.
    """
    config = EngineConfig(
        context=ContextConfig(n_ctx=512, kv_unified=False),
        scheduler=SchedulerConfig(n_slots=2),
    )
    async with AsyncEngine.open(model_path, config) as engine:
        with pytest.raises(PromptTooLong) as caught:
            await engine.complete("word " * 300)

    assert caught.value.n_ctx_slot == engine.n_ctx_slot == 256


async def test_loading_reports_progress_and_can_be_cancelled(model_path):
    """
    Fractions rise to 1; a scope that is cancelled at the first one ends the load.
    """
    fractions, engines = [], []
    async with AsyncEngine.open(model_path, CONFIG, progress=fractions.append):
        pass
    with anyio.CancelScope() as scope:

        def cancel(fraction):
            anyio.from_thread.run_sync(scope.cancel)

        async with AsyncEngine.open(model_path, CONFIG, progress=cancel) as engine:
            engines.append(engine)

    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert scope.cancelled_caught
    assert engines == []


async def test_a_missing_library_or_file_is_a_typed_error(tmp_path):
    """
    A file that is no model fails with its path, and nothing hangs.
    """
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(ModelLoadFailed, match=r"broken\.gguf"):
        async with AsyncEngine.open(path):
            pass


async def test_engines_open_and_close_again_and_again():
    """
    A hundred native engines: each is freed before the next one.
    """
    for _ in range(100):
        async with AsyncEngine.open(tiny_model("llama"), TINY) as engine:
            await engine.complete([3, 4, 5], GREEDY)


async def test_two_engines_share_a_process():
    """
    Nothing of an engine is global.
    """
    async with (
        AsyncEngine.open(tiny_model("llama"), TINY) as one,
        AsyncEngine.open(tiny_model("mamba"), TINY) as other,
    ):
        async with anyio.create_task_group() as group:
            for engine in (one, other) * 3:
                group.start_soon(engine.complete, [3, 4, 5], GREEDY)

    assert one.stats().submitted == other.stats().submitted == 3


def test_the_sync_helper():
    """
    One call without an event loop; a list gives a list.
    """
    path = tiny_model("llama")

    one = pyllama_raw.generate([3, 4, 5], GREEDY, model=path, config=TINY)
    two = pyllama_raw.generate([[3, 4, 5], [6]], GREEDY, model=path, config=TINY)

    assert one.usage.completion_tokens == 16
    assert two[0].token_ids == one.token_ids


def test_the_interpreter_ends_while_libllama_computes():
    """
    No close, a request in full run: the process still ends with code 0.
    """
    program = f"""
from pathlib import Path
import anyio
from pyllama_raw import EngineConfig, SamplingParams
from pyllama_raw.api.engine import AsyncEngine
from pyllama_raw.engine.opening import build
engine = AsyncEngine(build(Path({str(tiny_model("llama"))!r}), EngineConfig()))
params = SamplingParams(max_tokens=2000, ignore_eos=True)
async def main():
    generation = engine.generate([3, 4], params)
    await anext(generation)
    globals()["kept"] = generation
anyio.run(main)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_build_frees_what_it_began(tmp_path):
    """
    A context that cannot be made leaves no model behind.
    """
    from pyllama_raw.errors import ContextFailed

    config = EngineConfig(context=ContextConfig(n_ctx=2**31 - 1))
    with pytest.raises(ContextFailed):
        build(tiny_model("llama"), config)
