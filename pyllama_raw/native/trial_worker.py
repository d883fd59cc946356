"""
A process that compiles constraints, so that one which takes too much ends this process only.

The system ends the process when a constraint computes for too long, and limits its memory.
Neither can be had inside of an engine: a library that gets no memory, or recurses too deeply,
ends its process. The process also ends with the one that asks it, because its input then ends.

Messages are lines of JSON. The first one has the vocabulary and the limits; an empty line answers
that all is there. Each further one is a constraint, whose answer has what is wrong with it and how
many bytes it takes.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any

from pyllama_raw._ffi import llguidance

MAX_TOKENIZERS = 2  # each has the whole vocabulary
MAX_STACK_BYTES = 2**22  # half of what the threads of an engine usually have


def main() -> None:
    """Serve until the input ends."""
    # Limits hold before anything of a stranger is read.
    setup = json.loads(sys.stdin.readline())
    _limit(setup["max_bytes"])
    max_cpu_s = setup["max_cpu_s"]
    lib = llguidance.load()
    joined = setup["pieces"].encode("latin-1")
    ends = [0, *setup["ends"]]
    pieces = [joined[a:b] for a, b in pairwise(ends)]
    in_use = llguidance.memory_counter()

    @lru_cache(MAX_TOKENIZERS)
    def tokenizer(named_tokens: frozenset[int]) -> tuple[Any, object]:
        texts = [b"\xff" + p if t in named_tokens else p for t, p in enumerate(pieces)]
        return llguidance.new_tokenizer(lib, texts, setup["eog"], None)

    mask = llguidance.declared().new("uint32_t[]", (len(pieces) + 31) // 32)
    sys.stdout.write("\n")
    sys.stdout.flush()
    for line in sys.stdin:
        constraint = json.loads(line)
        # The timer ends the process: no library has to give up by itself.
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        pointer, _ = tokenizer(frozenset(constraint["named"]))
        # The first mask compiles more, and shows mistakes that compiling does not.
        before = in_use()
        kind, text = constraint["kind"], constraint["text"]
        matcher = llguidance.new_matcher(lib, pointer, kind, text)
        lib.llg_matcher_compute_mask_into(matcher, mask, 4 * len(mask))
        answer = {
            "error": llguidance.error_of(lib, matcher),
            "bytes": in_use() - before,
        }
        lib.llg_free_matcher(matcher)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit(max_bytes: int) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    limits = (
        (resource.RLIMIT_AS, max_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_STACK, MAX_STACK_BYTES),
    )
    for limit, size in limits:
        with suppress(ValueError, OSError):  # macOS has no limit on addresses
            resource.setrlimit(limit, (size, size))
