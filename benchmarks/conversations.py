"""
Many random chats on every tiny model, checked against runs without a cache.

    python -m benchmarks.conversations --n 500

A wrong line is one whose tokens differ from those of its prompt alone although the best
two logits there were further apart than the tolerance. Cached is the part of all prompt
tokens that were not computed. Each model runs in several layouts, memory always short.

What runs beside a request moves its logits, with or without a cache; in models with
experts another one may be chosen. With --at-once 1 only the cache is left to blame.
"""

from __future__ import annotations

import argparse
import sys
from time import perf_counter

from tests.conversations import converse
from tests.tiny import GENERATING, tiny_model

TOLERANCE = 0.05
LAYOUTS = {
    "deterministic": {},
    "unified": {"deterministic": False, "n_ctx": 400},
    "no flash": {"deterministic": False, "n_ctx": 400, "flash_attn": "off"},
    "small window": {"swa_full": False, "snapshot_interval_tokens": 0},
    "few bytes": {"deterministic": False, "parked_slots": 0, "max_bytes": 200_000},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=500, help="chats for each model")
    parser.add_argument(
        "--at-once", type=int, default=5, help="chats that run together"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--models", nargs="*", default=[r.name for r in GENERATING])
    given = parser.parse_args()
    n_wrong = 0
    for name in given.models:
        for layout, options in LAYOUTS.items():
            n_chats = max(given.n // len(LAYOUTS), 1)
            started = perf_counter()
            report = converse(
                tiny_model(name),
                n_chats,
                given.seed,
                TOLERANCE,
                n_at_once=given.at_once,
                **options,
            )
            n_wrong += report.n_wrong
            print(
                f"{name:14} {layout:14} {report.n_requests:5} turns  "
                f"cached {report.n_cached / report.n_prompt:4.0%}  "
                f"wrong {report.n_wrong}  near ties {report.n_parted}  "
                f"logits {report.worst_logit:.1e} ({report.worst_same_chunks:.1e} "
                f"same chunks)  {report.tiers}  {perf_counter() - started:.1f} s",
                flush=True,
            )
    return n_wrong != 0


if __name__ == "__main__":
    sys.exit(main())
