"""Options are made smaller where memory is short, and nowhere else."""

from pathlib import Path

import pytest

from pyllama_raw import ContextConfig, Engine, EngineConfig, Model
from pyllama_raw.engine.estimate import estimate
from pyllama_raw.engine.fit import _most, fitted
from tests.tiny import tiny_model

pytestmark = pytest.mark.native

CONFIG = EngineConfig(fit_ctx=512, context=ContextConfig(n_ctx=8192, n_threads=1))


def total_bytes(path: Path, config: EngineConfig) -> int:
    return estimate(path, config).total_bytes


def with_n_ctx(n_ctx: int) -> EngineConfig:
    return CONFIG.model_copy(
        update={"context": CONFIG.context.model_copy(update={"n_ctx": n_ctx})}
    )


def test_options_that_fit_stay(caplog: pytest.LogCaptureFixture):
    """
    With just enough room the options are the same object, and nothing is said.
    """
    path = tiny_model("llama")

    chosen = fitted(path, CONFIG, room={"CPU": total_bytes(path, CONFIG)})

    assert chosen is CONFIG
    assert caplog.messages == []


def test_n_ctx_is_the_most_that_fits(caplog: pytest.LogCaptureFixture):
    """
    With room for 3072 cells there are 3072, and one line says so.
    """
    path = tiny_model("llama")

    chosen = fitted(path, CONFIG, room={"CPU": total_bytes(path, with_n_ctx(3072))})

    assert chosen == with_n_ctx(3072)
    assert caplog.messages == ["memory is short: n_ctx=3072"]


def test_the_floor_holds_without_any_room():
    """
    No room at all leaves the floor, and an engine of it opens.
    """
    path = tiny_model("gemma3")

    chosen = fitted(path, CONFIG, room={"CPU": 0})

    assert chosen == with_n_ctx(512)
    with Engine.open(path, chosen) as engine:
        assert engine.info.n_ctx == 512


def test_without_a_floor_nothing_is_shrunk():
    """
    The default leaves options as they are.
    """
    config = EngineConfig()

    assert fitted(tiny_model("llama"), config, room={"CPU": 0}) is config


def test_weights_that_are_loaded_need_no_room():
    """
    Of a model that is loaded the context alone has to fit.
    """
    path = tiny_model("llama")
    found = estimate(path, CONFIG)
    room = {"CPU": found.total_bytes - found.devices[0].weights_bytes}

    assert fitted(path, CONFIG, room=room, has_weights=True) is CONFIG
    assert fitted(path, CONFIG, room=room) is not CONFIG


def test_engines_open_with_it():
    """
    An engine on a file and one on a Model open with the option, and have what was asked for.
    """
    path = tiny_model("llama")

    with Engine.open(path, CONFIG) as engine:
        of_file = engine.info.config
    with Model.load(path) as model, Engine.open(model, CONFIG) as engine:
        of_model = engine.info.config

    assert (of_file, of_model) == (CONFIG, CONFIG)


def test_a_file_that_cannot_be_reckoned_is_left_to_the_opening(tmp_path: Path):
    """
    A damaged file keeps its options: opening it says what is wrong.
    """
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"not a model")

    assert fitted(path, CONFIG) is CONFIG


@pytest.mark.parametrize("wanted", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("least", [0, 1, 2])
def test_the_search_finds_the_largest(least: int, wanted: int):
    """
    For each place where things stop to fit the answer is that place, or the least.
    """
    least = min(least, wanted)

    found = [_most(least, wanted, lambda n, end=end: n <= end) for end in range(70)]

    assert found == [max(least, min(end, wanted)) for end in range(70)]
