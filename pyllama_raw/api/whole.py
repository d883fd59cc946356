"""Results of calls that give them all at once: cut text is no result there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllama_raw.errors import ClosedError, DeadlineExceeded, InvalidRequest
from pyllama_raw.prompts.prompt import Prompt

if TYPE_CHECKING:  # the rest comes in while a model loads
    from pyllama_raw.api.generation import Generation
    from pyllama_raw.api.results import Result, Score


def whole(results: tuple[Result, ...]) -> tuple[Result, ...]:
    """The *results*. Raises ClosedError if the engine was closed before all had ended."""
    from pyllama_raw.core.request import FinishReason

    if any(result.finish_reason is FinishReason.CLOSED for result in results):
        raise ClosedError(
            "the engine was closed before the output was whole: `results` of this error "
            "has what there is; aclose(drain_s=...) waits for what runs",
            results,
        )
    return results


async def score_of(generation: Generation, prompt: Prompt) -> Score:
    """
    The likelihood of *prompt*, which *generation* scores.

    Raises:
        InvalidRequest: it is a single token.
        DeadlineExceeded, ClosedError: the request ended before every token had its score.
    """
    from pyllama_raw.api.results import Score

    tokens = generation.prompt_token_ids
    if len(tokens) < 2:
        raise InvalidRequest("prompt", prompt, "two tokens or more")
    (result,) = whole((await generation.collect(),))
    n_scored, n_wanted = len(result.prompt_logprobs), len(tokens) - 1
    if n_scored < n_wanted:
        raise DeadlineExceeded(n_scored, n_wanted)
    return Score(tokens, result.prompt_logprobs)
