"""
Many continuations of one prompt: how likely each is, and which of some labels is the likeliest.

Rules:
1. Each continuation is a request that has the prompt, and scores its own tokens alone. All enter
   together, or none. The first one computes the prompt, and the others take it over: as many at
   once as there are slots, so a step has the tokens of them all.
2. A text goes on as one text, because that is how models see texts: " Paris" may be one token
   where a blank and "Paris" would be two. Ids stay as they are, and so do the tokens of a chat,
   behind which a text is plain text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp
from typing import TYPE_CHECKING, Literal, get_args

from pyllama_raw.api.results import LabelScore, Likelihood
from pyllama_raw.core.memory.snapshots import n_common
from pyllama_raw.core.request import Scoring
from pyllama_raw.errors import InvalidRequest, TextTooLong
from pyllama_raw.options.sampling import SamplingParams

if TYPE_CHECKING:
    from array import array

    from pyllama_raw.api.preparation import Choice
    from pyllama_raw.engine.mailbox import Workers
    from pyllama_raw.engine.parts import EngineParts
    from pyllama_raw.prompts.prompt import Prompt, PromptEncoder

Measure = Literal["total", "per_token", "per_byte"]
MEASURES: tuple[Measure, ...] = get_args(Measure)


@dataclass(frozen=True, slots=True)
class Continuations:
    """Texts or token ids that are to be scored behind one prompt."""

    name: str  # of the argument that has them
    texts: Sequence[str | Sequence[int]]  # checked: one or more, none of them empty


class Branches:
    """Makes requests of continuations, for one engine."""

    def __init__(
        self,
        parts: EngineParts,
        encoder: PromptEncoder,
        workers: Workers,
        request_ids: Iterator[int],
    ) -> None:
        """As of Preparation."""
        self._parts = parts
        self._encoder = encoder
        self._workers = workers
        self._request_ids = request_ids

    async def prepare(
        self, prompt: Prompt, choice: Choice, continuations: Continuations
    ) -> tuple[Choice, ...]:
        """
        An output for each of *continuations* of *prompt*, whose own output is *choice*.

        Raises:
            InvalidRequest: a continuation has no token of its own, or there are too many.
            TextTooLong, ClosedError.
        """
        request, n_branches = choice.request, len(continuations.texts)
        params = request.sampling
        assert isinstance(params, SamplingParams)
        read = partial(self._continued, prompt, request.tokens, continuations)
        prompts = await self._workers.run("text", read)
        # All of them wait at once, so there are no more than an idle engine takes.
        admission, longest = self._parts.admission, max(map(len, prompts))
        n_fitting = min(admission.max_waiting, admission.max_waiting_tokens // longest)
        if n_branches > admission.n_slots + n_fitting:
            allowed = (
                f"at most {admission.n_slots + n_fitting} behind a prompt of "
                f"{len(request.tokens)} tokens, or raise max_waiting or max_waiting_tokens"
            )
            raise InvalidRequest(continuations.name, n_branches, allowed)
        choices, request_id = [], request.request_id
        for index, tokens in enumerate(prompts):
            first = n_common(request.tokens.tobytes(), tokens.tobytes())
            branch = replace(
                request,
                request_id=request_id,
                tokens=tokens,
                scoring=Scoring(first, params.prompt_logprobs or 0),
                # Memory that cannot be cut has the prompt for the others if it stands there.
                cache_points=(*request.cache_points, first - 1),
            )
            choices.append(choice.branch(index, branch))
            request_id = next(self._request_ids)
        return tuple(choices)

    def _continued(
        self, prompt: Prompt, tokens: array[int], continuations: Continuations
    ) -> list[array[int]]:
        """Tokens of *prompt* with each of *continuations*. Thread: a worker."""
        encoder, name = self._encoder, continuations.name

        def alone(text: str) -> array[int]:
            return encoder.encode_text(text, adds=False, parses=False)

        def joined(text: str) -> array[int]:
            assert isinstance(prompt, str)
            together = encoder.encode_text(prompt + text, adds=True, parses=True)
            # Nothing tells how likely a first token is, so that one must be of the prompt.
            is_apart = together[:1] != tokens[:1]
            return tokens + alone(text) if is_apart else together

        n_most = self._parts.scheduler.limits.n_ctx_slot - 1
        prompts: list[array[int]] = []
        for index, text in enumerate(continuations.texts):
            joins = isinstance(prompt, str) and isinstance(text, str)
            encode = joined if joins else alone
            (of_text,) = encoder.encode_texts([text], index, name, encode)
            together = of_text if joins else tokens + of_text
            where, n_tokens = f"{name}[{index}]", len(together)
            if n_tokens > n_most:
                advice = "shorten it or the prompt, or raise n_ctx"
                raise TextTooLong(where, n_tokens, n_most, advice)
            if together == tokens[:n_tokens]:
                raise InvalidRequest(where, text, "a text with a token of its own")
            prompts.append(together)
        return prompts


def label_scores(
    labels: Sequence[str], likelihoods: Sequence[Likelihood], measure: str
) -> list[LabelScore]:
    """*labels* by the softmax of the *measure* of their *likelihoods*, the likeliest first."""
    values = [getattr(likelihood, measure) for likelihood in likelihoods]
    # Beside the best one, because exp() of each alone could be 0.
    best = max(values)
    weights = [exp(value - best) for value in values]
    triples = zip(labels, likelihoods, weights, strict=True)
    scores = [
        LabelScore(index, label, weight / sum(weights), likelihood)
        for index, (label, likelihood, weight) in enumerate(triples)
    ]
    return sorted(scores, key=lambda score: -score.probability)
