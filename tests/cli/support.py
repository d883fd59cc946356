"""A terminal to look at, and results to show on it."""

import io

from pyllama_raw.api.results import Result, Timings, Usage
from pyllama_raw.core.request import (
    FinishDetail,
    FinishReason,
    SamplerUse,
    TokenLogprobs,
)


class FakeTty(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def make_result(
    text: str = "text",
    *,
    reason: FinishReason = FinishReason.LENGTH,
    token_ids: tuple[int, ...] = (1, 2),
    usage: Usage | None = None,
    ttft_s: float | None = 0.5,
    itl_s: tuple[float, ...] = (0.25,),
    index: int = 0,
    logprobs: tuple[TokenLogprobs, ...] = (),
    detail: FinishDetail | None = None,
) -> Result:
    timings = Timings(0.0, ttft_s, None, None, None, 1.0, itl_s)
    usage = usage or Usage(3, len(token_ids), 0)
    return Result(
        text,
        token_ids,
        reason,
        usage,
        timings,
        seed=7,
        index=index,
        logprobs=logprobs,
        sampler=SamplerUse("host", "of a test"),
        finish_detail=detail,
    )
