"""
Grammars that would hold up everybody: refused, or ended, or followed at a bounded cost.

libllama follows every way to read a token: 200 optional letters, or letters that can be
read in two ways, never end there.
"""

import json
from functools import partial

import anyio
import numpy as np
import pytest

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.errors import BadGrammar
from pyllama_raw.native.model import Model
from pyllama_raw.native.sampler import RowSampler
from scripts.tiny_models.vocab import END_OF_GENERATION
from tests.native.support import run_python
from tests.support.grammars import make_grammar
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

# After each letter there are more places than before it, by a factor.
ENDLESS = 'root ::= "a" root "a"? | "a" root "a"? "a"? | ""'

HOSTILE = {
    "optional": "root ::= " + '"a"? ' * 200,
    "many optional": "root ::= " + '"a"? ' * 5000,
    "two ways": "root ::= ([a-z ] | [a-z ])*",
    "forty ways": "root ::= (" + "|".join(["[a-z ]"] * 40) + ")*",
    "stars": "root ::= " + "(" * 30 + "[a-z ]*" + ")*" * 30,
    "diamond": "\n".join(f"r{i} ::= r{i + 1} | r{i + 1}" for i in range(60))
    + '\nr60 ::= "a"\nroot ::= r0',
    "palindromes": ENDLESS,
    "catalan": "root ::= [a-z ] root root? | [a-z ]",
    "products": "root ::= "
    + "x? " * 20
    + "".join(f"\n{a} ::= {f'{b}? ' * 20}" for a, b in ("xy", "yz", "zw"))
    + '\nw ::= "a"?',
    "tokens": "root ::= (" + "|".join(f"!<[{i}]>" for i in range(10_000)) + ")*",
    "long optional": "root ::= " + '"a"? ' * 16_000,
    "written out": "root ::= " + "(" * 9 + '"a"' + "){9}" * 9,
    "empty": "root ::= " + "(" * 9 + "){999}" * 9,
    "deep": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000,
    "long": "root ::= " + "|".join(f'"{i:06}"' for i in range(10_000)),
}


def test_hostile_grammars_end(model_path):
    """
    Each is refused before it is queued, or gives 30 tokens, or fails its row.
    """
    code = """
import json, sys
import numpy as np
from pyllama_raw.errors import BadGrammar
from pyllama_raw.errors import SamplingFailed
from pyllama_raw.native.model import Model
from pyllama_raw.native.sampler import RowSampler
from tests.support.grammars import make_grammar
from tests.native.grammar.test_grammar_limits import HOSTILE

model = Model.load(sys.argv[1], vocab_only=True)
found = {}
for name, text in HOSTILE.items():
    chance = np.random.default_rng(0)
    try:
        sampler = RowSampler(grammar=make_grammar(text, model.vocab))
        for _ in range(30):
            logits = chance.normal(0, 2, model.n_vocab).astype(np.float32)
            logits[sorted(model.vocab.eog_tokens)] = -30
            sampler.sample(logits)
        found[name] = "followed"
    except BadGrammar as error:
        found[name] = "refused"
        assert str(error).startswith("grammar")
    except SamplingFailed as error:
        found[name] = "failed"
        assert "items" in str(error)
print(json.dumps(found))
"""
    done = run_python(code, model_path)

    assert done.returncode == 0, done.stderr[-2000:]
    ends = json.loads(done.stdout)
    assert ends.pop("tokens") in ("followed", "refused")  # 1 s of this CPU is its limit
    assert ends == {
        "optional": "followed",
        "many optional": "refused",
        "two ways": "followed",
        "forty ways": "followed",
        "stars": "refused",
        "diamond": "followed",
        "palindromes": "followed",
        "catalan": "failed",
        "products": "failed",
        "long optional": "refused",
        "written out": "followed",
        "empty": "followed",
        "deep": "refused",
        "long": "refused",
    }


@pytest.fixture(scope="module")
def model():
    with Model.load(tiny_model("llama")) as loaded:
        yield loaded


def test_what_is_forgotten_is_not_missed(model):
    """
    9,000 open parentheses are more than is kept; as many have to be closed.
    """
    n_open = 9000
    sampler = RowSampler(
        grammar=make_grammar('r ::= "(" r ")" | "x"\nroot ::= r', model.vocab)
    )
    opening, closing, inside = (ord(char) for char in "()x")
    end = min(model.vocab.eog_tokens)

    def sample(*liked: int) -> int:
        logits = np.zeros(model.n_vocab, np.float32)
        logits[list(liked)] = np.arange(len(liked), 0, -1)
        return sampler.sample(logits)

    opened = [sample(opening) for _ in range(n_open)]
    written = [sample(inside)]
    while len(written) < 2 * n_open and written[-1] != end:
        written.append(sample(end, closing))
    sampler.close()

    assert opened == [opening] * n_open
    assert written == [inside, *[closing] * n_open, end]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_one_request_ends_and_the_others_go_on(anyio_backend):
    """
    A grammar that becomes too ambiguous fails its own request; those beside it give what
    they give alone.
    """
    config = EngineConfig(
        context=ContextConfig(n_ctx=2048, n_threads=1),
        scheduler=SchedulerConfig(n_slots=3),
        deterministic=True,
    )
    free = SamplingParams(max_tokens=60, seed=5, ignore_eos=True)
    never = dict.fromkeys(END_OF_GENERATION, -1e6)
    bad = SamplingParams(
        max_tokens=400, temperature=0, grammar=ENDLESS, logit_bias=never
    )
    alone, beside, errors = [], [], []

    async with AsyncEngine.open(tiny_model("llama"), config) as engine:

        async def complete(prompt: str, results: list) -> None:
            results.append((await engine.complete(prompt, free)).token_ids)

        async def fail() -> None:
            try:
                await engine.complete("a", bad)
            except BadGrammar as error:
                errors.append(str(error))

        await complete("one", alone)
        await complete("two", alone)
        async with anyio.create_task_group() as group:
            group.start_soon(fail)
            for prompt in ("one", "two"):
                group.start_soon(partial(complete, prompt, beside))

    assert sorted(beside) == sorted(alone)
    assert len(errors) == 1
    assert "ways to read an output" in errors[0]
