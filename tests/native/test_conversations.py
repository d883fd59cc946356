"""Chats that branch say with the cache what they say without it; and what that saves."""

from array import array

import numpy as np
import pytest

from pyllama_raw.core.sequence import N_FRESH
from tests.support.conversations import converse
from tests.support.last_digits import steady_attention
from tests.support.player import playing
from tests.support.products import in_turn, of_a_class
from tests.support.tiny import GENERATING, HYBRID, RECURRENT, SWA, tiny_model

pytestmark = pytest.mark.native

NAMES = [recipe.name for recipe in GENERATING]
EXACT = [recipe.name for recipe in (*RECURRENT, *HYBRID)]
WHOLE = [recipe.name for recipe in (*SWA, *RECURRENT, *HYBRID)]
TOLERANCE = 0.05  # of logits about 20 wide; what runs beside moves them a little

LAYOUTS = {
    "deterministic": {},
    "unified": {
        "deterministic": False,
        "n_ctx": 400,  # tight: slots lose their cells
        **steady_attention(),
    },
}


def make_tokens(seed: int, n_tokens: int) -> array:
    return array("i", np.random.default_rng(seed).integers(3, 200, n_tokens).tolist())


@pytest.mark.parametrize(
    ("name", "layout"), in_turn(NAMES, tuple(LAYOUTS), always=of_a_class)
)
def test_chats_say_what_they_say_without_a_cache(name, layout):
    """
    8 random chats with branches and cancelled turns, five at a time over three slots
    with too little memory: the tokens of runs alone without a cache, and the logits of
    the same chunks in an empty context.
    """
    report = converse(tiny_model(name), 8, 7, TOLERANCE, **LAYOUTS[layout])

    assert report.n_wrong == 0
    assert report.worst_same_chunks <= TOLERANCE
    assert layout == "unified" or report.worst_first == 0
    # Exact slots hold an answer, too, of which no use is made in deterministic mode.
    is_live = layout == "unified" or name not in EXACT
    assert {"host", *(["live"] if is_live else [])} <= set(report.tiers)
    assert report.n_cached > report.n_prompt / 4


@pytest.mark.parametrize("name", NAMES)
def test_chats_are_cold_runs_bit_for_bit(name):
    """
    In deterministic mode a chat that is alone has the tokens and all logits of runs in an
    engine without a cache and with another token budget.
    """
    report = converse(tiny_model(name), 4, 11, 0.0, n_at_once=1, token_budget=23)

    assert report.n_cached > report.n_prompt / 6
    assert (report.n_wrong, report.n_parted, report.worst_logit) == (0, 0, 0.0)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba"])
def test_chats_say_the_same_with_files(tmp_path, name):
    """
    As above, with little host memory, and files.
    """
    files = {"directory": tmp_path, "max_bytes": 300_000, "parked_slots": 0}
    report = converse(tiny_model(name), 18, 8, TOLERANCE, **files)

    assert report.n_wrong == 0
    assert report.worst_same_chunks <= TOLERANCE
    assert report.worst_first == 0
    from_files = (
        {"disk"} if name != "gemma3" else set()
    )  # its windows rarely move so far
    assert {"live", "host"} | from_files <= set(report.tiers)


@pytest.mark.parametrize(
    ("name", "layout"), in_turn(NAMES, tuple(LAYOUTS), always=of_a_class)
)
def test_cached_tokens_are_those_not_computed(name, layout):
    """
    Prompt tokens less cached ones, and all but the last output token of each request:
    that is what was computed. Nothing may have been preempted.
    """
    with playing(tiny_model(name), n_slots=3, **LAYOUTS[layout]) as player:
        prompts = [make_tokens(n % 3, 40) + make_tokens(n, 10) for n in range(9)]
        played = player.play_all(prompts)
        played += player.play_all([one.text + prompts[0] for one in played[:5]])

        stats = player.stats
        assert (stats.preempted, stats.aborted_steps) == (0, 0)
        n_prompt = sum(len(one.prompt) for one in played)
        n_cached = sum(one.end.n_cached for one in played)
        n_output = sum(len(one.tokens) for one in played)
        assert n_cached > 0
        assert stats.computed_tokens == n_prompt - n_cached + n_output - len(played)


@pytest.mark.parametrize(
    ("name", "layout"), in_turn(NAMES, tuple(LAYOUTS), always=of_a_class)
)
def test_equal_prompts_at_once_cost_one_prefill(name, layout):
    """
    The first of six computes the prompt, the others its last token or two, or what a
    window that keeps its place cannot take over.
    """
    fields = LAYOUTS[layout] | {"n_slots": 6, "n_ctx": 1536}
    with playing(tiny_model(name), **fields) as player:
        played = player.play_all([make_tokens(1, 100)] * 6)

        n_computed = player.stats.computed_tokens
        limits = player.parts.scheduler.limits
        n_each = 100 - limits.n_movable(100 - N_FRESH)
        assert n_computed == 100 + 5 * n_each + 6 * (len(played[0].tokens) - 1)
        assert len({tuple(one.tokens) for one in played}) == 1


@pytest.mark.parametrize(
    ("name", "layout", "swa_full"),
    in_turn(WHOLE, tuple(LAYOUTS), (True, False), always=of_a_class),
)
def test_second_turn_costs_what_is_new_and_one_interval(name, layout, swa_full):
    """
    Also where memory cannot be cut, and the slot went to another request: the new
    tokens, and at most one interval of old ones. However the first answer ends up in
    the prompt: as it was said, or changed by a template.
    """
    fields = LAYOUTS[layout] | {"n_slots": 1, "n_ctx": 1024, "parked_slots": 0}
    interval, other, new = 64, make_tokens(3, 90), make_tokens(4, 40)
    with playing(
        tiny_model(name),
        snapshot_interval_tokens=interval,
        swa_full=swa_full,
        **fields,
    ) as player:
        first = player.play(make_tokens(1, 500))
        for history in (first.text, first.prompt, first.prompt[:460]):
            player.play(other)
            n_before = player.stats.computed_tokens
            second = player.play(history + new)

            n_computed = player.stats.computed_tokens - n_before
            assert n_computed <= len(new) + interval + len(second.tokens) - 1


def test_shared_tokens_are_stored_once():
    """
    32 chats that share 1,000 tokens and differ in 100 hold at most 1.15 times the KV
    bytes of their 4,200 distinct tokens, once all have lost their slots.
    """
    shared = make_tokens(0, 1000)
    options = {"deterministic": False, "n_slots": 1, "parked_slots": 0, "n_ctx": 2048}
    with playing(tiny_model("llama"), **options) as player:
        for n in range(1, 33):
            player.play(shared + make_tokens(n, 100), 1)
        player.play(make_tokens(99, 30), 1)

        stats = player.parts.scheduler.cache_stats()
        kv_bytes = 2 * 2 * 128 * 2  # layers, K and V, width, f16
        assert 4190 <= stats.n_stored_tokens <= 4200  # random tokens may be equal
        assert stats.n_bytes <= 1.15 * 4200 * kv_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba"])
def test_host_memory_is_what_is_counted(name, layout):
    """
    The arrays that are alive, and the tokens of the tree, are the bytes that are counted;
    never, not while a step captures, are they more than the limit.
    """
    limit = 200_000
    options = LAYOUTS[layout] | {"max_bytes": limit, "snapshot_interval_tokens": 16}
    with playing(tiny_model(name), n_slots=2, parked_slots=0, **options) as player:
        cache = player.parts.scheduler.memory.cache
        for n in range(30):
            player.add(make_tokens(n % 7, 20 + n) + make_tokens(n, 20), 2)
        while player.step():
            cache.take_released()  # as the next step does before it captures
            stats = cache.stats()
            assert player.host_bytes() == stats.n_bytes - 4 * count_tokens(cache)
            assert stats.n_bytes + stats.n_reserved_bytes <= limit

        assert 0 < player.peak_bytes <= limit
        assert sum(stats.n_evictions.values()) > 0


def count_tokens(cache) -> int:
    """Tokens of all snapshots."""
    return sum(entry.n_tokens for entry in cache._entries)
