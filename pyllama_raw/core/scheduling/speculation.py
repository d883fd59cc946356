"""
Speculation: drafts of what streams will say next, and how many of them are worth a step.

1. A draft is what followed the latest tokens of a sequence where they stood before: see
   `Lookup`. A constraint that lets one text follow has drafts, too, and they come first. Where
   there is a draft model, it goes on with sequences of which nothing better is known.
2. A step with drafts computes their rows beside those of streams. The request's own sampler
   accepts drafts for as long as it samples just them, so no output depends on them.
3. What is expected is compared with each token that comes, drafted or not. So it costs nothing
   to learn how often drafts of a request are right: by the length of a match, or by the
   probability that the draft model gave.
4. A step has as many drafts as have its streams go on fastest: each row by the chance that it is
   reached, and the step by the time that steps with so many rows take. Drafts of one stream slow
   all others, so the geometric mean of the streams counts. Without a gain of MIN_GAIN it has none,
   nor without one of FIRST_GAIN where the step before had none.
5. The step after a steady plan is begun already. It has no drafts, and its plan is not steady.
6. A look takes time for each stream, and a draft is worth less the more streams there are. So n
   streams for which no draft is worth it are looked at again after n steps, MAX_REST at most.
   Neither tokens that a constraint forces nor a draft model wait for that.
7. There are none beside prompts, where memory is short and after failures.
8. Steps of the draft model take the streams' time, so a plan of it counts with the step that
   verifies what it says, and two of them never follow each other. Where it would lose it is tried
   now and then, in TRIAL_SHARE of the time. Heads of the model itself stand for a draft model that
   holds all tokens but the latest.

Source: Leviathan, Kalman and Matias, Fast Inference from Transformers via Speculative Decoding,
2023, with a draft that is certain.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import exp, log1p
from typing import NamedTuple

from pyllama_raw.core.costs import CostHistory
from pyllama_raw.core.lookup import FIRST_CHANCES, Drafting, Lookup, SharedTexts
from pyllama_raw.core.memory.memory import Memory
from pyllama_raw.core.request import DRAFTS, Namespace, Private, is_of
from pyllama_raw.core.sequence import Running, Sequence
from pyllama_raw.core.step import (
    Lost,
    Propose,
    Proposed,
    StepPlan,
    StepResult,
    Verify,
    Work,
)

MAX_DEPTH = 16  # drafts of a sequence in a step
MIN_GAIN = 1.05  # times the tokens a second without drafts
FIRST_GAIN = 1.1  # likewise after a step without: two steps are not begun ahead then
MIN_CHANCE = 0.1  # of a draft to be reached and accepted; a less likely one is left out
MAX_REST = 5  # steps from a look in vain to the next one
REFRESH = 8  # steps after which what steps take is looked up again

# Of the draft model.
DEPTHS = (1, 2, 3, 4, 6, 8, 12, MAX_DEPTH)  # that are compared
TRIAL_DEPTH = 4  # before anything is known
TRIAL_SHARE = 0.01  # of the time, that trials may take where nothing is gained
FIRST_TRIALS_S, MAX_TRIALS_S = 0.25, 1.0  # of trials at first, and in a row
MAX_CATCH_UP = 256  # tokens that it computes in a step, which keeps streams waiting
LEAST_LEFT = 32  # tokens that an output is expected to have left, or as many as it has
PAUSE = 8  # steps until it is considered again; after a failure twice as many each time
MAX_PAUSE = 2**14


class DraftOffer(NamedTuple):
    """Drafts of a sequence, and the chance of each to be reached and accepted."""

    running: Running
    draft: array[int]
    chances: list[float]


class DraftChoice(NamedTuple):
    """Drafts of a step by slot, and the tokens and seconds that it promises."""

    depths: dict[int, int]
    n_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Limits of the context of a draft model."""

    n_ctx_slot: int
    n_cells: int  # of all slots
    n_batch: int
    n_vocab: int  # tokens that both vocabularies have: ids below it
    of_heads: bool = False  # heads follow the model: they lack the latest token only


class DraftModel:
    """
    What the draft model holds, how often it is right, and what its steps take.

    Args:
        shares: whether requests of one namespace go on behind what others of it have left.
    """

    def __init__(self, limits: DraftLimits, n_slots: int, *, shares: bool) -> None:
        self.limits = limits
        self.costs = CostHistory()
        self.shared = Drafting()  # of all requests, from which new ones begin
        self.trials_s = FIRST_TRIALS_S  # that may be lost
        self.pause = 0  # steps
        self._n_failures = 0  # in a row
        self._shares = shares
        # By slot: tokens that it holds, and the namespace and the request that they are of.
        self._contents = [array("i") for _ in range(n_slots)]
        self._owners: list[tuple[Namespace, int | None]] = [(Private(), None)] * n_slots

    def drafting(self, sequence: Sequence) -> Drafting:
        """That of *sequence*, which has seen all of its tokens."""
        if sequence.drafting is None:
            sequence.drafting = self.shared.copy()
        sequence.drafting.follow(sequence.tokens, self.shared)
        return sequence.drafting

    def clear(self, salt: str | None) -> None:
        """Have no request go on behind what others of *salt* have left, None: of any."""
        for slot, (namespace, request_id) in enumerate(self._owners):
            if is_of(namespace, salt):
                self._owners[slot] = (Private(), request_id)

    def can_read(self, running: Running, drafting: Drafting) -> bool:
        """Whether it knows all tokens of *running*, and has room for more in a slot."""
        tokens = running.tokens
        newest = max(tokens[drafting.n_read :], default=0)
        drafting.n_read = len(tokens)
        drafting.is_readable = drafting.is_readable and newest < self.limits.n_vocab
        has_room = len(tokens) + MAX_DEPTH < self.limits.n_ctx_slot
        return drafting.is_readable and has_room and not running.request.spans

    def n_held(self, running: Running) -> int:
        """
        First tokens of *running* that its slot holds, less than all.

        Whoever of its namespace was there before counts as well: accepted, rejected, cancelled
        and preempted sequences are told apart by their tokens alone.
        """
        if self.limits.of_heads:
            return len(running.tokens) - 1
        slot, drafting = running.slot, running.sequence.drafting
        assert drafting is not None
        content, tokens, request = self._contents[slot], running.tokens, running.request
        namespace, request_id = self._owners[slot]
        is_own = request_id == request.request_id
        # Time and counts of drafts would tell what another namespace has said.
        if not (is_own or (self._shares and namespace == request.namespace)):
            return 0
        n_same = drafting.n_held if is_own else 0
        n_most = min(len(content), len(tokens) - 1)
        # Nearly always all of it, so it is compared at once.
        if content[n_same:n_most] == tokens[n_same:n_most]:
            return n_most
        while content[n_same] == tokens[n_same]:
            n_same += 1
        return n_same

    def seconds(self, n_tokens: int, n_rows: int, depth: int) -> float | None:
        """Of a step that computes *n_tokens* of *n_rows* sequences first; None: unknown."""
        cost = self.costs.cost
        if cost is None:
            return None
        first_s = cost.seconds(n_tokens, n_rows if depth else 0)
        return first_s + max(depth - 1, 0) * cost.seconds(n_rows, n_rows)

    def plan(self, followers: Items[Running], depth: int) -> StepPlan:
        """A step for *followers*: drafts, or a part of what it lacks if that is much."""
        works, n_left = list[Work](), min(self.limits.n_batch, MAX_CATCH_UP)
        n_held = [self.n_held(running) for running in followers]
        n_missing = [len(r.tokens) - n for r, n in zip(followers, n_held, strict=True)]
        # What does not fit a step is computed in several, and drafts come after the last one.
        depth = depth if sum(n_missing) <= n_left else 0
        for running, start, n_tokens in zip(followers, n_held, n_missing, strict=True):
            chunk = running.tokens[start : start + min(n_tokens, n_left)]
            n_left -= len(chunk)
            if chunk:
                request, slot = running.request, running.slot
                # What was behind it is another text, also if the plan is not computed.
                del self._contents[slot][start:]
                self._owners[slot] = (request.namespace, request.request_id)
                works.append(Propose(request.request_id, slot, start, chunk, depth))
        return StepPlan((), tuple(works), DRAFTS)

    def take(self, plan: StepPlan, result: StepResult) -> None:
        """Take in what became of *plan*: the slots are told by their tokens from now on."""
        n_tokens, n_outputs = plan.n_tokens, 0
        if all(type(output) is Proposed for output in result.outputs):
            n_outputs = len(plan.works)
        for seconds in result.draft_s:
            self.costs.observe(n_tokens, n_outputs, seconds)
            n_tokens = len(plan.works)  # each draft is computed for the next one
        for work, output in zip(plan.works, result.outputs, strict=True):
            content = self._contents[work.slot]
            if type(output) is Lost:
                del content[:]
                continue
            content += work.tokens
            if type(output) is Proposed:
                content += array("i", output.tokens[:-1])
        # It failed: the next try is later each time, and no request is concerned.
        self._n_failures = self._n_failures + 1 if result.error is not None else 0
        if self._n_failures:
            self.pause = min(PAUSE << self._n_failures, MAX_PAUSE)


class Speculation:
    """Puts drafts into plans; one of an engine."""

    def __init__(
        self,
        memory: Memory,
        costs: CostHistory,
        draft: DraftLimits | None = None,
        *,
        is_exact: bool = False,
    ) -> None:
        self._memory = memory
        self._is_exact = is_exact
        self._slots = memory.slots
        self._costs = costs
        self._chances = list(FIRST_CHANCES)  # of new requests
        self._texts = SharedTexts()
        self._is_begun = False  # the next step, by a steady plan
        self._has_drafts = False  # the plan before, or it is one of the draft model
        self._least_gain = FIRST_GAIN
        self._n_rest = 0  # steps until drafts are looked for
        # Seconds of steps by their rows, and the steps until they are looked up again.
        self._seconds: list[float] = []
        self._n_fresh = 0
        limits = memory.slots.limits
        self._model: DraftModel | None = None
        if draft is not None:
            n_slots = limits.n_slots + limits.n_parked
            self._model = DraftModel(draft, n_slots, shares=memory.reuses)
        self._has_proposed = False  # the plan before was one of the draft model
        self._is_trial = False  # it was one that would lose
        n_most = min(limits.n_outputs or limits.n_slots, limits.n_batch)
        self._n_most = min(n_most, limits.n_ubatch or n_most)  # rows of a step

    # -- texts of other requests -------------------------------------------------

    def remember(self, sequence: Sequence) -> None:
        """Show *sequence*, which ends, to later ones of its namespace, if they share prefixes."""
        request = sequence.request
        if not self._memory.reuses or request.spans or sequence.is_shifted:
            return
        texts = self._texts.of(request.namespace)
        # What it had of others was shown by them.
        if texts is not None:
            texts.add(sequence.tokens[sequence.n_cached :])

    def clear(self, salt: str | None) -> None:
        """Forget texts of ended requests of *salt*, None: all."""
        self._texts.clear(salt)
        if self._model is not None:
            self._model.clear(salt)

    # -- a step ------------------------------------------------------------------

    def extend(
        self, plan: StepPlan, streams: Items[Running], *, alone: bool
    ) -> StepPlan:
        """
        *plan* with drafts, or one of the draft model in its place.

        Args:
            streams: one for each of the first works, which are decodes.
            alone: nothing else is to be computed, and memory is not short.
        """
        # What a constraint forces it forces again, and that is worth more than a step ahead.
        forces = any(running.sequence.forces for running in streams)
        if plan.steady and forces:
            plan = plan._replace(steady=False)
        is_begun, self._is_begun = self._is_begun, plan.steady
        has_proposed, self._has_proposed = self._has_proposed, False
        had_drafts, self._has_drafts = self._has_drafts, False
        self._least_gain = MIN_GAIN if had_drafts else FIRST_GAIN
        if not alone or not self._slots.limits.kind.can_cut:
            return plan
        # libllama multiplies adapters, and adds several columns in another order than one.
        if self._is_exact and plan.lot.adapters:
            return plan
        self._n_rest -= 1
        self._n_fresh -= 1
        if self._n_rest > 0 and not forces:
            return plan
        # A step with drafts says what more rows cost.
        if had_drafts or self._n_fresh <= 0 or not self._seconds:
            self._seconds = self._costs.decode_seconds(self._n_most)
            self._n_fresh = REFRESH
        n_streams = len(streams)
        if len(self._seconds) <= n_streams:
            return plan
        offers = [offer for r in streams if (offer := self._offer(r)) is not None]
        proposal, depths = None, dict[int, int]()
        if self._model is not None and not has_proposed:
            proposal = self._proposal(self._model, streams, offers)
        if offers and not proposal:
            depths = self._choose(n_streams, offers).depths
        if not (depths or proposal):
            if self._model is None:
                self._n_rest = min(n_streams, MAX_REST)
            return plan
        # The plan before was steady: this step is begun, and the next one may have drafts.
        self._is_begun, plan = False, plan._replace(steady=False)
        if is_begun:
            # A trial comes then, too.
            if proposal and self._model is not None:
                self._model.pause = 0
            return plan
        if proposal:
            self._has_proposed = self._has_drafts = True
            return proposal
        return self._with_drafts(plan, offers, depths)

    def take(self, plan: StepPlan, result: StepResult) -> None:
        """Take in drafts that the draft model has made."""
        model = self._model
        assert model is not None
        if self._is_trial:
            model.trials_s -= sum(result.draft_s)
        model.take(plan, result)
        for work, output in zip(plan.works, result.outputs, strict=True):
            running = self._slots.running.get(work.request_id)
            if running is None or running.sequence.drafting is None:
                continue
            drafting, n_known = running.sequence.drafting, work.pos + len(work.tokens)
            drafting.n_held = n_known
            if type(output) is Proposed and n_known == len(running.tokens):
                # What the request's model does not know, it will not say.
                tokens, n_vocab = output.tokens, model.limits.n_vocab
                ends = (n for n, token in enumerate(tokens) if token >= n_vocab)
                stop = next(ends, len(tokens))
                drafting.propose(n_known, tokens[:stop], output.chances[:stop])

    def _with_drafts(
        self, plan: StepPlan, offers: Items[DraftOffer], depths: dict[int, int]
    ) -> StepPlan:
        # Rejected drafts leave their cells at once, so no more are promised to anybody.
        n_rows = len(plan.works) + sum(depths.values())
        self._memory.reclaim(n_rows)
        if self._slots.n_free_cells < n_rows:
            return plan
        self._has_drafts = True
        drafts = {offer.running.slot: offer.draft for offer in offers}
        plain = [work for work in plan.works if work.slot not in depths]
        verified = [
            Verify(
                work.request_id,
                work.slot,
                work.pos,
                work.tokens + drafts[work.slot][: depths[work.slot]],
            )
            for work in plan.works
            if work.slot in depths
        ]
        return plan._replace(works=(*plain, *verified))

    # -- what a sequence may say -------------------------------------------------

    def _offer(self, running: Running) -> DraftOffer | None:
        """Drafts of *running*; None: there are none."""
        sequence, request, tokens = running.sequence, running.request, running.tokens
        if not request.speculates or running.points:
            return None
        lookup = sequence.lookup
        if lookup is None:
            texts = self._texts.of(request.namespace) if self._memory.reuses else None
            lookup = sequence.lookup = Lookup(self._chances.copy(), texts)
        is_known = lookup.follow(tokens, self._chances) and lookup.source
        drafting = None if self._model is None else self._model.drafting(sequence)
        # Mostly nothing is expected, and costs little.
        if not (is_known or drafting or sequence.forced):
            return None
        # It has its last token, or a full slot, with the token that comes anyway.
        n_most = max(min(running.n_full - len(tokens) - 1, MAX_DEPTH), 0)
        draft, chances = array("i"), list[float]()
        if sequence.forced:
            # What is forced comes first, and is as good as certain.
            draft = array("i", sequence.forced[:n_most])
            chances = [1.0] * len(draft)
        elif drafting is not None and drafting.n_ahead:
            draft, chances = drafting.draft(n_most, MIN_CHANCE)
        if is_known:
            expected, likely = lookup.draft(tokens, n_most, MIN_CHANCE)
            if max(likely, default=0) > max(chances, default=0):
                draft, chances = expected, likely
        # An end may be sampled, but nothing follows it. Nor are rows of images sampled.
        ends = (
            n
            for n, token in enumerate(draft)
            if token < 0 or token in request.stop_token_ids
        )
        del chances[next(ends, len(draft)) :]
        return DraftOffer(running, draft, chances) if chances else None

    def _choose(
        self,
        n_rows: int,
        offers: Items[DraftOffer],
        guesses: Items[tuple[int, float]] = (),
        before_s: float = 0.0,
    ) -> DraftChoice:
        """
        The drafts by slot with which streams go on fastest, if any gain enough.

        Args:
            guesses: slots and chances of further drafts.
            before_s: what these take before the step.
        """
        seconds = self._seconds
        items = [(o.running.slot, chance) for o in offers for chance in o.chances]
        # What a draft adds to the tokens of its stream: it falls, so they stay in order.
        ranked, expected = list[tuple[float, int]](), dict[int, float]()
        for slot, chance in (*items, *guesses):
            n_tokens = expected.get(slot, 1.0)
            ranked.append((chance / n_tokens, slot))
            expected[slot] = n_tokens + chance
        ranked.sort(reverse=True)
        # Nobody pays much for another one: the geometric mean of all streams counts.
        choice = DraftChoice({}, n_rows, seconds[n_rows])
        n_best, log_tokens = 0, 0.0
        rate = self._least_gain * n_rows / seconds[n_rows]
        for n_drafts, (gain, _) in enumerate(ranked[: len(seconds) - n_rows - 1], 1):
            log_tokens += log1p(gain)
            n_tokens = n_rows * exp(log_tokens / n_rows)
            step_s = seconds[n_rows + n_drafts] + before_s
            if n_tokens > rate * step_s:
                n_best, rate = n_drafts, n_tokens / step_s
                choice = DraftChoice({}, n_tokens, step_s)
        for _, slot in ranked[:n_best]:
            choice.depths[slot] = choice.depths.get(slot, 0) + 1
        return choice

    # -- what the draft model may say ----------------------------------------------

    def _proposal(
        self, model: DraftModel, streams: Items[Running], offers: Items[DraftOffer]
    ) -> StepPlan | None:
        """A step of the draft model, if it gains; None: there is none now."""
        trials_s = model.trials_s + TRIAL_SHARE * self._seconds[len(streams)]
        model.trials_s = min(trials_s, MAX_TRIALS_S)
        model.pause -= 1
        if model.pause >= 0:
            return None
        followers = _followers(model, streams, offers)[: self._n_most - len(streams)]
        if not followers:
            return None
        slots = {running.slot for running in followers}
        beside = [offer for offer in offers if offer.running.slot not in slots]
        plain = self._choose(len(streams), offers)
        depth, token_s = self._depth(model, streams, followers, beside)
        # What it lacks has to pay within what is expected of an output.
        gain_s = plain.seconds / plain.n_tokens / MIN_GAIN - token_s
        paying = [r for r in followers if gain_s * _n_expected(r) > _lag_s(model, r)]
        self._is_trial = not paying
        if not paying:
            model.pause = PAUSE
            if model.trials_s <= 0:
                return None
            paying, depth = followers, TRIAL_DEPTH
        return model.plan(paying, depth)

    def _depth(
        self,
        model: DraftModel,
        streams: Items[Running],
        followers: Items[Running],
        beside: Items[DraftOffer],
    ) -> tuple[int, float]:
        """Drafts of each of *followers* that are best, and the seconds of a token then."""
        best, n_followers = (TRIAL_DEPTH, float("inf")), len(followers)
        for depth in DEPTHS:
            # A draft or two that were rejected are computed again.
            before_s = model.seconds(2 * n_followers, n_followers, depth)
            if before_s is None:
                break
            guesses = []
            for running in followers:
                drafting = running.sequence.drafting
                assert drafting is not None
                mean = drafting.mean
                guesses += [(running.slot, mean**n) for n in range(1, depth + 1)]
            choice = self._choose(len(streams), beside, guesses, before_s)
            # Without drafts of it, its step would be in vain.
            if choice.depths.keys() & {running.slot for running in followers}:
                best = min(best, (depth, choice.seconds / choice.n_tokens), key=_second)
        return best


def _followers(
    model: DraftModel, streams: Items[Running], offers: Items[DraftOffer]
) -> list[Running]:
    """Those of *streams* that the draft model may go on with."""
    expected = {offer.running.slot: offer.chances[0] for offer in offers}
    followers, n_left = list[Running](), model.limits.n_cells
    for running in streams:
        drafting, n_output = running.sequence.drafting, running.sequence.n_output
        # It refuses, or it has none of the cells: here, texts that begin alike share none.
        n_cells = len(running.tokens) + MAX_DEPTH
        if (
            drafting is None
            or n_cells > n_left
            or not model.can_read(running, drafting)
        ):
            continue
        n_left -= n_cells
        # It ends, or something better is known of it.
        is_last = running.request.max_tokens - n_output < 2
        is_known = drafting.mean <= expected.get(running.slot, 0.0) or drafting.n_ahead
        if not (is_last or is_known):
            followers.append(running)
    return followers


def _second(item: tuple[int, float]) -> float:
    return item[1]


def _n_expected(running: Running) -> int:
    """Tokens that are expected of an output: as many as there are by now, as it allows more."""
    n_output = running.sequence.n_output
    return min(running.request.max_tokens - n_output, max(n_output, LEAST_LEFT))


def _lag_s(model: DraftModel, running: Running) -> float:
    """Seconds that the draft model takes to compute what it lacks of *running*."""
    n_missing = len(running.tokens) - model.n_held(running) - MAX_DEPTH
    cost = model.costs.cost
    return 0.0 if n_missing <= 0 or cost is None else cost.seconds(n_missing)
