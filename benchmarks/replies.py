"""
What taking a reply apart costs for each token, in short replies and in long ones.

    python -m benchmarks.replies

The cost of a token must not grow with the reply: 100,000 tokens at under twice per token of 1,000.
Each token is fed alone, as in a stream. The least time of the processor in nine runs is shown,
because other programs only add to it.
"""

from __future__ import annotations

import time

from pyllama_raw.replies.parser import ReplyParser
from pyllama_raw.replies.spec import ReplySpec, bundled
from tests.replies.written import TOOLS, is_special, split, written

SIZES = (1_000, 100_000)
CASES = ("hermes", "harmony", "qwen3_coder", "gemma4", "lfm2", "minimax_m3")


def pieces(spec: ReplySpec, kind: str, n: int) -> list[str]:
    """A reply of about *n* tokens, which is nearly all reasoning, content, or one call."""
    text = "some words " * (n // 2)
    texts = {
        "reasoning": written(spec, reasoning=text),
        "content": written(spec, content=text),
    }
    texts["text"] = written(spec, calls=[("look_up", {"text": text})])
    texts["tags"] = written(spec, calls=[("look_up", {"tags": ["word"] * (n // 5)})])
    reply = texts[kind]
    step = max(1, len(reply) // n)
    return split(spec, reply, range(0, len(reply), step))


def microseconds(spec: ReplySpec, tokens: list[str]) -> float:
    """Microseconds a token."""
    begin = time.process_time()
    parser = ReplyParser(spec, tools=TOOLS)
    for token in tokens:
        parser.feed(token, token in spec.special)
    parser.finish()
    return (time.process_time() - begin) / len(tokens) * 1e6


def main() -> None:
    print(
        "family        kind       µs a token of: "
        + "".join(f"{n:>10,}" for n in SIZES)
        + "  ratio"
    )
    for family in CASES:
        spec = bundled()[family].bound(is_special)
        for kind in ("reasoning", "content", "text", "tags"):
            replies = [pieces(spec, kind, n) for n in SIZES]
            runs = [
                [microseconds(spec, tokens) for tokens in replies] for _ in range(9)
            ]
            costs = [min(costs) for costs in zip(*runs, strict=True)]
            columns = "".join(f"{cost:10.1f}" for cost in costs)
            print(
                f"{family:14}{kind:28}{columns}{costs[1] / costs[0]:7.2f}", flush=True
            )


if __name__ == "__main__":
    main()
