"""The engine of a simulation: a scheduler with options like a real one, and a cost model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.memory.tiers import SnapshotCost
from pyllama_raw.core.policies.runner import PolicyFault
from pyllama_raw.core.scheduling.packer import BudgetMode
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.lab.checked import Checked, Count, Positive, Whole
from pyllama_raw.lab.sim.cost import CostModel
from pyllama_raw.policy import make_policy

Room = Annotated[int, Field(ge=4, le=2**31 - 1)]  # for a prompt and an output

NO_COST_MODEL = CostModel()
TOKEN_BYTES = 1024  # of a snapshot: with so many it is easy to say what a cache holds


@dataclass(frozen=True, slots=True)
class Machine(Checked):
    """The machine that requests run on."""

    policy: str = "fcfs"
    budget_mode: BudgetMode = "balanced"
    n_slots: Count = 8
    n_ctx_slot: Room = 2048
    n_batch: Count = 2048
    n_cells: Room | None = None  # None: n_ctx_slot for each slot
    token_budget: Count | None = None
    target_step_s: Positive = 0.1
    max_overtakes: Whole = 16
    cached_tokens: Whole = 0  # snapshots in host memory hold at most so many
    cost: CostModel = NO_COST_MODEL

    def scheduler(self, report: Callable[[PolicyFault], None]) -> Scheduler:
        """
        A new one.

        Args:
            report: told of what the policy does wrong.

        Raises:
            ConfigError: there is no such policy.
        """
        n_cells = self.n_cells or self.n_slots * self.n_ctx_slot
        limits = ContextLimits(
            self.n_slots, min(self.n_ctx_slot, n_cells), self.n_batch, n_cells
        )
        cache = PrefixCache(
            SnapshotKind.RANGE,
            max_bytes=self.cached_tokens * TOKEN_BYTES,
            max_entries=2**16 if self.cached_tokens else 0,
        )
        return Scheduler(
            limits,
            (),  # no simulated request has stop strings
            token_budget=self.token_budget,
            target_step_s=self.target_step_s,
            max_overtakes=self.max_overtakes,
            policy=make_policy(self.policy),
            budget_mode=self.budget_mode,
            cache=cache,
            snapshot_cost=SnapshotCost(0, TOKEN_BYTES),
            report=report,
        )
