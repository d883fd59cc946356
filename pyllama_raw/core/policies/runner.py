"""
Asks a policy, and goes on without it where it fails.

Rule: nothing that a hook does or returns changes what the scheduler holds. A hook gets views
that cannot be written to, its answers are checked, and whatever it raises is counted and
reported. It is passed on only if the report raises: a user may interrupt a hook.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pyllama_raw.core.memory.memory import Memory
from pyllama_raw.core.memory.placement import Prefixes
from pyllama_raw.core.policies.checks import checked_key, checked_quota
from pyllama_raw.core.policies.policy import SchedulerView, SchedulingPolicy
from pyllama_raw.core.policies.queue import MAX_PREEMPTED, Numbers, PolicyQueue
from pyllama_raw.core.sequence import Running, Sequence
from pyllama_raw.core.step import StepPlan
from pyllama_raw.core.view import RequestView

T = TypeVar("T")

MAX_HELD = 8  # steps in a row that a quota may keep a prompt waiting


class PolicyFault(NamedTuple):
    """A fault of a hook of a policy."""

    policy: str
    hook: str
    error: BaseException


class PolicyRunner:
    """
    One policy at work.

    Args:
        report: told of every fault; what it raises is passed on.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        memory: Memory,
        max_overtakes: int,
        report: Callable[[PolicyFault], None],
    ) -> None:
        self.queue = PolicyQueue(policy.keys, max_overtakes, self._order_key)
        self.n_faults = 0
        self._policy = policy
        self._memory = memory
        self._report = report
        self._now = 0.0
        self._view: SchedulerView | None = None  # of this step, once a hook gets it
        self._probed: Sequence | None = None  # the one that the policy is asked about
        self._prefixes: Prefixes | None = None  # of now; made when a policy asks
        self._views: dict[Sequence, RequestView] = {}  # of those it was told of
        self._hooks = {name for name in HOOKS if _overrides(policy, name)}

    def begin(self, now: float) -> None:
        """A step is planned."""
        self._prefixes = self._view = None
        self._now = now

    # -- decisions -----------------------------------------------------------------

    def _order_key(self, sequence: Sequence) -> Numbers | None:
        self._probed = sequence
        return self._ask(
            "order_key", checked_key, self._view_of(sequence), self._seen()
        )

    def _view_of(self, sequence: Sequence) -> RequestView:
        view = self._views.get(sequence)
        if view is None:
            view = self._views[sequence] = RequestView(sequence, self._running)
        return view

    def _running(self, request_id: int) -> Running | None:
        return self._memory.slots.running.get(request_id)

    def _seen(self) -> SchedulerView:
        """The scheduler as it was when the first hook of this step was asked."""
        if self._view is None:
            slots, limits = self._memory.slots, self._memory.slots.limits
            self._view = SchedulerView(
                now=self._now,
                n_slots=limits.n_slots,
                n_running=len(slots.running),
                n_waiting=len(self.queue),
                n_cells=limits.n_cells,
                n_cells_used=slots.cells.n_used,
                probe=self._n_cached,
            )
        return self._view

    def _n_cached(self, request_id: int) -> int:
        """Cached tokens of the request that the policy is asked about; 0 for any other."""
        sequence = self._probed
        if sequence is None or sequence.request.request_id != request_id:
            return 0
        # Made once for all requests of a step, until one of them changes what slots hold.
        if self._prefixes is None:
            self._prefixes = Prefixes(self._memory.slots)
        return self._memory.n_cached(sequence, self._prefixes)

    @property
    def chooses_victims(self) -> bool:
        """Whether the policy chooses the first one to be preempted."""
        return "victim_key" in self._hooks

    def victim(self, running: Items[Running]) -> Running:
        """The sequence that is preempted, if memory is short."""
        candidates = [r for r in running if r.sequence.n_preempted < MAX_PREEMPTED]
        if self.chooses_victims:
            best: tuple[Numbers, tuple[int, int]] | None = None
            victim: Running | None = None
            # The largest key wins, and of equal ones the worst rank.
            for candidate in candidates:
                view, rank = self._view_of(candidate.sequence), candidate.sequence.rank
                answer = self._ask("victim_key", _key_or_never, view, self._seen())
                # The hook failed, so nothing that it said of others counts.
                if answer is None:
                    break
                if answer and (best is None or (answer, rank) > best):
                    best, victim = (answer, rank), candidate
            else:
                if victim is not None:
                    return victim
        # The policy has no such hook, wants to spare all, or failed.
        return max(candidates or running, key=lambda r: r.sequence.rank)

    def quotas(
        self, prompts: list[Running], *, all_may_wait: bool
    ) -> tuple[list[Running], dict[int, int]]:
        """
        Select the *prompts* that get tokens, and the most tokens of some, by slot.

        Args:
            all_may_wait: there is something else to compute.
        """
        if "prefill_quota" not in self._hooks:
            return prompts, {}
        # All prompts are shown at once, and those that are not in the answer have no limit.
        by_id = {running.request.request_id: running for running in prompts}
        views = tuple(self._view_of(running.sequence) for running in prompts)
        check = partial(checked_quota, request_ids=by_id)
        quota = self._ask("prefill_quota", check, views, self._seen()) or {}
        # Less than two tokens is none: they wait, but not for more than MAX_HELD steps in a row.
        low = {
            request_id
            for request_id, n_tokens in quota.items()
            if n_tokens < 2 and by_id[request_id].sequence.n_held < MAX_HELD
        }
        # A step without any work would be the end of all.
        if len(low) == len(prompts) and not all_may_wait:
            return prompts, {}
        for request_id, running in by_id.items():
            sequence = running.sequence
            sequence.n_held = (sequence.n_held + 1) * (request_id in low)
        caps = {by_id[k].slot: n for k, n in quota.items() if n >= 2}
        return [by_id[k] for k in by_id if k not in low], caps

    # -- what happens --------------------------------------------------------------

    def computed(self, plan: StepPlan, now: float) -> None:
        """*plan* was computed; what came of it is not taken in yet."""
        if "on_scheduled" not in self._hooks:
            return
        works = ((self._running(work.request_id), work) for work in plan.works)
        done = tuple(
            (self._view_of(running.sequence), len(work.tokens))
            for running, work in works
            if running is not None  # else it has ended meanwhile
        )
        self._ask("on_scheduled", id, done, now)

    def tell(self, hook: str, sequence: Sequence, now: float) -> None:
        """*hook*, which has the name of what happened to *sequence*."""
        self._prefixes = None
        view = self._view_of(sequence)
        if hook in self._hooks:
            self._ask(hook, id, view, now)
        if hook == "on_preempted":
            sequence.n_held = 0
        if hook == "on_finished":
            del self._views[sequence]

    # -- calls ---------------------------------------------------------------------

    def _ask(
        self, hook: str, check: Callable[[Any], T], *arguments: object
    ) -> T | None:
        """The checked answer of *hook*; None if that failed."""
        try:
            return check(getattr(self._policy, hook)(*arguments))
        except BaseException as error:  # noqa: BLE001 - it is reported
            self._note_fault(hook, error)
            return None

    def _note_fault(self, hook: str, error: BaseException) -> None:
        self.n_faults += 1
        self._report(PolicyFault(self._policy.name, hook, error))


def pass_on_interrupts(fault: PolicyFault) -> None:
    """A report where the user's thread runs the hooks: Ctrl-C is no fault of the policy."""
    if isinstance(fault.error, KeyboardInterrupt):
        raise fault.error


HOOKS = (
    *("prefill_quota", "victim_key"),
    *("on_arrival", "on_admitted", "on_scheduled", "on_preempted", "on_finished"),
)


def _overrides(policy: SchedulingPolicy, hook: str) -> bool:
    return getattr(type(policy), hook) is not getattr(SchedulingPolicy, hook)


def _key_or_never(key: object) -> Numbers:
    """Empty: never, if there is anybody else."""
    return () if key is None else checked_key(key)
