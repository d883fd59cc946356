"""
Spoils replies of every bundled specification and takes them apart.

    python -m scripts.mutate_replies --n 10000

Replies are written as a family of models writes them, then cut, repeated, mixed and strewn with
delimiters. Each must be read without an exception, alike in any pieces, and no letter of its texts
may be lost. The texts are Greek, because no delimiter is.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from pyllama_raw.replies.parser import CallDelta, Part
from pyllama_raw.replies.spec import ReplySpec, bundled, strings_of
from tests.replies.written import Made, is_special, parsed, split, written

WORDS = ["αλφα", "βητα", "γαμμα", "δελτα", "εψιλον", "ζητα", "ητα", "θητα"]
NOISE = [
    " ",
    "\n",
    '"',
    "'",
    "\\",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    ",",
    ":",
    "=",
    "1",
    "λ",
    "\\u",
]


def drawn_text(rng: random.Random) -> str:
    return rng.choice([" ", "\n", ""]).join(rng.choices(WORDS, k=rng.randint(1, 4)))


def drawn_call(rng: random.Random) -> Made:
    values = {
        "text": drawn_text(rng),
        "count": rng.randint(-9, 9),
        "tags": [drawn_text(rng)],
        "more": {"deep": rng.choice([1.5, None, drawn_text(rng)])},
        "flag": rng.choice([True, False]),
    }
    keys = rng.sample(list(values), k=rng.randint(0, len(values)))
    return rng.choice(["look_up", "wait", "other"]), {key: values[key] for key in keys}


def drawn_reply(spec: ReplySpec, rng: random.Random) -> str:
    return written(
        spec,
        reasoning=rng.choice(["", drawn_text(rng)]),
        content=rng.choice(["", drawn_text(rng)]),
        calls=[drawn_call(rng) for _ in range(rng.randint(0, 3))],
    )


def spoiled(text: str, delimiters: list[str], rng: random.Random) -> str:
    """*text* with one to four mutations."""
    for _ in range(rng.randint(1, 4)):
        a, b = sorted(rng.choices(range(len(text) + 1), k=2))
        b = min(b, a + rng.choice([1, 3, 10, 40]))
        text = rng.choice(
            [
                text[:a],
                text[:a] + text[b:],
                text[:b] + text[a:],
                text[:a] + rng.choice(NOISE) + text[a:],
                text[:a] + rng.choice(delimiters) + text[a:],
                text[:a] + rng.choice(delimiters) + text[b:],
                text[:a] + rng.choice(delimiters)[:-1] + text[a:],
            ]
        )
    return text


def letters(text: str) -> Counter[str]:
    return Counter(char for char in text if "\u03b1" <= char <= "\u03ce")


def said(parts: list[Part]) -> str:
    """All that *parts* say, but for ids that repeat a header."""
    texts: list[str] = []
    for part in parts:
        if not isinstance(part, CallDelta):
            texts.append(part.text)
            continue
        repeated = (part.name or "") in (part.id or "")
        texts += [part.name or "", part.arguments, "" if repeated else part.id or ""]
    return "".join(texts)


def check(spec: ReplySpec, rng: random.Random) -> None:
    """Spoil one reply and read it. Raises: AssertionError with the reply, if it is read wrongly."""
    delimiters = [
        text for text in strings_of(spec.model_dump(exclude={"markers"})) if text
    ]
    text = spoiled(drawn_reply(spec, rng), delimiters, rng)
    prefix = rng.choice(["", spec.reasoning.start[0]]) if spec.reasoning else ""
    cuts = rng.choices(range(len(text) + 1), k=rng.choice([1, 5, len(text)]))
    try:
        at_once = parsed(spec, split(spec, text, []), prefix=prefix)
        pieces = parsed(spec, split(spec, text, cuts), prefix=prefix)
    except Exception as error:
        raise AssertionError(f"{text!r} after {prefix!r} raised {error!r}") from error
    assert at_once == pieces, f"{text!r} after {prefix!r}: {at_once} is not {pieces}"
    assert letters(said(at_once)) == letters(text), (
        f"{text!r} after {prefix!r}: {at_once}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Spoils replies and takes them apart.")
    parser.add_argument(
        "--n", type=int, default=1000, help="replies for each specification"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", help="one specification instead of all")
    options = parser.parse_args()
    failed = 0
    for family, plain in bundled().items():
        if options.family not in (None, family):
            continue
        begin = time.perf_counter()
        specs = [plain, plain.bound(is_special)]
        for n in range(options.n):
            try:
                check(specs[n % 2], random.Random(f"{options.seed} {family} {n}"))  # noqa: S311
            except AssertionError as error:
                failed += 1
                print(f"{family} {n}: {error}")
        print(
            f"{family}: {options.n} replies, {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
    print(f"{failed} replies were read wrongly.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
