"""
Greedy outputs are the same tokens for every slot count and token budget, and llama-server's.

32 prompts of 1 to 900 tokens, deterministic configuration. llama-server gets them one at
a time, with one slot, split memory, no flash attention and no cache. Tokens that end the
generation count as output on both sides.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from load.measure import Report, arguments, run_script, say
from load.workloads import generator, token_prompts
from peers.llama_server import completed, llama_server

N_CTX_SLOT = 1024
MAX_TOKENS = 32
EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 512, 513, 899, 900)

Outputs = list[list[int]]


class Difference(NamedTuple):
    """The first place where two outputs part."""

    prompt: int
    at: int  # output token
    ours: int | None
    theirs: int | None


def lengths(count: int) -> list[int]:
    """1 to 900 tokens: around every budget and micro-batch, and some others."""
    rng = generator("lengths")
    drawn_lengths = [
        int(900 ** rng.random()) for _ in range(max(count - len(EDGES), 0))
    ]
    return sorted([*EDGES, *drawn_lengths][:count])


def ours(options: Namespace, prompts: Outputs, n_slots: int, budget: int) -> Outputs:
    """What the command line tool makes of *prompts*, all at once."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
        command = [
            *(sys.executable, "-m", "pyllama_raw", "generate", "--jsonl"),
            *("--model", str(options.model), "--input", str(file)),
            *("--deterministic", "--temperature", "0"),
            *("--max-tokens", str(MAX_TOKENS), "--threads", str(options.threads)),
            *("--slots", str(n_slots), "--n-ctx", str(n_slots * N_CTX_SLOT)),
            *("--token-budget", str(budget)),
        ]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    records = [json.loads(line) for line in answer.stdout.splitlines()]
    return [r["token_ids"] for r in sorted(records, key=lambda r: r["index"])]


def theirs(options: Namespace, prompts: Outputs) -> Outputs:
    """What llama-server makes of *prompts*, one after the other."""
    flags = ("--flash-attn", "off", "--no-kv-unified", "--cache-ram", "0")
    server = llama_server(
        options.model,
        n_slots=1,
        n_ctx=N_CTX_SLOT,
        threads=options.threads,
        flags=(*flags, "--no-cache-prompt"),
    )
    body = {
        "n_predict": MAX_TOKENS,
        "temperature": 0,
        "cache_prompt": False,
        "return_tokens": True,
    }
    with server as url:
        return [completed(url, body | {"prompt": prompt}) for prompt in prompts]


def differences(mine: Outputs, other: Outputs) -> list[Difference]:
    """Where outputs part, for each prompt that has such a place."""
    places = []
    for prompt, (a, b) in enumerate(zip(mine, other, strict=True)):
        if a != b:
            pairs = zip(a, b, strict=False)
            common = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
            at = min(len(a), len(b)) if common is None else common
            places.append(Difference(prompt, at, *(_at(a, at), _at(b, at))))
    return places


def _at(tokens: list[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


def top1_margin(options: Namespace, tokens: list[int]) -> float:
    """Logit of the best next token minus that of the second best."""
    from pyllama_raw.native.batch import Batch
    from pyllama_raw.native.context import Context
    from pyllama_raw.native.model import Model

    fields: dict[str, Any] = {"kv_unified": False, "flash_attn": "off"}
    sizes = {"n_ctx": N_CTX_SLOT, "n_seq_max": 1, "n_threads": options.threads}
    with (
        Model.load(options.model) as model,
        Context(model, **sizes, **fields) as context,
    ):
        batch = Batch(len(tokens))
        batch.add(tokens, 0, 0, output=True)
        context.decode(batch)
        second, best = np.sort(np.asarray(context.logits(len(tokens) - 1)))[-2:]
    return float(best - second)


def compare(options: Namespace, report: Report) -> None:
    """One run of ours for each configuration, all against one reference."""
    prompts = token_prompts(options.model, 1, lengths(options.prompts))
    reference = None if options.no_peers else theirs(options, prompts)
    for n_slots in options.slots:
        for budget in options.budgets:
            say(f"slots={n_slots} token_budget={budget}")
            started = perf_counter()
            outputs = ours(options, prompts, n_slots, budget)
            wall_s = perf_counter() - started
            reference = reference or outputs
            places = differences(outputs, reference)
            row: dict[str, object] = {"slots": n_slots, "token_budget": budget}
            row |= {"wall_s": wall_s, "prompts": len(prompts), "differ": len(places)}
            if places:
                first = places[0]
                before = prompts[first.prompt] + reference[first.prompt][: first.at]
                margin = top1_margin(options, before)
                row |= {"first": str(tuple(first)), "top1_margin": margin}
            report.add(**row)
            report.claim(f"differ_{n_slots}_{budget}", len(places), "<=", 0)
    report.details |= {"lengths": list(map(len, prompts)), "reference": reference}


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 64, 512])
    return run_script("equality", compare, parser, timed=False)


if __name__ == "__main__":
    sys.exit(main())
