"""
What a prefix cache may change of an output: nothing.

In deterministic mode bit for bit, whatever the token budget, against a cold run in an
engine without a cache. In every other layout KV depends a little on how many tokens are
computed at once, because the order of sums in a matrix product does; there is a tolerance,
stated below.
"""

from array import array
from contextlib import ExitStack

import numpy as np
import pytest

from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.step import Copy, Load, Piece, Release, Save
from pyllama_raw.engine.layout import expected_kind
from pyllama_raw.engine.operations import SlotOperations
from pyllama_raw.native.context import Context
from pyllama_raw.native.model import Model
from pyllama_raw.options.config import ContextConfig
from tests.native.support import EXACT, last_logits, make_context, prefill
from tests.support.player import (
    Played,
    Player,
    differences,
    distance_to_replay,
    playing,
)
from tests.support.products import in_turn, of_a_class
from tests.support.tiny import GENERATING, HYBRID, RECURRENT, SWA, tiny_model

pytestmark = pytest.mark.native

DEFAULT = "default model"
WHOLE = [r.name for r in (*SWA, *RECURRENT, *HYBRID)]  # memory that cannot be cut
WINDOW = [r.name for r in GENERATING if r.n_swa]
NAMES = [*[r.name for r in GENERATING], DEFAULT]
WIDE = ["gemma3", "gpt-oss"]
COLD = {"n_slots": 1, "mode": "off"}


def make_tokens(seed: int, n_tokens: int) -> array:
    return array("i", np.random.default_rng(seed).integers(3, 200, n_tokens).tolist())


# A slot with a window of 32 can be copied at 32 and 96, and 96 is the last point of PROMPT.
PROMPT, MORE, OTHER = make_tokens(1, 98), make_tokens(2, 20), make_tokens(3, 30)


@pytest.fixture
def play(request):
    """Makes a player of a tiny model or of the default one."""

    def make(name, **options):
        if name == DEFAULT:
            return playing(request.getfixturevalue("model_path"), **options)
        return playing(tiny_model(name), **options)

    return make


def continue_live(player: Player) -> Played:
    """Goes on in an idle slot, which holds a prompt and no answer."""
    player.play(PROMPT[:96], 1)
    return player.play(PROMPT + MORE)


def fork(player: Player) -> Played:
    """Waits for another request that computes the same prefix, then takes it over."""
    first = player.add(PROMPT, 1)
    second = player.add(PROMPT + MORE)
    while player.step():
        pass
    assert player.played(first).end.n_cached == 0
    return player.played(second)


def restore(player: Player) -> Played:
    """The next turn of a chat that lost its slot to another one."""
    first = player.play(PROMPT)
    player.play(OTHER)
    return player.play(first.text + MORE)


ONE_SLOT = {"n_slots": 1, "parked_slots": 0}
WAYS = {
    continue_live: ({"n_slots": 2}, CacheTier.LIVE),
    fork: ({"n_slots": 2}, CacheTier.LIVE),
    restore: (ONE_SLOT, CacheTier.HOST),
}
BUDGETS = {continue_live: 512, fork: 33, restore: 5}


def name_of(value: object) -> str:
    return getattr(value, "__name__", str(value))


def n_reused(player: Player, way) -> int:
    """
    Prompt tokens that need not be computed after *way*; never any of an answer.

    What cannot be cut is found at the last point of the prompt, unless the end of the
    prompt itself is waited for.
    """
    limits = player.parts.scheduler.limits
    if way is continue_live:
        return 96
    if limits.kind.can_cut or way is fork:
        return limits.n_movable(len(PROMPT))
    return len(PROMPT) - 2


def assert_cold(player: Player, played: Played) -> None:
    """The logits and tokens of *played* are, bit for bit, those of *player*, new and cold."""
    cold = player.play(played.prompt)
    assert cold.end.n_cached == 0
    assert len(played.tokens) == 8
    assert played.tokens == cold.tokens
    for logits, expected in zip(played.logits, cold.logits, strict=True):
        assert np.array_equal(logits, expected)


@pytest.mark.parametrize(
    ("name", "way"), in_turn(NAMES, tuple(WAYS), always=of_a_class), ids=name_of
)
def test_a_hit_changes_no_bit(play, name, way):
    """
    In deterministic mode the logits and tokens after a hit of each tier are, bit for
    bit, those of a cold run, also with another token budget.
    """
    more, tier = WAYS[way]
    with play(name, token_budget=BUDGETS[way], **more) as player:
        played = way(player)

        assert played.end.cache_tier is tier
        assert played.end.n_cached == n_reused(player, way)
    with play(name, **COLD) as player:
        assert_cold(player, played)


@pytest.mark.parametrize("name", NAMES)
def test_a_hit_from_a_file_changes_no_bit(play, tmp_path, name):
    """
    Nor does the disk tier, within a process or in a later one.
    """
    files = {"directory": tmp_path, "max_entries": 1000 * (name in WHOLE), **ONE_SLOT}
    with play(name, token_budget=7, **files) as player:
        player.play(PROMPT)
        player.play(OTHER)
        player.parts.scheduler.memory.cache.clear()
        played = player.play(PROMPT + MORE)

        assert played.end.cache_tier is CacheTier.DISK
        assert played.end.n_cached == n_reused(player, restore)
    with play(name, **COLD) as player:
        assert_cold(player, played)


def at_interval(player: Player) -> tuple[Played, int]:
    player.play(PROMPT)
    player.play(OTHER)
    return player.play(PROMPT[:50] + MORE), 32


def at_junction(player: Player) -> tuple[Played, int]:
    player.play(PROMPT)
    player.play(PROMPT[:45] + OTHER)
    player.play(OTHER)
    return player.play(PROMPT[:45] + MORE), 45


def at_last_prompt_token(player: Player) -> tuple[Played, int]:
    player.play(PROMPT)
    player.play(OTHER)
    return player.play(PROMPT), len(PROMPT) - 2


def at_cache_point(player: Player) -> tuple[Played, int]:
    player.play(PROMPT, cache_points=(40, 41))
    player.play(OTHER)
    return player.play(PROMPT[:41] + MORE), 40


POINTS = {
    at_interval: 32,
    at_junction: 0,
    at_last_prompt_token: 0,
    at_cache_point: 0,
}


@pytest.mark.parametrize(
    ("name", "point"), in_turn(WHOLE, tuple(POINTS), always=of_a_class), ids=name_of
)
def test_each_kind_of_snapshot_point_is_exact(play, name, point):
    """
    Memory that cannot be cut goes on from each kind of point without a change.
    """
    interval = POINTS[point]
    with play(
        name, snapshot_interval_tokens=interval, token_budget=17, **ONE_SLOT
    ) as player:
        played, n_cached = point(player)

        limits = player.parts.scheduler.limits
        assert played.end.n_cached == limits.n_movable(n_cached)
        assert played.end.cache_tier is CacheTier.HOST
    with play(name, **COLD) as player:
        assert_cold(player, played)


@pytest.mark.parametrize("name", WIDE)
def test_a_wide_window_keeps_its_place(play, name):
    """
    Where a window holds more than one sum of cells, too: what is restored moves by a
    multiple of those.
    """
    window = {f"{name}.attention.sliding_window": 160}
    prompt = make_tokens(4, 400)
    with play(name, kv_overrides=window, **ONE_SLOT) as player:
        player.play(prompt)
        player.play(OTHER)
        played = player.play(prompt[:390] + MORE)

        assert player.parts.scheduler.limits.n_swa == 160
        assert played.end.n_cached == 160 + 192
    with play(name, kv_overrides=window, **COLD) as player:
        assert_cold(player, played)


@pytest.mark.parametrize("name", NAMES)
def test_the_token_budget_changes_no_bit(play, name):
    """
    Nor does where micro-batches end: no chunk and no rest of one is a single token.
    """
    prompt = PROMPT[:65]
    with play(name, **COLD) as player:
        cold = player.play(prompt)
    for budget, n_ubatch in ((3, 512), (64, 512), (512, 64)):
        with play(
            name, **COLD | {"token_budget": budget, "n_ubatch": n_ubatch}
        ) as player:
            assert_cold(player, cold)


@pytest.mark.parametrize("name", [r.name for r in GENERATING if r.name not in WHOLE])
def test_other_memory_is_cut_anywhere(play, name):
    """
    A restored state is trimmed to the common prefix, wherever that ends.
    """
    with play(name, **ONE_SLOT) as player:
        player.play(PROMPT)
        player.play(OTHER)
        played = player.play(PROMPT[:37] + MORE)

        assert played.end.n_cached == 37
        assert played.end.cache_tier is CacheTier.HOST
    with play(name, **COLD) as player:
        assert_cold(player, played)


LAYOUTS = {
    "unified": {"flash_attn": "off"},
    "flash": {"flash_attn": "on"},
    "flash-split": {"flash_attn": "on", "kv_unified": False},
    "quantised": {"flash_attn": "on", "type_k": "q8_0", "type_v": "q8_0"},
}
SAME_CHUNKS = 2e-3  # cells may lie elsewhere, which changes the order of sums
OTHER_CHUNKS = 0.05
OTHER_CHUNKS_DEFAULT = 1.0  # of 35; quantised weights make more of a difference


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *in_turn([r.name for r in GENERATING], tuple(LAYOUTS), always=of_a_class),
        *in_turn([f"{name} small" for name in WINDOW], tuple(LAYOUTS)),
    ],
)
def test_in_every_layout_logits_stay_near(play, name, layout):
    """
    After a hit of each tier, logits are within 0.002 of a cold run's with the same
    chunks, and within a wider tolerance of those of one that computes the prompt at
    once; then a token differs only if the best two were that near each other.
    """
    name, _, small = name.partition(" ")
    options = {"swa_full": False} if small else {}
    assert_near(play, name, LAYOUTS[layout] | options, OTHER_CHUNKS)


def test_logits_of_the_default_model_stay_near(play):
    """
    As those of the tiny models, in the layout that engines have by default.
    """
    assert_near(play, DEFAULT, LAYOUTS["flash"], OTHER_CHUNKS_DEFAULT)


def assert_near(play, name, options, tolerance: float) -> None:
    fields = {"deterministic": False} | options
    hits = []
    for way, (more, tier) in WAYS.items():
        with play(name, **fields, **more) as player:
            hits.append(way(player))
            assert hits[-1].end.cache_tier is tier
            assert distance_to_replay(player, hits[-1]) <= SAME_CHUNKS
    with play(name, **fields, n_slots=1, mode="off") as player:
        for played in hits:
            cold = player.play(played.prompt)
            assert cold.end.n_cached == 0
            assert max(differences(played, cold)) <= tolerance


def test_a_copy_is_done_before_what_comes_later(make_context_of):
    """
    Without unified KV, too: the source may be filled anew in the same plan.
    """
    context = make_context_of("llama")
    operations = SlotOperations(context, SnapshotKind.STATE, 3)
    prefill(context, PROMPT, slot=0)
    prefill(context, OTHER, slot=1)
    save = Save(1, CacheTier.HOST, 1, 0, len(OTHER), 2**30)
    piece = Piece(operations.run([save]).saved[1].payload, 0, len(OTHER))

    operations.run(
        [Copy(0, 2, len(PROMPT)), Release(0), Load(0, (piece,), len(OTHER) - 1)]
    )

    seen = last_logits(context, MORE, slot=2, pos=len(PROMPT))
    clean = make_context_of("llama")
    prefill(clean, PROMPT, slot=0)
    expected = last_logits(clean, MORE, slot=0, pos=len(PROMPT))
    assert np.array_equal(seen, expected)


def test_a_copy_that_fails_leaves_an_empty_slot(make_context_of):
    """
    As when there is nothing to copy: the slot counts as lost.
    """
    context = make_context_of("llama")

    operations = SlotOperations(context, SnapshotKind.STATE, 3)

    assert operations.run([Copy(0, 1, 5)]).lost == {1}
    assert context.seq_pos_max(1) is None


@pytest.mark.parametrize("swa_full", [True, False])
@pytest.mark.parametrize("name", WINDOW)
def test_memory_with_a_window_is_never_cut(name, swa_full):
    """
    libllama drops what is behind the window from snapshots, whatever swa_full says.
    """
    with Model.load(tiny_model(name)) as model:
        config = ContextConfig(swa_full=swa_full)

        assert expected_kind(model, config) is SnapshotKind.EXACT


@pytest.fixture
def make_context_of():
    """Contexts of a tiny model with a part of the memory for each slot."""
    with ExitStack() as stack:

        def make(name: str) -> Context:
            model = stack.enter_context(Model.load(tiny_model(name)))
            return stack.enter_context(make_context(model, **EXACT))

        yield make
