"""
Many random chats on every tiny model, checked against runs without a cache.

    python -m benchmarks.conversations --n 500

A wrong turn is one whose logits are further from those of its prompt alone than the
tolerance, or whose tokens differ although the best two logits there were further apart.
Cached is the part of all prompt tokens that were not computed. Each model runs in several
layouts, memory always short.

In the fast layouts, what runs beside a request and how its prompt is cut moves the last
digits, with or without a cache, and where two experts nearly tie, they choose. So that is
looked at as the choice of a token is: a turn is wrong if other experts were chosen although
their scores were further apart than the tolerance; from there on it is not compared.
"""

from __future__ import annotations

import argparse
import sys
from time import perf_counter

from scripts.tiny_models.recipe import Recipe
from tests.support.conversations import converse
from tests.support.tiny import GENERATING, RECIPES, tiny_model

TOLERANCE = 0.1  # of logits about 20 wide
LAYOUTS = {
    "deterministic": {},
    "unified": {"deterministic": False, "n_ctx": 400},
    "no flash": {"deterministic": False, "n_ctx": 400, "flash_attn": "off"},
    "small window": {"swa_full": False, "snapshot_interval_tokens": 0},
    "few bytes": {"deterministic": False, "parked_slots": 0, "max_bytes": 200_000},
}


def run(recipe: Recipe, layout: str, flags: argparse.Namespace) -> int:
    """Print what came of the chats, and return how many turns were wrong."""
    options = LAYOUTS[layout]
    is_exact = options.get("deterministic", True)
    has_experts = "expert_count" in recipe.fields and recipe.memory != "hybrid"
    started = perf_counter()
    report = converse(
        tiny_model(recipe.name),
        max(flags.n // len(LAYOUTS), 1),
        flags.seed,
        TOLERANCE,
        n_at_once=flags.at_once,
        hears_routers=has_experts and not is_exact,
        **options,
    )
    print(
        f"{recipe.name:14} {layout:14} {report.n_requests:5} turns  "
        f"cached {report.n_cached / report.n_prompt:4.0%}  wrong {report.n_wrong}  "
        f"near ties {report.n_parted} of tokens, {report.n_other_experts} of experts, "
        f"at most {report.worst_margin:.1e}  logits {report.worst_logit:.1e} "
        f"({report.worst_same_chunks:.1e} same chunks)  {report.tiers}  "
        f"{perf_counter() - started:.1f} s",
        flush=True,
    )
    return report.n_wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=500, help="chats for each model")
    parser.add_argument(
        "--at-once", type=int, default=5, help="chats that run together"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--models", nargs="*", default=[r.name for r in GENERATING])
    options = parser.parse_args()
    runs = [(RECIPES[name], layout) for name in options.models for layout in LAYOUTS]
    return sum(run(*case, options) for case in runs) != 0


if __name__ == "__main__":
    sys.exit(main())
