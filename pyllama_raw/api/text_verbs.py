"""The verbs of an engine whose model generates: texts and tokens, one output or many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Unpack

from pyllama_raw.api.facts import Facts
from pyllama_raw.api.many import complete_all
from pyllama_raw.errors import ClosedError, DeadlineExceeded, InvalidRequest
from pyllama_raw.options.arguments import (
    checked_chat,
    checked_flag,
    checked_options,
    checked_params,
    checked_prompts,
    checked_top,
)
from pyllama_raw.prompts.messages import Message
from pyllama_raw.prompts.prompt import Prompt

if TYPE_CHECKING:  # the rest comes in while a model loads
    from pyllama_raw.api.generation import Generation
    from pyllama_raw.api.preparation import Preparation
    from pyllama_raw.api.results import Result, Score
    from pyllama_raw.options.requests import ChatOptions, RequestOptions
    from pyllama_raw.options.sampling import SamplingParams


class TextVerbs(Facts):
    """From prompts to text."""

    _preparation: Preparation

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """
        Token ids of *prompt* as the model gets them; rows of images and sounds are negative.

        Control tokens that are spelled in a text are understood, because a program writes
        it. In messages of a chat, and in what embed() and rank() take, they stay text,
        because a user may have written that.

        Args:
            add_special: a text gets the tokens that begin and end prompts of the model.
            parse_special: False: control tokens that are spelled in a text stay text, too.

        Raises:
            InvalidRequest, PromptTooLong, Unsupported, ClosedError: as generate().
        """
        chat = checked_chat(options)
        adds = checked_flag("add_special", add_special)
        parses = checked_flag("parse_special", parse_special)
        if adds and parses:
            return list(await self._preparation.encode(prompt, chat))
        if not isinstance(prompt, str) or chat:
            allowed = (
                "a text without chat options, or leave add_special and parse_special"
            )
            raise InvalidRequest("prompt", prompt, allowed)
        tokens = self._preparation.encode_text(prompt, adds=adds, parses=parses)
        return list(await tokens)

    async def pieces(
        self, token_ids: Sequence[int], special: bool = True
    ) -> list[bytes]:
        """
        The bytes of each of *token_ids*, which may be a part of a character.

        Args:
            special: control tokens have their names; otherwise nothing.
        """
        return await self._preparation.pieces(token_ids, special)

    async def detokenize(self, token_ids: Sequence[int], special: bool = False) -> str:
        """
        The text of *token_ids*; bytes that are no UTF-8 become U+FFFD.

        Args:
            special: control tokens are written, too.
        """
        return await self._preparation.detokenize(token_ids, special)

    async def count(self, prompt: Prompt, **options: Unpack[ChatOptions]) -> int:
        """
        Tokens of *prompt*, as `usage.prompt_tokens` will tell.

        Raises:
            InvalidRequest, PromptTooLong, Unsupported, ClosedError: as generate().
        """
        return len(await self._preparation.encode(prompt, checked_chat(options)))

    async def render(
        self, messages: Sequence[Message], **options: Unpack[ChatOptions]
    ) -> str:
        """The text that the chat template makes of *messages*; raises as generate()."""
        return await self._preparation.render(messages, checked_chat(options))

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """
        A stream of output for *prompt*; use it as `async with`, then `async for`.

        Args:
            prompt: text, token ids, or chat messages with "role" and "content".
            params: with n > 1 deltas carry the index of their output; the engine takes
                all n requests or refuses all, and leaving the block ends all.
            options: see RequestOptions.

        Raises, at once:
            Unsupported: the model generates no text.
            TypeError: there is no such option.
            InvalidRequest: *params* or an option is not allowed.
        Raises, on entering the block:
            InvalidRequest, PromptTooLong, Unsupported, QueueFull, ClosedError,
            EngineStopped.
        Raises, on reading:
            NativeError, EngineFault, EngineStalled, EngineStopped.
        """
        from pyllama_raw.api.generation import Generation
        from pyllama_raw.engine.capabilities import Operation

        self._parts.capabilities.check(Operation.GENERATE)
        params, checked = checked_params(params), checked_options(options)
        prepare = partial(self._preparation.prepare, prompt, params, checked)
        return Generation(self._thread, self._parts.vocab.pieces, prepare)

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """
        Like generate(), all at once; for one output (n=1).

        Raises, besides:
            ClosedError: the engine was closed before the output was whole; `results`
                has what there was.
        """
        params = checked_params(params)
        if params.n > 1:
            raise InvalidRequest("n", params.n, "1, or use complete_n()")
        async with self.generate(prompt, params, **options) as generation:
            result = await generation.collect()
        _check_whole((result,))
        return result

    async def complete_n(
        self,
        prompt: Prompt,
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> tuple[Result, ...]:
        """
        Like generate(), all *params.n* outputs at once, by index.

        The prompt is computed once, unless the cache is off. Outputs beyond the free
        slots wait in the queue. An output that fails is left out; if all do, the error of
        the first is raised.

        Raises, besides:
            InvalidRequest: n is above what slots and queue hold together.
            ClosedError: as by complete().
        """
        async with self.generate(prompt, params, **options) as generation:
            results = await generation.collect_all()
        _check_whole(results)
        return results

    async def complete_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Result]:
        """
        Results in the order of *prompts*; the first error ends all of them.

        At most twice as many as there are slots are submitted at a time, and what finds
        the queue full waits for another one to end; *deadline_s* counts from there.

        Raises, besides:
            QueueFull: requests of others fill the engine, and none of these runs.
        """
        checked = checked_options(options)  # iterators are read once, for all prompts
        complete = partial(self.complete, params=checked_params(params), **checked)
        admission = self._parts.admission
        n_tasks = min(2 * admission.n_slots, admission.max_requests)
        return await complete_all(complete, checked_prompts(prompts), n_tasks)

    async def score(
        self, prompt: Prompt, n_top: int = 0, **options: Unpack[RequestOptions]
    ) -> Score:
        """
        Tell how likely the model finds each token of *prompt* after those before it.

        Nothing is taken from the cache: every token is computed. One step computes at
        most ContextConfig.n_outputs_max of them.

        Args:
            n_top: most likely tokens listed at each place, 0 to 20.

        Raises:
            InvalidRequest: n_top is something else, or the prompt is a single token:
                there is nothing to score.
            DeadlineExceeded: *deadline_s* was over before every token had its score.
        """
        from pyllama_raw.api.results import Score
        from pyllama_raw.options.sampling import SamplingParams

        n_listed = checked_top(n_top)
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=n_listed)
        async with self.generate(prompt, params, **options) as generation:
            tokens = generation.prompt_token_ids
            if len(tokens) < 2:
                raise InvalidRequest("prompt", prompt, "two tokens or more")
            result = await generation.collect()
        _check_whole((result,))
        n_scored, n_wanted = len(result.prompt_logprobs), len(tokens) - 1
        if n_scored < n_wanted:
            raise DeadlineExceeded(n_scored, n_wanted)
        return Score(tokens, result.prompt_logprobs)


def _check_whole(results: tuple[Result, ...]) -> None:
    """Cut text is no result of a call that has no other way to tell."""
    from pyllama_raw.core.request import FinishReason

    if any(result.finish_reason is FinishReason.CLOSED for result in results):
        raise ClosedError(
            "the engine was closed before the output was whole: `results` of this error "
            "has what there is; aclose(drain_s=...) waits for what runs",
            results,
        )
