"""A model that engines share: what users see of it."""

import shutil
import threading

import anyio
import pytest

from pyllama_raw import (
    AsyncEngine,
    ConfigError,
    ContextConfig,
    Engine,
    EngineConfig,
    Model,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.engine import shared_models
from pyllama_raw.engine.shared_models import Shared
from pyllama_raw.errors import ClosedError, ModelLoadFailed
from tests.native.support import run_python
from tests.support.native_loops import anyio_backend  # noqa: F401
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

CONTEXT = ContextConfig(n_ctx=512, n_threads=1)
CONFIG = EngineConfig(context=CONTEXT, scheduler=SchedulerConfig(n_slots=2))
PARAMS = SamplingParams(max_tokens=8, temperature=0)


@pytest.fixture(scope="module")
def path():
    return tiny_model("llama")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch):
    """The models that this test has loaded; none is left behind."""
    models = Shared[object]()
    monkeypatch.setattr(shared_models, "_models", models)
    yield models
    assert len(models) == 0


@pytest.mark.anyio
async def test_engines_share_a_model(path, loaded):
    """
    Opened on a Model, or by path, at once or not: the weights are there once, and what
    is generated is what an engine alone generates.
    """
    async with AsyncEngine.open(path, CONFIG) as engine:
        alone = await engine.complete("Once", PARAMS)
    assert len(loaded) == 0
    async with Model.open(path) as model:
        async with (
            AsyncEngine.open(model, CONFIG) as one,
            AsyncEngine.open(path, CONFIG) as two,
            anyio.create_task_group() as group,
        ):
            texts = []

            async def complete(engine):
                texts.extend(
                    [(await engine.complete("Once", PARAMS)).text for _ in "abcd"]
                )

            group.start_soon(complete, one)
            group.start_soon(complete, two)
            assert len(loaded) == 1
        assert len(loaded) == 1

    assert texts == [alone.text] * 8


@pytest.mark.anyio
async def test_engines_keep_a_model_that_is_closed(path, loaded):
    """
    Its weights are freed with the last of them; new engines are refused.
    """
    model = await Model.open(path)
    engine = await AsyncEngine.open(model, CONFIG)
    await model.aclose()
    result = await engine.complete("Once", PARAMS)
    (native,) = (each.loaded for each in loaded._users)
    with pytest.raises(ClosedError, match="open the model again"):
        await AsyncEngine.open(model, CONFIG)
    assert not native.closed
    await engine.aclose()

    assert native.closed
    assert result.usage.completion_tokens == 8


def test_any_loop_and_thread_may_use_a_model(path, loaded):
    """
    Opened in one event loop, used in another one, and by a blocking engine.
    """

    async def load():
        return await Model.open(path)

    async def complete(model):
        async with AsyncEngine.open(model, CONFIG) as engine:
            return (await engine.complete("Once", PARAMS)).text

    with anyio.run(load) as model:
        first = anyio.run(complete, model, backend="trio")
        with Engine.open(model, CONFIG) as engine:
            second = engine.complete("Once", PARAMS).text
    with Model.load(path) as model, Engine.open(model, CONFIG) as engine:
        third = engine.complete("Once", PARAMS).text

    assert first == second == third


@pytest.mark.anyio
async def test_cancelling_one_who_opens_leaves_the_others(path, loaded):
    """
    Both wait for the same loading; one is cancelled as soon as it is told of it.
    """
    scope, opened = anyio.CancelScope(), []

    async def leave():
        with scope:
            async with Model.open(path, progress=lambda _: waiting.set()):
                pass

    async def stay():
        async with Model.open(path) as model:
            opened.append(model.path)

    waiting = threading.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(leave)
        group.start_soon(stay)
        await anyio.to_thread.run_sync(waiting.wait)
        scope.cancel()

    assert opened == [str(path)]


@pytest.mark.anyio
async def test_deterministic_needs_weights_in_the_order_of_the_file(path, loaded):
    """
    Kernels for another order depend on what is computed beside; a shared model has one order.
    """
    config = CONFIG.model_copy(update={"deterministic": True})
    async with Model.open(path) as model:
        with pytest.raises(ConfigError, match="use_extra_bufts=False"):
            await AsyncEngine.open(model, config)
    async with Model.open(path, ModelConfig(use_extra_bufts=False)) as model:
        async with AsyncEngine.open(model, config) as engine:
            assert engine.info.config.deterministic


@pytest.mark.anyio
async def test_options_of_the_model_are_those_it_was_loaded_with(path, loaded):
    """
    An engine takes them over; options that differ are refused, and both are named.
    """
    options = ModelConfig(use_extra_bufts=False)
    async with Model.open(path, options) as model:
        async with AsyncEngine.open(model, CONFIG) as engine:
            assert engine.info.config == CONFIG.model_copy(update={"model": options})
        same = EngineConfig(model=options, context=CONTEXT)
        async with AsyncEngine.open(model, same):
            pass
        with pytest.raises(ConfigError) as refused:
            await AsyncEngine.open(model, EngineConfig(model=ModelConfig()))

    assert str(refused.value) == (
        "EngineConfig.model wants use_extra_bufts=None, not False as the model was "
        "loaded: leave `model` out, or open another Model with these options"
    )


@pytest.mark.anyio
async def test_a_model_is_refused_like_an_engine(tmp_path, loaded):
    """
    Arguments are checked before anything is loaded, and a damaged file says so.
    """
    with pytest.raises(ConfigError, match="give a ModelConfig"):
        await Model.open(config=CONFIG)
    with pytest.raises(ConfigError, match="give the path"):
        Model.load(5)
    with pytest.raises(ConfigError, match="give a function"):
        Model.load("a", progress=3)
    damaged = tmp_path / "model.gguf"
    damaged.write_bytes(b"GGUF")
    with pytest.raises(ModelLoadFailed):
        async with Model.open(damaged):
            pass


def test_a_model_that_is_replaced_is_loaded_anew(path, tmp_path, loaded):
    """
    Engines that run keep the old one.
    """
    copy = shutil.copy(path, tmp_path / "model.gguf")
    with Engine.open(copy, CONFIG) as before:
        new = shutil.copy(path, tmp_path / "new.gguf")
        new.replace(copy)
        with Engine.open(copy, CONFIG) as after:
            assert len(loaded) == 2
            texts = {e.complete("Once", PARAMS).text for e in (before, after)}

    assert len(texts) == 1


def test_a_forgotten_model_is_freed(path, loaded):
    """
    With a warning; what it is and whether it is open can be seen.
    """
    kept = [Model.load(path)]
    assert repr(kept[0]) == f"<Model {kept[0].metadata['general.name']!r}: open>"
    with pytest.warns(ResourceWarning, match="dropped before close"):
        kept.clear()


def test_a_fork_can_open_the_same_model(path):
    """
    Its engine has a model and a compute thread of its own.
    """
    done = run_python(
        "import os, sys\n"
        "from pyllama_raw import Engine, Model\n"
        "from tests.api.test_model import CONFIG, PARAMS\n"
        "def complete():\n"
        "    with Engine.open(sys.argv[1], CONFIG) as engine:\n"
        "        return engine.complete('Once', PARAMS).text\n"
        "with Model.load(sys.argv[1]):\n"
        "    text = complete()\n"
        "    if child := os.fork():\n"
        "        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "    else:\n"
        "        os._exit(0 if complete() == text else 1)\n",
        path,
    )

    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr
