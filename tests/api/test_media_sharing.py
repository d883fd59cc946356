"""An image is encoded once, never mixed up with another, and a bad one harms nobody."""

from __future__ import annotations

import gc
import os
import random
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from time import monotonic, sleep

import psutil
import pytest

from pyllama_raw import AsyncEngine, Audio, Engine, SamplingParams
from pyllama_raw.core.encodes import Encodes
from pyllama_raw.engine.media_desk import Encoder, MediaDesk, MediaPart
from pyllama_raw.engine.requests import RequestEncodes
from pyllama_raw.errors import (
    BadMedia,
    EncodeFailed,
    ProjectorLoadFailed,
    PromptTooLong,
)
from pyllama_raw.native.projector import RowRun
from tests.api.media_engines import (
    GREEDY,
    N_SLOTS,
    config,
    deep_projector,
    nan_projector,
    opened,
    picture,
)
from tests.media.files import wav_file
from tests.support.limits import LIMIT_S
from tests.support.tiny import tiny_model, tiny_projector

pytestmark = pytest.mark.native

N_CASES = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "40"))
HANG_S = LIMIT_S


@pytest.fixture
def llava() -> Iterator[Engine]:
    with opened("llava") as engine:
        yield engine


def test_an_image_twice_in_a_prompt_is_encoded_once(llava):
    """
    Its rows are computed at both places.
    """
    result = llava.complete([picture(), "and", picture(), "?"], GREEDY)

    stats = llava.stats()
    assert (stats.encodes, stats.encodes_failed) == (1, 0)
    assert result.usage.media_tokens == 2 * 4


@pytest.mark.parametrize("scope", ["salt", "shared"])
def test_nobody_sees_whether_another_salt_has_shown_an_image(scope):
    """
    It is encoded for each salt, and clear_cache(salt) frees its rows; with scope "salt" a
    request without a salt shares with nobody.
    """
    prompt = ["see ", picture(), "?"]
    with opened("llava", cache={"scope": scope}) as engine:
        results = [
            engine.complete(prompt, GREEDY, cache_salt=salt)
            for salt in ("a", "b", None, None)
        ]
        stats = [engine.stats()]
        freed = [engine.clear_cache(salt) for salt in ("a", "a", "b")]
        stats.append(engine.stats())
        engine.clear_cache()
        stats.append(engine.stats())

    n_encodes = 4 if scope == "salt" else 3
    n_bytes = stats[0].row_bytes // n_encodes
    assert [it.encodes for it in stats] == [n_encodes] * 3
    assert [bool(it.timings.encode_s) for it in results[:3]] == [True] * 3
    assert [it.row_bytes for it in stats] == [
        n_encodes * n_bytes, (n_encodes - 2) * n_bytes, 0,
    ]  # fmt: skip
    assert freed[0] >= n_bytes
    assert freed[1] == 0


def test_an_image_in_two_requests_at_once_is_encoded_once(tmp_path):
    """
    And none of its 256 rows is computed again, nor for a request that comes later.
    """
    prompts = [["see ", picture(0, 224, 224), f"question {i}"] for i in range(3)]
    with opened("llava", deep_projector(tmp_path / "deep.gguf")) as engine:
        together = Barrier(2)

        def ask(prompt: list[object]) -> None:
            together.wait(HANG_S)
            engine.complete(prompt, GREEDY)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(ask, prompts[:2]))
        later = engine.complete(prompts[2], GREEDY)
        stats = engine.stats()

    n_rows = later.usage.media_tokens
    assert (n_rows, stats.encodes) == (256, 1)
    assert later.usage.cached_tokens >= n_rows
    assert n_rows <= stats.computed_tokens < 2 * n_rows


def test_later_turns_about_an_image_do_not_encode_it_again():
    """
    Its rows are kept, and what memory holds of them is not computed again.
    """
    turns: list[object] = ["see ", picture(), "What colour has the sky?"]
    with opened("llava") as engine:
        for _ in range(3):
            result = engine.complete(turns, GREEDY)
            turns += [result.text, "And now?"]
        stats = engine.stats()

    assert (stats.encodes, stats.encodes_shared) == (1, 2)
    assert result.usage.cached_tokens >= result.usage.media_tokens == 4


def test_rows_that_are_gone_are_encoded_again(tmp_path):
    """
    Also if memory holds what they became, in a slot or, for a later engine, in a file. The
    answer is the same.
    """
    path = deep_projector(tmp_path / "deep.gguf")
    prompt = ["see ", picture(0, 224, 224), "What colour has the sky?"]
    cache = {"parked_slots": 0, "directory": tmp_path}
    results = []
    for n_encodes in (2, 1):
        with opened("llava", path, max_kept_bytes=0, cache=cache) as engine:
            results += [engine.complete(prompt, GREEDY) for _ in range(n_encodes)]
            stats = engine.stats()
        assert (stats.encodes, stats.row_bytes) == (n_encodes, 0)

    assert len({result.token_ids for result in results}) == 1
    tiers = [result.usage.cache_tier for result in results]
    assert tiers == [None, "live", "disk"]


@pytest.mark.parametrize("name", ["llava", "idefics3"])
def test_rows_are_never_those_of_another_image_or_slice(name):
    """
    Whatever comes, goes and is dropped for space: the rows that a span gets are those which
    the projector makes of just this image, of just this slice.
    """
    images = [picture(seed, 100, 60) for seed in range(8)]
    with opened(name, max_kept_bytes=3000) as engine:
        desk = engine._parts.media
        assert isinstance(desk, MediaDesk)
        expected = [rows_of(desk, image) for image in images]
        assert len({rows.tobytes() for part in expected for rows in part}) == sum(
            map(len, expected)
        )
        encoder: Encoder = Encoder(Encodes(2**20, 3000))
        chance = random.Random(7)  # noqa: S311 - the same on every run

        for request_id in range(N_CASES):
            numbers = [chance.randrange(8) for _ in range(chance.randint(1, 4))]
            placed = [desk.place(images[n], i) for i, n in enumerate(numbers)]
            tasks = [part.payloads[0].task for part in placed]
            encodes = RequestEncodes(request_id, tasks)
            encoder.enter([encodes])
            wait_until(lambda e=encodes: encoder.is_done(e))
            found = [own_rows(part, encoder) for part in placed]
            encoder.leave(encodes)
            assert found == [expected[n] for n in numbers]
        stats = encoder.stats
        encoder.close()

    assert stats.encodes > 8  # some were dropped and made again
    assert stats.media_bytes == 0


def rows_of(desk: MediaDesk, image) -> list[array]:
    """Straight from the projector."""
    with desk._reader.read(image) as cut:
        return [
            desk.projector.encode(cut, index)
            for index, run in enumerate(cut.runs)
            if isinstance(run, RowRun)
        ]


def own_rows(part: MediaPart, encoder: Encoder) -> list[array]:
    found = []
    for payload in part.payloads:
        rows = memoryview(encoder.rows(payload.task))
        end = payload.start + payload.n_floats
        found.append(array("f", rows[payload.start : end]))
    return found


def wait_until(holds) -> None:
    end = monotonic() + HANG_S
    while not holds():
        assert monotonic() < end
        sleep(0)


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "split"])
@pytest.mark.parametrize("attention", ["on", "off"])
def test_a_projector_without_numbers_fails_its_request_only(
    tmp_path, unified, attention
):
    """
    Seven neighbours, beside and behind it, give what each gives alone.
    """
    path = nan_projector(tmp_path / "nan.gguf")
    context = {"kv_unified": unified, "flash_attn": attention, "n_ctx": 2048}
    texts = [f"neighbour {i}" for i in range(7)]
    with opened("llava", path, context=context) as engine:
        alone = [engine.complete(text, GREEDY).token_ids for text in texts]
        engine.clear_cache()
        with ThreadPoolExecutor(N_SLOTS) as pool:
            bad = pool.submit(engine.complete, ["see ", picture(), "?"], GREEDY)
            beside = list(pool.map(lambda t: engine.complete(t, GREEDY), texts))
        behind = [engine.complete(text, GREEDY).token_ids for text in texts]
        stats = engine.stats()

    assert isinstance(bad.exception(), EncodeFailed)
    assert "not a number" in str(bad.exception())
    assert [result.token_ids for result in beside] == alone
    assert behind == alone
    assert (stats.failed, stats.encodes_failed, stats.rebuilds) == (1, 1, 0)


@pytest.mark.anyio
async def test_cancels_in_the_midst_of_encodes_leave_nothing(tmp_path):
    """
    At any moment of an encode, of one or of several who want it: bytes are given back, and
    the process does not grow.
    """
    import anyio

    path = deep_projector(tmp_path / "deep.gguf")
    model = tiny_projector("llava")[1]
    chance = random.Random(3)  # noqa: S311 - the same on every run
    options = config(path, max_kept_bytes=0)
    async with AsyncEngine.open(model, options) as engine:

        async def ask(seed: int, left_s: float) -> None:
            with anyio.move_on_after(left_s):
                await engine.complete(["a", picture(seed, 224, 224), "b"], GREEDY)

        async def rounds(n: int) -> None:
            for first in range(n):
                async with anyio.create_task_group() as tasks:
                    for i in range(3):
                        seed = 3 * first + chance.choice([0, i])
                        tasks.start_soon(ask, seed, chance.uniform(0, 0.05))

        await rounds(max(N_CASES // 12, 3))
        gc.collect()
        before = psutil.Process().memory_info().rss
        await rounds(max(N_CASES // 3, 3))
        result = await engine.complete(["a", picture(), "b"], GREEDY)
        stats = engine.stats()
        gc.collect()
        grown = psutil.Process().memory_info().rss - before

    assert result.usage.completion_tokens == GREEDY.max_tokens
    assert stats.encodes_cancelled > 0
    assert (stats.running, stats.waiting, stats.media_bytes) == (0, 0, 0)
    assert stats.row_bytes == 0
    assert grown < 2**25


def test_a_cancelled_encode_ends_within_a_layer(tmp_path):
    """
    After the last who wants it has left, it reaches the border of the layer that runs, and
    its end.
    """
    path = deep_projector(tmp_path / "deep.gguf")
    with opened("llava", path) as engine:
        desk = engine._parts.media
        assert isinstance(desk, MediaDesk)
        encoder = desk.encoder
        for seed in range(8):
            part = desk.place(picture(seed, 224, 224), 0)
            encodes = RequestEncodes(-1, [part.payloads[0].task])
            encoder.enter([encodes])
            wait_until(lambda: encoder._control is not None)
            control = encoder._control
            wait_until(lambda c=control: c.n_borders > 2)
            encoder.leave(encodes)
            n_borders = control.n_borders
            wait_until(lambda: encoder._control is None)

            assert control.n_borders - n_borders <= 2
        assert encoder.stats.media_bytes == 0


def test_rows_that_see_each_other_must_fit_a_micro_batch():
    """
    libllama would end the process; more rows than n_ubatch are refused before the encode.
    """
    context = {"n_batch": 64, "n_ubatch": 3}
    path, model = tiny_projector("gemma3")
    with Engine.open(model, config(path, context={"n_batch": 64, "n_ubatch": 8})) as it:
        assert it.complete([picture(), "a"], GREEDY).usage.media_tokens == 4
    options = config(path, context=context).model_copy(
        update={"scheduler": config(path).scheduler.model_copy(update={"n_slots": 3})}
    )
    with Engine.open(model, options) as engine:
        with pytest.raises(BadMedia, match="n_ubatch"):
            engine.complete([picture(), "a"], GREEDY)
        assert engine.complete("a", GREEDY).usage.completion_tokens == 6


def test_a_projector_of_another_model_opens_no_engine():
    """
    A row must be as wide as an embedding of the model.
    """
    path, _ = tiny_projector("llava")

    with pytest.raises(ProjectorLoadFailed):
        Engine.open(tiny_model("gemma3"), config(path))


def test_a_slot_too_small_for_a_sound_is_told_before_it_is_decoded():
    """
    The prompt is too long: nothing is encoded.
    """
    context = {"n_ctx": 256 * N_SLOTS, "kv_unified": False}
    with opened("ultravox", context=context) as engine:
        with pytest.raises(PromptTooLong):
            engine.complete(["hear ", Audio(wav_file(8000)), "?"], GREEDY)

        assert engine.stats().encodes == 0


def test_engines_share_a_projector_until_the_last_one_closes():
    """
    Its weights are there once for equal options; each engine encodes for itself.
    """
    prompt = ["see ", picture(), "?"]
    with opened("llava") as first, opened("llava", image_max_tokens=9) as other:
        with opened("llava") as second:
            projectors = [e._parts.media.projector for e in (first, second, other)]
            results = [engine.complete(prompt, GREEDY) for engine in (first, second)]
        after = first.complete([picture(1), "?"], GREEDY)
        closed = [projector.closed for projector in projectors]

    assert projectors[0] is projectors[1] is not projectors[2]
    assert results[0].token_ids == results[1].token_ids
    assert after.usage.media_tokens == 4
    assert closed == [False, False, False]
    assert [projector.closed for projector in projectors] == [True, True, True]


def test_several_outputs_share_an_encode(llava):
    """
    Of n outputs each is a request of its own; the image is encoded for all.
    """
    params = SamplingParams(max_tokens=3, n=3, seed=1)

    results = llava.complete_n(["see ", picture(), "?"], params)

    assert len(results) == 3
    assert llava.stats().encodes == 1
    assert all(result.timings.encode_s is not None for result in results)
