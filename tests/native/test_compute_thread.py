"""Several contexts and their one compute thread."""

import os
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import AbortFlag, Context, compute_thread
from pyllama_raw.native.libllama import lib
from pyllama_raw.native.model import Model
from pyllama_raw.native.sampler import RowSampler, RowSamplers
from tests.native.support import EXACT, generate, make_context, run_python
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

N_CASES = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "20"))
N_TOKENS = 12


@pytest.fixture(scope="module")
def tiny() -> Iterator[Model]:
    with Model.load(tiny_model("llama")) as model:
        yield model


def make_prompt(seed: int) -> array:
    tokens = np.random.default_rng(seed).integers(40, 100, 9, np.int32)
    return array("i", tokens.tolist())


class Player:
    """Plays a prompt in one context, a step at a time; slot 0, greedy."""

    def __init__(self, context: Context, seed: int) -> None:
        self.context = context
        self.prompt = make_prompt(seed)
        self.tokens: list[int] = []
        self._samplers = RowSamplers(1)
        self._samplers.set_all([RowSampler()])
        self._batch = Batch(64)
        self._fill()

    def _fill(self) -> None:
        known = [*self.prompt, *self.tokens]
        highest = self.context.seq_pos_max(0)
        n_computed = 0 if highest is None else highest + 1
        self._batch.clear()
        self._batch.add(array("i", known[n_computed:]), n_computed, 0, True)

    def step(self, *, ahead: bool = False) -> int:
        """The code; a token was added if that is 0."""
        outcome = self.context.step(self._batch, self._samplers, ahead=ahead)
        self.tokens += outcome.tokens
        return outcome.code

    def drop(self) -> None:
        """Give up the step ahead, and go on from what is known."""
        n_known = len(self.prompt) + len(self.tokens) - 1
        self.context.drop()
        self.context.seq_rm(0, n_known, -1)
        self._fill()


def at_once(*functions: Callable[[], object]) -> None:
    """Run each in a thread of its own, begun together; raises what one of them raises."""
    begin = threading.Barrier(len(functions))

    def run(function: Callable[[], object]) -> None:
        begin.wait()
        function()

    with ThreadPoolExecutor(len(functions)) as threads:
        for done in [threads.submit(run, function) for function in functions]:
            done.result()


def alone(model: Model, seed: int, n_tokens: int = N_TOKENS) -> list[int]:
    with make_context(model, **EXACT) as context:
        return generate(context, make_prompt(seed), n_tokens, RowSampler())


def test_all_contexts_share_one_thread(tiny):
    """
    It is there as long as one of them is, and made anew after that.
    """
    with make_context(tiny), make_context(tiny):
        first = compute_thread()
        assert compute_thread() is first
        first.pid = -1  # as in a fork
        assert compute_thread() is not first


def test_contexts_in_different_threads_give_the_tokens_of_each_alone(tiny):
    """
    Also when steps are begun ahead, dropped, and contexts are closed and made meanwhile.
    """
    expected = {seed: alone(tiny, seed) for seed in range(4)}

    def play(seed: int) -> None:
        chance = np.random.default_rng(seed)
        for _ in range(N_CASES):
            with make_context(tiny, **EXACT) as context:
                player = Player(context, seed)
                n_wanted = chance.integers(1, N_TOKENS)
                while len(player.tokens) < n_wanted:
                    ahead = chance.random() < 0.6
                    assert player.step(ahead=ahead) == 0
                    if not ahead or chance.random() < 0.3:
                        player.drop()
                assert player.tokens == expected[seed][:n_wanted]

    at_once(*(lambda seed=seed: play(seed) for seed in expected))


def test_a_context_closes_while_another_one_computes(tiny):
    """
    With a step of it queued ahead, and nothing of the other one is lost.
    """
    expected = alone(tiny, 1, 40)
    with make_context(tiny, **EXACT) as context:
        player = Player(context, 1)

        def play() -> None:
            while len(player.tokens) < 40:
                player.step(ahead=True)

        def open_and_close() -> None:
            for _ in range(10):
                other = Player(make_context(tiny), 2)
                other.step(ahead=True)
                other.context.close()

        at_once(play, open_and_close)
        context.drop()

    assert player.tokens == expected


def test_an_abort_stops_the_decodes_of_its_own_context(tiny):
    """
    Those of another context go on.
    """
    expected = alone(tiny, 1)
    flag = AbortFlag()
    with make_context(tiny, abort=flag) as stopped, make_context(tiny, **EXACT) as free:
        flag.set()
        players = Player(stopped, 0), Player(free, 1)
        codes: list[int] = []

        def abort() -> None:
            codes.extend(players[0].step(ahead=True) for _ in range(N_TOKENS))

        def play() -> None:
            codes.extend(players[1].step(ahead=True) for _ in range(N_TOKENS))

        at_once(abort, play)
        free.drop()

    assert sorted(codes) == [0] * N_TOKENS + [2] * N_TOKENS
    assert (players[0].tokens, players[1].tokens) == ([], expected)


def test_a_failure_is_its_own_contexts(tiny):
    """
    A decode or a sampler that fails leaves the steps of other contexts alone.
    """
    expected = alone(tiny, 1)
    closed = RowSampler()
    closed.close()
    with make_context(tiny) as failing, make_context(tiny, **EXACT) as free:
        player = Player(free, 1)
        batch, samplers = Batch(64), RowSamplers(1)
        samplers.set_all([closed])
        batch.add(make_prompt(0), 0, 3, True)
        found: list[tuple[int, bool]] = []

        def fail() -> None:
            for _ in range(N_TOKENS):
                outcome = failing.step(batch, samplers, ahead=True)
                found.append((outcome.code, bool(outcome.codes)))
                failing.seq_rm(3)

        def play() -> None:
            assert [player.step(ahead=True) for _ in range(N_TOKENS)] == [0] * N_TOKENS

        lib.plr_fail_decode(-3, 0, 3)  # slot 3: of the failing context only
        try:
            at_once(fail, play)
        finally:
            lib.plr_fail_decode(0, 0, -1)
        free.drop()

    assert found == [(-3, False), *[(0, True)] * (N_TOKENS - 1)]
    assert player.tokens == expected


def test_contexts_left_open_end_with_the_interpreter(tiny):
    """
    With a step begun ahead in each.
    """
    done = run_python(
        "import sys\n"
        "from pathlib import Path\n"
        "from pyllama_raw.native.model import Model\n"
        "from tests.native.support import make_context\n"
        "from tests.native.test_compute_thread import Player\n"
        "model = Model.load(Path(sys.argv[1]))\n"
        "players = [Player(make_context(model), seed) for seed in range(3)]\n"
        "print([player.step(ahead=True) for player in players])\n",
        tiny.path,
    )

    assert (done.stdout, done.stderr, done.returncode) == ("[0, 0, 0]\n", "", 0)


def test_a_fork_has_a_thread_of_its_own(tiny):
    """
    It cannot step a context of its parent, may close it, and can use a new one.
    """
    done = run_python(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from pyllama_raw.native.model import Model\n"
        "from tests.native.support import make_context\n"
        "from tests.native.test_compute_thread import Player\n"
        "model = Model.load(Path(sys.argv[1]))\n"
        "context = make_context(model)\n"
        "player = Player(context, 0)\n"
        "player.step(ahead=True)\n"
        "if child := os.fork():\n"
        "    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "    print(code, player.step(), len(player.tokens))\n"
        "else:\n"
        "    refused = player.step()\n"
        "    context.close()\n"
        "    new = Player(make_context(model), 1).step()\n"
        "    os._exit(0 if (refused, new) == (-1000, 0) else 1)\n",
        tiny.path,
    )

    assert (done.stdout, done.returncode) == ("0 0 2\n", 0), done.stderr
