"""The executor of a simulation: every step works, and takes what the cost model says."""

from __future__ import annotations

from typing import NamedTuple

from pyllama_raw.core.request import CacheTier, Request
from pyllama_raw.core.step import (
    Computed,
    Load,
    Output,
    Sampled,
    Save,
    Saved,
    StepPlan,
    StepResult,
    Work,
)
from pyllama_raw.engine.step_log import size_of
from pyllama_raw.errors import Unsupported
from pyllama_raw.lab.sim.cost import CostModel

END_TOKEN = 0  # the last token of every output


class VirtualClock:
    """Time as a number."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Answer(NamedTuple):
    """The output that a simulated request will have: `Request.sampling` of it."""

    n_output: int
    first_token: int  # of output; prefixes of outputs are shared where these are equal


MORE, COMPUTED = Sampled((1,)), Computed()


class SimExecutor:
    """
    Counts what is left of each output; core keeps exact account of all else.

    Args:
        token_bytes: host memory of one token of a snapshot.
    """

    def __init__(
        self, cost: CostModel, clock: VirtualClock, token_bytes: int = 1
    ) -> None:
        self.n_steps = 0
        self._cost = cost
        self._clock = clock
        self._token_bytes = token_bytes
        self._left: dict[int, int] = {}  # tokens to come, by request_id
        self._answers: dict[int, Answer] = {}

    def open(self, request: Request) -> None:
        if request.source is not None:
            raise Unsupported("simulate", "no formula says what an encoder takes")
        answer = request.sampling
        assert isinstance(answer, Answer)
        self._left[request.request_id] = answer.n_output
        self._answers[request.request_id] = answer

    def close(self, request_id: int) -> None:
        self._left.pop(request_id, None)
        self._answers.pop(request_id, None)

    def stop(self, request_id: int | None = None) -> None:
        """Steps take no time: none is left to be aborted."""

    def execute(self, plan: StepPlan) -> StepResult:
        self.n_steps += 1
        self._clock.now += self._cost.seconds(size_of(plan))
        outputs = tuple(map(self._output, plan.works))
        if not plan.moves:
            return StepResult(outputs=outputs)
        return StepResult(
            outputs=outputs, saved=self._saved(plan), restore_s=self._restore_s(plan)
        )

    def _output(self, work: Work) -> Output:
        if not work.samples:
            return COMPUTED
        request_id = work[0]
        left = self._left[request_id] = self._left[request_id] - 1
        if left < 1:
            return Sampled((END_TOKEN,))
        answer = self._answers[request_id]
        if left == answer.n_output - 1:
            return Sampled((answer.first_token,))
        return MORE

    def _saved(self, plan: StepPlan) -> dict[int, Saved]:
        saved = {}
        for move in plan.moves:
            if type(move) is Save and move.tier is CacheTier.HOST:
                n_bytes = (move.stop - move.start) * self._token_bytes
                if n_bytes <= move.max_bytes:
                    saved[move.save_id] = Saved(None, n_bytes)
        return saved

    def _restore_s(self, plan: StepPlan) -> dict[int, float]:
        """By slot: core decides by them whether a swap is worth it."""
        tokens = {
            move.slot: sum(piece.stop - piece.start for piece in move.pieces)
            for move in plan.moves
            if type(move) is Load
        }
        return {slot: self._cost.loaded_token * n for slot, n in tokens.items()}
