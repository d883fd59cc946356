"""Files of slots, on real models: another engine goes on from what one has computed."""

import json
import os
import shutil
from contextlib import suppress
from fcntl import LOCK_EX, flock
from functools import partial
from pathlib import Path

import anyio
import pytest

from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.api.slot_files import MAGIC, sweep_parts
from pyllama_raw.engine.state_files import digest_of, make_key, no_pause
from pyllama_raw.errors import InvalidRequest, SnapshotFailed, Unsupported, WrongUse
from tests.support.limits import LIMIT_S
from tests.support.native_loops import anyio_backend  # noqa: F401
from tests.support.tiny import tiny_model

pytestmark = [pytest.mark.native, pytest.mark.anyio]
PROMPT = "Once upon a time there was a fox " * 4
GREEDY = SamplingParams(max_tokens=8, temperature=0)
SAME = pytest.mark.parametrize(
    ("model", "unified"),
    [("llama", True), ("llama", False), ("gemma3", True), ("mamba", True)],
)


def opened(model="llama", cache=None, **context):
    fields = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1} | context
    config = EngineConfig(
        context=ContextConfig(**fields),
        scheduler=SchedulerConfig(n_slots=2),
        cache=cache or CacheConfig(),
    )
    return AsyncEngine.open(tiny_model(model), config)


@SAME
async def test_an_engine_goes_on_from_the_file_of_another_one(model, unified, tmp_path):
    """
    The next turn computes what is new, and gives what the first engine gives.
    """
    file, open_one = tmp_path / "slot", partial(opened, model, kv_unified=unified)
    with anyio.fail_after(LIMIT_S):
        async with open_one() as engine:
            first = await engine.complete(PROMPT, GREEDY)
            saved = await engine.save_slot(0, file)
            ids = await engine.tokenize(PROMPT)
            turn = [*ids, *first.token_ids, *ids[1:9]]
            expected = await engine.complete(turn, GREEDY)
        async with open_one() as engine:
            restored = await engine.restore_slot(1, file)
            result = await engine.complete(turn, GREEDY)

    n_bytes = file.stat().st_size
    assert (saved.slot, saved.n_bytes, restored.n_bytes) == (0, n_bytes, n_bytes)
    assert (restored.slot, restored.n_tokens) == (1, saved.n_tokens)
    assert result.usage.cached_tokens == expected.usage.cached_tokens > len(ids)
    assert result.token_ids == expected.token_ids


async def test_a_file_of_something_else_is_refused(tmp_path):
    """
    Of another model, of other options, cut off, changed, or no such file at all; the engine goes on.

    A file of any size takes no more memory than a slot, and a folder no descriptor.
    """
    file = tmp_path / "slot"
    with anyio.fail_after(LIMIT_S):
        async with opened() as engine:
            await engine.complete(PROMPT, GREEDY)
            saved = await engine.save_slot(0, file)
        content = file.read_bytes()
        head, middle = content.index(b"]\n"), len(content) // 2
        broken = {
            "cut": content[:-1],
            "longer": content + b"x",
            "changed": content[:middle]
            + bytes([content[middle] ^ 1])
            + content[middle + 1 :],
            "head": content[:head],
            "huge": content.replace(b", 96, ", b", 9999999999, "),
            "negative": content.replace(b", 96, ", b", -9, "),
            "words": content.replace(b", 96, ", b', "x", '),
            "nested": content[:19] + b"[" * 4000,
            "empty": b"",
        }
        for name, changed in broken.items():
            assert changed != content, name
            (tmp_path / name).write_bytes(changed)
        (tmp_path / "link").symlink_to(file)
        shutil.copy(file, tmp_path / "sparse")
        os.truncate(tmp_path / "sparse", 2**42)
        errors = []

        async def refuse(engine, name):
            with pytest.raises(InvalidRequest) as refusal:
                await engine.restore_slot(0, tmp_path / name)
            errors.append(refusal.value.name)

        async with opened() as engine:
            for name in (*broken, "link", "sparse", "nowhere"):
                await refuse(engine, name)
            n_open = n_descriptors()
            for _ in range(4):
                await refuse(engine, ".")
            n_left = n_descriptors() - n_open
            with pytest.raises(InvalidRequest):
                await engine.restore_slot(2, file)
            cold = await engine.complete(PROMPT, GREEDY)
        for other in (opened("qwen2"), opened(type_k="q8_0")):
            async with other as engine:
                await refuse(engine, "slot")

    assert saved.n_tokens == 96
    assert ({*errors}, n_left) == ({"path"}, 0)
    assert cold.usage.cached_tokens == 0


def forged(content: bytes, at: int, value: int) -> bytes:
    """A file with other bytes in its state, and the digest that fits them."""
    line, _, data = content.removeprefix(MAGIC).partition(b"\n")
    name, label, n_tokens, n_prompt, _ = json.loads(line)
    tokens, state = data[: 4 * n_tokens], bytearray(data[4 * n_tokens :])
    state[at : at + 4] = value.to_bytes(4, "little")
    key = make_key(name, label, tokens)
    digest = digest_of(key, memoryview(bytes(state)), no_pause).hex()
    head = json.dumps([name, label, n_tokens, n_prompt, digest]).encode()
    return MAGIC + head + b"\n" + tokens + state


@SAME
async def test_a_forged_state_is_of_no_effect_on_later_requests(
    model, unified, tmp_path
):
    """
    Positions that no range has stay in attention, and a state at none in recurrent memory.

    Whoever gets the slot next would compute with them, or be refused for ever.
    """
    file, outputs = tmp_path / "slot", []
    with anyio.fail_after(LIMIT_S):
        async with opened(model, kv_unified=unified) as engine:
            await engine.complete(PROMPT, GREEDY)
            await engine.save_slot(0, file)
            content = file.read_bytes()
            plain = await engine.complete([5, 6, 7, 8], GREEDY, cache_salt="plain")
            for at in range(0, 40, 4):
                for value in (2**31 - 1, 2**31, 2**32 - 1):
                    file.write_bytes(forged(content, at, value))
                    with suppress(SnapshotFailed):
                        await engine.restore_slot(0, file)
                    salt = f"{at} {value}"
                    result = await engine.complete(
                        [5, 6, 7, 8], GREEDY, cache_salt=salt
                    )
                    outputs.append(result.token_ids)

    assert {*outputs} == {plain.token_ids}


def n_descriptors() -> int:
    return len([*Path("/dev/fd").iterdir()])


async def test_a_pipe_or_device_is_not_replaced(tmp_path):
    """
    Nothing is written, and what was there is there.
    """
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with anyio.fail_after(LIMIT_S):
        async with opened() as engine:
            await engine.complete(PROMPT, GREEDY)
            with pytest.raises(InvalidRequest, match="what is there is no file"):
                await engine.save_slot(0, pipe)

    assert pipe.is_fifo()
    assert [*tmp_path.iterdir()] == [pipe]


async def test_a_slot_is_not_moved_while_it_is_in_use_or_nowhere(tmp_path):
    """
    With a request, in an engine that sleeps, or where nothing is reused.
    """
    file = tmp_path / "slot"
    with anyio.fail_after(LIMIT_S):
        async with opened() as engine:
            await engine.complete(PROMPT, GREEDY)
            await engine.save_slot(0, file)
            params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
            async with engine.generate([5, 6, 7], params) as generation:
                await anext(generation)
                [running] = await engine.slots()
                with pytest.raises(InvalidRequest, match="runs no request"):
                    await engine.save_slot(running.slot, tmp_path / "running")
                with pytest.raises(InvalidRequest, match="without a request"):
                    await engine.restore_slot(running.slot, file)
                other = await engine.restore_slot(1 - running.slot, file)
                result = await generation.collect()
            for level in (1, 2):
                await engine.sleep(level)
                with pytest.raises(WrongUse, match="sleeps"):
                    await engine.save_slot(0, file)
                with pytest.raises(WrongUse, match="sleeps"):
                    await engine.restore_slot(0, file)
                await engine.wake()
            again = await engine.complete(PROMPT, GREEDY)
            with pytest.raises(InvalidRequest, match="can be written"):
                await engine.save_slot(other.slot, tmp_path / "no" / "such")
        async with opened(cache=CacheConfig(mode="off")) as engine:
            with pytest.raises(Unsupported, match="reused"):
                await engine.restore_slot(0, file)

    assert len(result.token_ids) == 400
    assert again.usage.cached_tokens > 80


def test_what_a_killed_save_has_left_is_removed(tmp_path):
    """
    By the next save; not what somebody writes, nor what is young, nor a file of another name.
    """
    old, young, locked, other = (tmp_path / f".{c * 32}.part" for c in "abcg")
    link = tmp_path / f".{'d' * 32}.part"
    link.symlink_to(other)
    for path in (old, young, locked, other):
        path.touch()
        if path != young:
            os.utime(path, (0, 0))
    os.utime(link, (0, 0), follow_symlinks=False)
    with locked.open() as stream:
        flock(stream, LOCK_EX)
        sweep_parts(tmp_path)
        is_left = [path.is_symlink() or path.exists() for path in (old, locked, young)]
    sweep_parts(tmp_path / "none")

    assert is_left == [False, True, True]
    assert [other.exists(), link.is_symlink()] == [True, True]
