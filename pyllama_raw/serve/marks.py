"""
The positions of tokens that marks in a chat stand for.

A prefix is rendered alone and compared with the whole: what both begin with is the same in the
next prompt, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from pyllama_raw import PyllamaError
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.conversation import ChatTurns

MAX_MARKS = 4
PROBE = {"role": "user", "content": "\N{REPLACEMENT CHARACTER}"}


async def points_of(chat: ChatTurns, asked: Asked) -> tuple[int, ...]:
    """The end of each marked prefix; none where the cache needs no such places."""
    engine, options = asked.found.engine, dict(asked.of_chat)
    if not chat.marks or engine.info.can_cut:
        return ()
    points: set[int] = set()
    try:
        whole = await engine.tokenize(chat.messages, **options)
    except PyllamaError:  # the request itself says what is wrong
        return ()
    variables = options.get("template_kwargs") or {}
    options["template_kwargs"] = {**variables, "add_generation_prompt": False}
    for mark in sorted(chat.marks)[-MAX_MARKS:]:
        prefix: list[Any] = [*chat.messages[:mark]]
        if prefix[-1]["role"] == "system":  # many templates want a user's message
            prefix.append(PROBE)
        try:
            points.add(_n_common(whole, await engine.tokenize(prefix, **options)))
        except PyllamaError:  # the template takes no such chat
            continue
    return tuple(sorted(points - {0}))


def _n_common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
