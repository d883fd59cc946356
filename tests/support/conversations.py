"""
Random chats that branch, several at a time, on one engine; and what they should say.

A turn goes on from any earlier point of its chat, at a turn's end or in the middle of
it. Chats may begin alike, some requests are cancelled, and memory is short: so prefixes
are found in slots, in slots that are still computing, and in host snapshots, or lost.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from tests.support.experts import Parting, parting
from tests.support.player import (
    Played,
    Player,
    differences,
    distance,
    distance_to_replay,
    playing,
)


def dice(seed: float) -> random.Random:
    return random.Random(seed)  # noqa: S311


TOKENS = range(3, 200)  # of every tiny model, none ends generation
BEGINNINGS = [[dice(n).choice(TOKENS) for _ in range(48)] for n in range(3)]
N_CTX_SLOT, MAX_TOKENS, MAX_NEW = 256, 8, 40


@dataclass
class Chat:
    """The texts of all its turns so far."""

    rng: random.Random
    texts: list[array] = field(default_factory=list)

    def next_prompt(self) -> array:
        rng = self.rng
        if not self.texts:
            begin = rng.choice([[], *BEGINNINGS])
            return array("i", [*begin, *self._new()])
        text = rng.choice(self.texts[-2:])
        if rng.random() < 0.4:
            text = text[: rng.randrange(1, len(text) + 1)]
        room = N_CTX_SLOT - MAX_NEW - MAX_TOKENS - 1
        return text[:room] + array("i", self._new())

    def _new(self) -> list[int]:
        return self.rng.choices(TOKENS, k=self.rng.randrange(1, MAX_NEW))


@dataclass
class Report:
    """Counts, and the worst differences from runs without a cache."""

    n_requests: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_cancelled: int = 0
    n_parted: int = 0  # other tokens
    n_other_experts: int = 0  # from there on nothing is compared
    n_wrong: int = (
        0  # other tokens or experts at a larger margin, or logits further away
    )
    worst_logit: float = 0.0  # from a run of the prompt at once
    worst_first: float = 0.0  # as above, of first output tokens
    worst_same_chunks: float = 0.0  # from a run alone of the same chunks
    worst_margin: float = 0.0  # of tokens and of experts
    tiers: dict[str, int] = field(default_factory=dict)


def converse(
    path: Path,
    n_chats: int,
    seed: int,
    tolerance: float,
    *,
    n_at_once: int = 5,
    hears_routers: bool = False,
    **options: Any,
) -> Report:
    """
    Run *n_chats* chats of 3 to 4 turns, then each prompt alone in a cold engine.

    Args:
        hears_routers: near ties of experts are told from faults; needs unified KV, and a
            memory of attention alone, whose batches are computed in order.
    """
    rng = dice(seed)
    options.setdefault("n_slots", 3)
    n_slots = options["n_slots"]
    options.setdefault("n_ctx", N_CTX_SLOT * n_slots)
    options.setdefault("snapshot_interval_tokens", 32)
    options.setdefault("max_bytes", 2_000_000)
    options["hears_routers"] = hears_routers
    cold = options | {"n_slots": 1, "n_ctx": N_CTX_SLOT, "mode": "off"}
    cold.pop("token_budget", None)
    for name in ("parked_slots", "max_bytes", "snapshot_interval_tokens", "directory"):
        cold.pop(name, None)
    with playing(path, **options) as player:
        played = _talk(player, rng, n_chats, n_at_once)
        distances = [distance_to_replay(player, turn) for turn in played]
    report = Report(worst_same_chunks=max(distances))
    with playing(path, **cold) as other:
        for turn in played:
            alone = other.play(turn.prompt, MAX_TOKENS)
            experts = None
            if hears_routers and turn.tokens:
                n_same = min(_same_outputs(turn, alone), len(turn.tokens) - 1)
                n = len(turn.prompt) + n_same
                experts = parting(player.scores(turn)[:n], other.scores(alone)[:n])
            _judge(report, turn, alone, experts, tolerance)
    return report


def _talk(
    player: Player, rng: random.Random, n_chats: int, n_at_once: int
) -> list[Played]:
    played = []
    chats = [Chat(dice(rng.random())) for _ in range(n_chats)]
    left = {id(chat): rng.choice([3, 4]) for chat in chats}
    while chats:
        some = rng.sample(chats, min(len(chats), n_at_once))
        prompts = [chat.next_prompt() for chat in some]
        cancel_after = {
            i: rng.randrange(1, 12) for i in range(len(some)) if rng.random() < 0.15
        }
        results = player.play_all(prompts, MAX_TOKENS, cancel_after)
        if rng.random() < 0.05:
            player.parts.scheduler.clear_cache()
        for chat, result in zip(some, results, strict=True):
            chat.texts.append(result.text)
            left[id(chat)] -= 1
        played += results
        chats = [chat for chat in chats if left[id(chat)]]
    return played


def _same_outputs(played: Played, cold: Played) -> int:
    pairs = zip(played.tokens, cold.tokens, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _judge(
    report: Report,
    played: Played,
    cold: Played,
    experts: Parting | None,
    tolerance: float,
) -> None:
    """
    Args:
        experts: where *played* chose others than *cold*.
    """
    n_comparable = len(played.tokens)
    if experts is not None:
        n_comparable = max(experts.position + 1 - len(played.prompt), 0)
    worst, margin = differences(played, cold, n_comparable)
    assert played.end is not None
    assert played.end.error is None, played.end.error
    report.n_requests += 1
    report.n_prompt += len(played.prompt)
    report.n_cached += played.end.n_cached
    report.n_cancelled += played.end.reason == "cancelled"
    report.worst_logit = max(report.worst_logit, worst)
    if n_comparable:
        first = distance(played.logits[0], cold.logits[0])
        report.worst_first = max(report.worst_first, first)
    tier = str(played.end.cache_tier)
    report.tiers[tier] = report.tiers.get(tier, 0) + 1
    n_same = _same_outputs(played, cold)
    if n_same < min(n_comparable, len(cold.tokens)):
        report.n_parted += 1
    elif experts is not None:
        report.n_other_experts += 1
        margin = experts.margin
    else:
        assert played.tokens == cold.tokens or played.end.reason == "cancelled"
    report.worst_margin = max(report.worst_margin, margin)
    report.n_wrong += max(worst, margin) > tolerance
