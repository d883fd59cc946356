"""
Calls for many at once: prompts in order, and continuations of one prompt.

A call for many prompts is patient with a full queue. Cut text is no result of such calls.

Rules of continuations:
1. Each is a request that has the prompt, and scores its own tokens alone. All enter together, or
   none. The first one computes the prompt, and the others take it over: as many at once as there
   are slots, so a step has the tokens of them all.
2. A text goes on as one text, because that is how models see texts: " Paris" may be one token
   where a blank and "Paris" would be two. Ids stay as they are, and so do the tokens of a chat,
   behind which a text is plain text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, inf
from typing import TYPE_CHECKING, Literal, get_args

import anyio

from pyllama_raw.api.results import LabelScore, Likelihood, Result
from pyllama_raw.core.memory.snapshots import n_common
from pyllama_raw.core.request import Request, Scoring
from pyllama_raw.errors import (
    ClosedError,
    DeadlineExceeded,
    InvalidRequest,
    PyllamaError,
    QueueFull,
    TextTooLong,
    of_prompt,
)
from pyllama_raw.options.arguments import checked_word
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.prompts.prompt import Prompt

if TYPE_CHECKING:
    from array import array

    from pyllama_raw.api.preparation import Choice
    from pyllama_raw.engine.mailbox import Workers
    from pyllama_raw.engine.parts import EngineParts
    from pyllama_raw.prompts.prompt import PromptEncoder

Measure = Literal["total", "per_token", "per_byte"]
MEASURES: tuple[Measure, ...] = get_args(Measure)


async def complete_all(
    complete: Callable[[Prompt], Awaitable[Result]],
    prompts: Iterable[Prompt],
    n_tasks: int,
    progress: Callable[[int], object] | None = None,
    *,
    returns_errors: bool = False,
) -> list[Result | PyllamaError]:
    """
    Complete *prompts* in order, *n_tasks* at a time.

    Args:
        progress: called with the number of prompts that have ended.
        returns_errors: the error of a prompt stands in the place of its result. Otherwise
            the first one ends all, and is raised bare, with the index of its prompt.
    """
    numbered = enumerate(prompts)
    results: dict[int, Result | PyllamaError] = {}
    errors: list[Exception] = []
    complete = _Patient(complete)

    async def end_of(index: int, prompt: Prompt) -> Result | PyllamaError:
        try:
            return await complete(prompt)
        except PyllamaError as error:
            if returns_errors:
                return of_prompt(error, index)
            raise of_prompt(error, index) from error.__cause__

    async def work() -> None:
        try:
            for index, prompt in numbered:
                results[index] = await end_of(index, prompt)
                if progress is not None:
                    progress(len(results))
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)
            group.cancel_scope.cancel()

    if isinstance(prompts, list | tuple):
        n_tasks = min(n_tasks, len(prompts))
    async with anyio.create_task_group() as group:
        for _ in range(n_tasks):
            group.start_soon(work)
    if errors:
        raise errors[0]
    return [results[index] for index in sorted(results)]


class _Patient:
    """Completes prompts; one that finds the queue full waits for another one to end."""

    def __init__(self, complete: Callable[[Prompt], Awaitable[Result]]) -> None:
        self._complete = complete
        self._n_trying = 0
        self._ended = anyio.Event()  # set when one of them ends, then replaced

    async def __call__(self, prompt: Prompt) -> Result:
        while True:
            result = await self._try(prompt)
            if result is not None:
                return result
            await self._ended.wait()

    async def _try(self, prompt: Prompt) -> Result | None:
        """None if the queue was full while others of these were under way."""
        self._n_trying += 1
        is_refused = False
        try:
            return await self._complete(prompt)
        except QueueFull:
            if self._n_trying == 1:
                raise  # nothing that we could wait for
            is_refused = True
            return None
        finally:
            self._n_trying -= 1
            if not is_refused:  # an error frees a place, too
                self._ended.set()
                self._ended = anyio.Event()


def whole(results: tuple[Result, ...]) -> tuple[Result, ...]:
    """The *results*. Raises ClosedError if the engine was closed before all had ended."""
    # By its word: FinishReason comes with what is imported while a model loads.
    if any(result.finish_reason == "closed" for result in results):
        raise ClosedError(
            "the engine was closed before the output was whole: `results` of this error "
            "has what there is; aclose(drain_s=...) waits for what runs",
            results,
        )
    return results


# -- continuations ----------------------------------------------------------------------


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
        request = choice.request
        params = request.sampling
        assert isinstance(params, SamplingParams)
        read = partial(self._continued, prompt, request.tokens, continuations)
        prompts = await self._workers.run("text", read)
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
        n_longest = 0
        prompts: list[array[int]] = []
        for index, text in enumerate(continuations.texts):
            joins = isinstance(prompt, str) and isinstance(text, str)
            encode = joined if joins else alone
            where, n_before = f"{name}[{index}]", 0 if joins else len(tokens)
            advice = "shorten it or the prompt, or raise n_ctx"
            try:
                (of_text,) = encoder.encode_texts([text], index, name, encode)
            # It was read no further than where no slot has room for it.
            except TextTooLong as error:
                n_tokens, is_part = n_before + error.n_tokens, error.is_part
                raise TextTooLong(
                    where, n_tokens, n_most, advice, is_part=is_part
                ) from None
            together = of_text if joins else tokens + of_text
            n_tokens = len(together)
            if n_tokens > n_most:
                raise TextTooLong(where, n_tokens, n_most, advice)
            if together == tokens[:n_tokens]:
                raise InvalidRequest(where, text, "a text with a token of its own")
            # Too many are refused as soon as that is certain, before the others are read.
            if n_tokens > n_longest:
                n_longest = n_tokens
                self._check_number(continuations, len(tokens), n_longest)
            prompts.append(together)
        return prompts

    def _check_number(
        self, continuations: Continuations, n_prompt: int, n_longest: int
    ) -> None:
        """Raise InvalidRequest if there are more than an idle engine takes, as all enter at once."""
        admission, n_branches = self._parts.admission, len(continuations.texts)
        n_fitting = min(
            admission.max_waiting, admission.max_waiting_tokens // n_longest
        )
        if n_branches > admission.n_slots + n_fitting:
            allowed = (
                f"at most {admission.n_slots + n_fitting} behind a prompt of "
                f"{n_prompt} tokens, or raise max_waiting or max_waiting_tokens"
            )
            raise InvalidRequest(continuations.name, n_branches, allowed)


def likelihoods(
    requests: Iterable[Request],
    results: tuple[Result, ...],
    errors: Iterable[PyllamaError],
) -> list[Likelihood]:
    """
    The likelihood of each continuation, in their order.

    Raises:
        DeadlineExceeded, ClosedError: the requests ended before every token had its score.
        PyllamaError: the first of *errors*, which some have failed with.
    """
    for error in errors:
        raise error
    whole(results)
    scores = []
    for request, result in zip(requests, results, strict=True):
        entries = result.prompt_logprobs
        assert request.scoring is not None
        tokens = tuple(request.tokens[request.scoring.first :])
        if len(entries) == len(tokens):
            usage = replace(result.usage, completion_tokens=0)
            scores.append(Likelihood(tokens, entries, usage))
    if len(scores) < len(results):
        raise DeadlineExceeded(len(scores), len(results), "continuations had a score")
    return scores


def checked_measure(measure: object) -> str:
    """One of MEASURES. Raises InvalidRequest."""
    allowed = f"one of {', '.join(MEASURES)}"
    return checked_word("measure", measure, MEASURES, allowed)


def label_scores(
    labels: Sequence[str], likelihoods: Sequence[Likelihood], measure: str
) -> list[LabelScore]:
    """*labels* by the softmax of the *measure* of their *likelihoods*, the likeliest first."""
    shares = softmax([getattr(likelihood, measure) for likelihood in likelihoods])
    scores = [
        LabelScore(index, label, share, likelihood)
        for index, (label, likelihood, share) in enumerate(
            zip(labels, likelihoods, shares, strict=True)
        )
    ]
    return sorted(scores, key=lambda score: -score.probability)


def softmax(logarithms: Sequence[float]) -> list[float]:
    """Probabilities in proportion to the exponentials of *logarithms*; they sum up to 1."""
    # Beside the largest one, because exp() of each alone could be 0.
    largest = max(logarithms)
    # None of them can be at all, and none is likelier than another.
    if largest == -inf:
        return [1 / len(logarithms)] * len(logarithms)
    weights = [exp(value - largest) for value in logarithms]
    total = sum(weights)
    return [weight / total for weight in weights]
