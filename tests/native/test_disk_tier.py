"""Files of states on the whole engine: found again, equal to memory, harmless if bad."""

import os
import shutil
import sqlite3
from array import array
from collections import deque
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

import pytest

from pyllama_raw import Engine, EngineConfig, SamplingParams
from pyllama_raw.core.request import CacheTier, Finished, Request
from pyllama_raw.engine.disk_store import DiskStore
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.opening import build
from pyllama_raw.engine.shared_models import BLOCK_BYTES
from pyllama_raw.engine.state_files import ENTRY_BYTES, INDEX_BYTES, SpanKeys
from pyllama_raw.errors import ConfigError
from pyllama_raw.options.config import CacheConfig, ContextConfig, SchedulerConfig
from tests.engine.test_disk_store import flip, n_used, states_in
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPT = [3 + i * 7 % 250 for i in range(150)]
NEWS = [5, 9, 33, 12]


def generate(prompt, params, *, model, config):
    """In an engine that is closed afterwards; several prompts one after the other."""
    with Engine.open(model, config) as engine:
        if isinstance(prompt[0], int):
            return engine.complete(prompt, params)
        return [engine.complete(each, params) for each in prompt]


def make_config(directory: Path | None, **options) -> EngineConfig:
    """One slot, so that each request finds what the one before it left."""
    cache = {"directory": directory, "max_entries": 0}
    for name in ("max_entries", "max_disk_bytes", "mode", "scope"):
        if name in options:
            cache[name] = options.pop(name)
    return EngineConfig(
        context=ContextConfig(n_ctx=2048, n_threads=1, **options.pop("context", {})),
        scheduler=SchedulerConfig(n_slots=1, token_budget=512),
        cache=CacheConfig(**cache),
        **options,
    )


def complete(model, prompt, directory, **options):
    """In an engine of its own."""
    config = make_config(directory, **options)
    return generate(prompt, GREEDY, model=model, config=config)


def turns(model, directory, **options):
    """Two turns of a chat in one engine: the second one goes on in the same slot."""
    config = make_config(directory, **options)
    first = complete(model, PROMPT, None, **options)
    prompt = [*PROMPT, *first.token_ids, *NEWS]
    _, second = generate([PROMPT, prompt], GREEDY, model=model, config=config)
    return prompt, second


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama", {"deterministic": True}),
        ("llama", {"context": {"type_k": "q8_0", "flash_attn": "on"}}),
        ("gemma3", {"context": {"swa_full": False}}),
        ("mamba", {}),
        ("jamba", {"deterministic": True, "max_entries": 1000}),
    ],
)
def test_a_later_process_goes_on_where_the_first_one_ended(tmp_path, name, options):
    """
    The next turn of a chat computes its news only, with the output of a live slot.
    """
    model = tiny_model(name)
    prompt, live = turns(model, None, **options)

    first = complete(model, PROMPT, tmp_path, **options)
    again = complete(model, prompt, tmp_path, **options)

    assert first.usage.cached_tokens == 0
    assert again.usage.cache_tier is CacheTier.DISK
    n_kept = {"llama": len(PROMPT), "jamba": len(PROMPT) - 2}
    expected = n_kept[name] if "deterministic" in options else len(PROMPT) + 7
    assert again.usage.cached_tokens == expected
    if name != "jamba":  # its slot holds an answer, which cannot be cut off
        assert live.usage.cache_tier is CacheTier.LIVE
        assert live.usage.cached_tokens == expected
    assert again.token_ids == live.token_ids


@pytest.mark.parametrize("name", ["gemma3", "mamba", "jamba"])
def test_memory_that_cannot_be_cut_is_found_at_its_points(tmp_path, name):
    """
    A later process that asks the same prompt starts from the last point before its end.
    """
    model, host = tiny_model(name), {"max_entries": 1000}
    config = make_config(None, **host)
    _, live = generate([PROMPT, PROMPT], GREEDY, model=model, config=config)

    complete(model, PROMPT, tmp_path, **host)
    again = complete(model, PROMPT, tmp_path, **host)

    assert again.usage.cache_tier is CacheTier.DISK
    assert again.usage.cached_tokens == live.usage.cached_tokens >= len(PROMPT) - 2
    assert again.token_ids == live.token_ids


def test_the_same_prompt_is_found_on_a_real_model(tmp_path, model_path):
    """
    All but two prompt tokens come from the file; the output is that of a cold run.
    """
    cold = complete(model_path, PROMPT, tmp_path, deterministic=True)
    again = complete(model_path, PROMPT, tmp_path, deterministic=True)

    assert again.usage.cached_tokens == len(PROMPT) - 2
    assert again.usage.cache_tier is CacheTier.DISK
    assert again.token_ids == cold.token_ids


@contextmanager
def reading(tmp_path):
    """Parts with a stream and a request that needs a file, and a call that returns the first end."""
    model = tiny_model("llama")
    slots = {"scheduler": SchedulerConfig(n_slots=2)}
    config = make_config(tmp_path).model_copy(update=slots)
    generate(PROMPT, GREEDY, model=model, config=config)
    parts = build(model, config)
    reports, events = deque(), []
    parts.files.report = reports.append
    driver = Driver(parts.scheduler, parts.executor, lambda: 0.0, events.extend)
    sampling = SamplingParams(temperature=0, seed=1, ignore_eos=True)
    stream = Request(0, array("i", NEWS), 900, sampling=sampling)
    late = Request(1, array("i", [*PROMPT, *NEWS]), 1, sampling=sampling)

    def first_end():
        while not (ends := [e for e in events if isinstance(e, Finished)]):
            driver.step()
            while reports:
                driver.scheduler.take_report(reports.popleft())
        return ends

    try:
        driver.add([stream], 0.0)
        for _ in range(5):
            driver.step()
        driver.add([late], 0.0)
        yield parts, first_end
    finally:
        parts.release()


def test_streams_lose_no_step_while_a_file_is_loaded(tmp_path):
    """
    A decode that was begun ahead is kept: reading and loading concern another slot.
    """
    with reading(tmp_path) as (parts, first_end):
        ends = first_end()
        times = parts.executor.times

    assert [(end.request_id, end.cache_tier) for end in ends] == [(1, CacheTier.DISK)]
    assert times.dropped_steps == 0


def test_files_are_read_where_the_context_is_made_anew(tmp_path):
    """
    A forged state has spoilt the context, and the next step asks for a file: its request ends.
    """
    with reading(tmp_path) as (parts, first_end):
        parts.executor.context.is_spoilt = True
        ends = first_end()
        n_rebuilt = parts.scheduler.stats().rebuilds

    assert [(end.request_id, end.cache_tier) for end in ends] == [(1, CacheTier.DISK)]
    assert n_rebuilt == 1


def test_a_slot_is_written_when_its_place_is_needed(tmp_path):
    """
    The first of two prompts is found again in the same process, from its file.
    """
    config = make_config(tmp_path)
    other = PROMPT[::-1]

    first, _, again = generate(
        [PROMPT, other, PROMPT], GREEDY, model=tiny_model("llama"), config=config
    )

    # The second prompt may end before the file is complete: then it is a miss.
    assert again.usage.cache_tier in (CacheTier.DISK, None)
    assert again.token_ids == first.token_ids
    assert len(states_in(tmp_path)) == 2


def test_a_damaged_file_is_a_miss(tmp_path):
    """
    One flipped bit anywhere: the prompt is computed as if there was no file.
    """
    model = tiny_model("llama")
    cold = complete(model, PROMPT, tmp_path)
    rng = Random(4)  # noqa: S311

    for _ in range(6):
        (path,) = states_in(tmp_path)
        flip(path, rng.randrange(path.stat().st_size))
        again = complete(model, PROMPT, tmp_path)

        assert again.usage.cached_tokens == 0
        assert again.token_ids == cold.token_ids
        assert not path.exists()


@pytest.mark.parametrize(
    "options",
    [
        {"context": {"type_k": "q8_0"}},
        {"context": {"kv_unified": False}},
        {"context": {"rope_freq_base": 5000.0}},
        {"context": {"fast_kernels": False}},
        {"mode": "off"},
    ],
)
def test_another_configuration_does_not_see_the_file(tmp_path, options):
    """
    What a state depends on is part of the fingerprint; the file stays for its owner.
    """
    model = tiny_model("llama")
    complete(model, PROMPT, tmp_path)

    other = complete(model, PROMPT, tmp_path, **options)
    again = complete(model, PROMPT, tmp_path)

    assert other.usage.cached_tokens == 0
    assert again.usage.cache_tier is CacheTier.DISK


def test_a_model_replaced_in_place_does_not_see_the_file(tmp_path):
    """
    Path, size, time and the first MiB are equal, the last weights are not.
    """
    model = tmp_path / "model.gguf"
    shutil.copy(tiny_model("llama"), model)
    complete(model, PROMPT, tmp_path / "cache")
    status = model.stat()
    with model.open("r+b") as stream:
        stream.seek(-BLOCK_BYTES, os.SEEK_END)
        assert stream.tell() > 2**20
        stream.write(bytes(BLOCK_BYTES))
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))

    other = complete(model, PROMPT, tmp_path / "cache")
    again = complete(model, PROMPT, tmp_path / "cache")

    assert other.usage.cached_tokens == 0
    assert again.usage.cache_tier is CacheTier.DISK
    assert again.token_ids == other.token_ids


def fingerprint_in(directory: Path) -> str:
    """Of the only model that the index knows."""
    with closing(sqlite3.connect(directory / "plrstates.sqlite")) as database:
        ((name,),) = database.execute("SELECT DISTINCT fingerprint FROM states")
    return name.decode()


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba"])
@pytest.mark.parametrize("n_more", [-10, 1, 100])
def test_a_state_of_other_tokens_than_its_file_says_is_a_miss(tmp_path, name, n_more):
    """
    All digests fit, since anybody can make them: the output is that of a cold run.
    """
    model = tiny_model(name)
    long = [*PROMPT, *PROMPT, *PROMPT]
    complete(model, PROMPT, tmp_path)
    cold = complete(model, long, None)
    store = DiskStore(tmp_path, fingerprint_in(tmp_path), 10**9)
    (known,) = store.scan(SpanKeys())
    state = store.read(known.payload)
    store.delete(known.payload)
    tokens = array("i", long[: len(PROMPT) + n_more]).tobytes()
    store.write(None, tokens, state)
    store.close()

    forged = complete(model, long, tmp_path)

    assert forged.token_ids == cold.token_ids


def test_a_request_of_its_own_scope_leaves_no_file(tmp_path):
    """
    With scope "salt" nobody may find the prompt of a request without one.
    """
    complete(tiny_model("llama"), PROMPT, tmp_path, scope="salt")

    assert states_in(tmp_path) == []


def test_the_limit_is_kept(tmp_path):
    """
    Many prompts, room for two files: the directory never holds more.
    """
    model = tiny_model("llama")
    complete(model, PROMPT, tmp_path)
    (path,) = states_in(tmp_path)
    limit = INDEX_BYTES + 2 * (path.stat().st_size + ENTRY_BYTES) + 6000
    prompts = [[*range(start, start + 150)] for start in range(3, 40, 5)]
    config = make_config(tmp_path, max_disk_bytes=limit)

    generate(prompts, GREEDY, model=model, config=config)

    assert len(states_in(tmp_path)) == 2
    assert n_used(tmp_path) <= limit


def test_a_directory_that_cannot_be_used_is_told_when_the_engine_opens(tmp_path):
    """
    Of a damaged index and of an earlier version: the option, the directory, what to do.
    """
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "plrstates.sqlite").write_bytes(b"no database" * 1000)
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / ".plrlock").touch()

    for name in ("damaged", "earlier"):
        with pytest.raises(ConfigError, match=rf"directory='.*/{name}' .*: delete"):
            complete(tiny_model("llama"), PROMPT, tmp_path / name)
