"""Where the life of an engine meets limits of waiting, leases, memory that is fitted, and replies."""

from array import array
from pathlib import Path

import anyio
import pytest

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.api.model import Opener
from pyllama_raw.engine import estimate as fit
from pyllama_raw.engine import shared_models
from pyllama_raw.engine import shared_models as leases
from pyllama_raw.engine.estimate import estimate
from pyllama_raw.engine.info import Pooling
from pyllama_raw.errors import LeaseRefused, Unsupported, WaitedTooLong
from pyllama_raw.native.libllama import Device
from pyllama_raw.options.config import LeaseConfig
from tests.support.limits import LIMIT_S
from tests.support.loops import anyio_backend  # noqa: F401
from tests.support.replying import TOOL, reply_engine, reply_parts
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.anyio
HANG_S = LIMIT_S
CONFIG = EngineConfig(
    context=ContextConfig(n_ctx=1024, n_batch=64, n_ubatch=64, n_threads=1),
    scheduler=SchedulerConfig(n_slots=1),
)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPT = "once upon a time there was a llama that waited"
GPU = Device("CUDA0", "a GPU", "gpu", 2**31, 2**32, "0000:01:00.0")


def opened(config: EngineConfig = CONFIG, name: str = "llama"):
    return AsyncEngine.open(tiny_model(name), config)


# -- limits of waiting -------------------------------------------------------------


@pytest.mark.native
@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleep_counts_as_waiting(level):
    """
    Whoever waits longer than it wants to ends while the engine sleeps, and is told why.
    """
    with anyio.fail_after(HANG_S):
        async with opened() as engine:
            await engine.sleep(level)
            with pytest.raises(WaitedTooLong) as text:
                await engine.complete(PROMPT, GREEDY, max_wait_s=0.02, deadline_s=99.0)
            with pytest.raises(WaitedTooLong) as vectors:
                await engine.embed(["a"], pooling="mean", max_wait_s=0.02)
            state = engine.state
            await engine.wake()
            result = await engine.complete(PROMPT, GREEDY, max_wait_s=HANG_S)

    for caught in (text, vectors):
        assert (caught.value.knob, caught.value.limit) == ("max_wait_s", 0.02)
    assert (state, len(result.token_ids)) == ("sleeping", 8)


@pytest.mark.native
@pytest.mark.parametrize("level", [1, 2])
async def test_the_wait_for_an_engine_that_sleeps_is_in_the_timings(level):
    """
    So limits of waiting count from when the caller came, and not from when the engine woke.
    """
    results = []
    with anyio.fail_after(HANG_S):
        async with opened() as engine, anyio.create_task_group() as group:
            await engine.sleep(level)

            async def ask():
                results.append(await engine.complete(PROMPT, GREEDY))

            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            clock = engine._thread.clock
            came = clock()
            async with opened(name="qwen2") as other:  # which takes its time
                await other.complete(PROMPT, GREEDY)
            slept_s = clock() - came
            await engine.wake()

    assert results[0].timings.queue_s > slept_s


@pytest.mark.native
async def test_a_deadline_of_vectors_counts_from_when_the_caller_came():
    """
    Whoever has waited 90 s of 99 for an engine has the rest for its texts.
    """
    async with opened(name="bert") as engine:
        embedder, clock = engine._sessions.current.embedder, engine._thread.clock
        texts, options = [array("i", [5, 6])], {"deadline_s": 99.0}
        before = clock()
        late = embedder.after(90.0)._request(texts, "texts", Pooling.MEAN, options)
        after = clock()

    assert late.deadline is not None
    assert before + 9.0 <= late.deadline <= after + 9.0


# -- leases and memory -------------------------------------------------------------


@pytest.fixture
def leased(tmp_path, monkeypatch) -> tuple[Path, EngineConfig]:
    """The directory of slots of a machine with a GPU, and options that take one."""
    monkeypatch.setattr(leases, "devices", lambda: (GPU,))
    lease = LeaseConfig(margin_bytes=0, directory=tmp_path)
    config = CONFIG.model_copy(update={"model": ModelConfig(lease=lease)})
    return tmp_path, config


def slots(directory: Path) -> int:
    return len(list(directory.iterdir()))


@pytest.mark.native
async def test_a_reload_of_other_weights_needs_a_slot_of_its_own(leased):
    """
    Equal weights are shared with their slot. Others are refused, unless a sleep has given it back.
    """
    directory, config = leased
    held = []
    with anyio.fail_after(HANG_S):
        async with opened(config) as engine:
            await engine.reload()
            held.append(slots(directory))
            with pytest.raises(LeaseRefused):
                await engine.reload(tiny_model("qwen2"))
            first = await engine.complete(PROMPT, GREEDY)
            held.append(slots(directory))
            await engine.sleep(2)
            held.append(slots(directory))
            await engine.reload(tiny_model("qwen2"))
            other = await engine.complete(PROMPT, GREEDY)
            held.append(slots(directory))
            n_weights = len(shared_models._models)

    assert held == [1, 1, 0, 1]
    assert (slots(directory), n_weights) == (0, 1)
    assert len(first.token_ids) == len(other.token_ids) == 8


@pytest.mark.native
async def test_a_slot_that_others_have_taken_meanwhile_delays_the_wake(leased):
    """
    At level 1 the weights stay, and so does the slot. After level 2 the engine sleeps on, and
    wakes later with what it had cached.
    """
    directory, config = leased
    with anyio.fail_after(HANG_S):
        async with opened(config) as engine:
            await engine.complete(PROMPT, GREEDY)
            await engine.sleep(1)
            n_held = slots(directory)
            await engine.wake()
            await engine.sleep(2)
            options = config.model.opening
            taken = leases.take_lease(options)
            with pytest.raises(LeaseRefused):
                await engine.wake()
            state = engine.state
            taken.release()
            await engine.wake()
            result = await engine.complete(PROMPT, GREEDY)

    assert (n_held, state) == (1, "sleeping")
    assert result.usage.cached_tokens > 0


@pytest.mark.native
async def test_memory_is_fitted_again_by_each_reload(monkeypatch):
    """
    The new engine has what is free beside the old one; a wake with equal room keeps the cache.
    """
    path = tiny_model("llama")
    context = CONFIG.context.model_copy(update={"n_ctx": 4096})
    config = CONFIG.model_copy(update={"fit_ctx": 256, "context": context})

    def n_ctx(engine):
        return engine.info.config.context.n_ctx

    def with_n_ctx(n: int) -> EngineConfig:
        fewer = context.model_copy(update={"n_ctx": n})
        return config.model_copy(update={"context": fewer})

    found = []
    with anyio.fail_after(HANG_S):
        async with opened(config) as engine:
            found.append(n_ctx(engine))
            room = {"CPU": estimate(path, with_n_ctx(1024)).total_bytes}
            monkeypatch.setattr(fit, "_free", lambda _: room)
            await engine.reload()
            found.append(n_ctx(engine))
            await engine.complete(PROMPT, GREEDY)
            await engine.sleep(2)
            await engine.wake()
            found.append(n_ctx(engine))
            result = await engine.complete(PROMPT, GREEDY)

    assert found == [4096, 1024, 1024]
    assert result.usage.cached_tokens > 0


# -- replies and operations ---------------------------------------------------------

PLAIN = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant{{ "\n" }}"""
CHAT = [{"role": "user", "content": "Rain?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


async def test_replies_are_taken_apart_by_the_template_of_their_model(monkeypatch):
    """
    One that has begun keeps the form of the old one; `special` has names of each.
    """
    monkeypatch.setattr(
        Opener, "parts", lambda *_, **__: reply_parts("no tools", template=PLAIN)
    )
    params = SamplingParams(max_tokens=200)
    async with reply_engine(CALL) as engine:
        async with engine.generate(CHAT, params, tools=[TOOL]) as begun:
            await engine.reload("other.gguf")
            old = await begun.collect()
        new = await engine.complete(CHAT, params, reply=True)
        special = SamplingParams(max_tokens=200, special=True)
        shown = await engine.complete(CHAT, special)
        with pytest.raises(Unsupported, match="tools"):
            await engine.complete(CHAT, params, tools=[TOOL])

    assert [call.name for call in old.tool_calls] == ["weather"]
    assert (new.text, new.tool_calls) == ("no tools", ())
    assert shown.text.startswith("no tools")


@pytest.mark.native
async def test_what_the_new_model_cannot_do_is_refused_by_name():
    """
    Also for a generation that was asked for before the reload, and has not begun.
    """
    with anyio.fail_after(HANG_S):
        async with opened() as engine:
            generation = engine.generate(PROMPT, GREEDY)
            await engine.reload(tiny_model("bert"))
            with pytest.raises(Unsupported, match="encoder"):
                async with generation:
                    pass
            n_vectors = len(await engine.embed(["a"]))

    assert n_vectors == 1
