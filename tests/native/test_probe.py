"""What a snapshot costs, as a short decode tells."""

import pytest

from pyllama_raw import AsyncEngine, EngineConfig, SamplingParams, SchedulerConfig
from pyllama_raw.engine.layout import measure
from pyllama_raw.engine.sampling import make_lanes
from pyllama_raw.errors import ModelLoadFailed, Unsupported
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import lib
from pyllama_raw.native.model import Model
from pyllama_raw.options.config import ContextConfig
from scripts.mutations.gguf_file import F32, Value, read
from tests.native.support import EXACT, make_context, make_prompt, prefill
from tests.support.tiny import GENERATING, tiny_model

pytestmark = pytest.mark.native


@pytest.mark.parametrize("options", [{}, EXACT, {"kv_unified": False}])
@pytest.mark.parametrize("n_seq_max", [1, 4])
def test_no_snapshot_is_larger_than_the_bound(model, options, n_seq_max):
    """
    The bound holds, is close, and the context is empty again, also with a single slot.
    """
    with make_context(model, n_seq_max=n_seq_max, **options) as context:
        cost = measure(context)
        n_left = [context.seq_pos_max(slot) for slot in range(n_seq_max)]
        prefill(context, make_prompt(100))
        n_bytes = context.state_bytes(0)

    assert n_left == [None] * n_seq_max
    assert n_bytes <= cost.bound(100) <= n_bytes + 512


SMALL = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 64}


@pytest.mark.parametrize("recipe", GENERATING, ids=lambda recipe: recipe.name)
def test_architectures_that_are_computed_rightly_are_not_refused(recipe):
    """
    Whatever the layout, the number of slots, and where tokens are chosen.
    """
    with Model.load(tiny_model(recipe.name)) as model:
        for n_seq_max in (1, 2, 4):
            for options in ({}, EXACT, {"n_outputs_max": n_seq_max}):
                with make_context(model, n_seq_max=n_seq_max, **SMALL | options) as c:
                    measure(c)

                    assert c.seq_pos_max(0) is None
        with make_context(
            model, n_seq_max=2, lanes=make_lanes(model.vocab, 2), **SMALL
        ) as c:
            measure(c)


@pytest.mark.parametrize("options", [{}, EXACT, {"n_outputs_max": 1}])
@pytest.mark.parametrize("n_seq_max", [1, 2, 4])
def test_rows_of_the_wrong_tokens_are_noticed(options, n_seq_max):
    """
    cogvlm's graph gives a row of every token, and libllama takes the first ones.
    """
    with (
        Model.load(tiny_model("cogvlm")) as model,
        make_context(model, n_seq_max=n_seq_max, **SMALL | options) as context,
        pytest.raises(Unsupported, match=r"'cogvlm' rightly: it gives out wrong rows"),
    ):
        measure(context)


@pytest.mark.parametrize("name", ["plamo2", "plamo2-faint"])
@pytest.mark.parametrize("options", [{}, EXACT, {"n_batch": 9, "n_ubatch": 9}])
@pytest.mark.parametrize("n_seq_max", [2, 3, 4, 8])
def test_sequences_that_are_mixed_are_noticed(options, n_seq_max, name):
    """
    plamo2 writes recurrent states to the places of others, or fails an assertion; that is
    noticed, too, where a wrong state moves the row of the next token by a few hundredths.
    """
    with (
        Model.load(tiny_model(name)) as model,
        make_context(model, n_seq_max=n_seq_max, **SMALL | options) as context,
        pytest.raises(Unsupported, match=r"'plamo2' rightly: it .*n_slots=1"),
    ):
        measure(context)


def test_one_sequence_alone_is_not_refused():
    """
    With one slot plamo2 is computed rightly.
    """
    with (
        Model.load(tiny_model("plamo2")) as model,
        make_context(model, n_seq_max=1, **SMALL) as context,
    ):
        measure(context)

        assert context.seq_pos_max(0) is None


@pytest.mark.parametrize("threads", [(1, 1), (2, 3)])
def test_the_probe_leaves_the_threads_as_they_were(threads):
    """
    It computes in one thread; what follows in as many as were asked for.
    """
    options = SMALL | {"n_threads": threads[0], "n_threads_batch": threads[1]}
    with (
        Model.load(tiny_model("llama")) as model,
        make_context(model, n_seq_max=2, **options) as context,
    ):
        measure(context)

        assert n_threads(context) == threads


def n_threads(context: Context) -> tuple[int, int]:
    return lib.llama_n_threads(context.ptr), lib.llama_n_threads_batch(context.ptr)


@pytest.mark.anyio
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), -1.0])
async def test_an_assertion_of_the_first_decode_is_an_error(tmp_path, value):
    """
    In a thread of libllama's own it would end the process, also with several threads.
    """
    file = read(tiny_model("llama"))
    key = b"llama.attention.layer_norm_rms_epsilon"
    file.values[key] = Value(F32, value)
    path = tmp_path / "model.gguf"
    path.write_bytes(file.encode())
    config = EngineConfig(
        context=ContextConfig(n_threads=2, **SMALL),
        scheduler=SchedulerConfig(n_slots=2),
    )

    with pytest.raises(ModelLoadFailed, match="libllama cannot compute this model"):
        async with AsyncEngine.open(path, config) as engine:
            await engine.complete("a", SamplingParams(max_tokens=1))
