"""Options are made smaller where memory is short, and nowhere else."""

from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pytest

from pyllama_raw import (
    ContextConfig,
    Engine,
    EngineConfig,
    MediaConfig,
    Model,
    ModelConfig,
)
from pyllama_raw.engine import estimate as fit
from pyllama_raw.engine.estimate import (
    DeviceMemory,
    MemoryEstimate,
    _most,
    estimate,
    fitted,
)
from pyllama_raw.errors import ContextFailed
from pyllama_raw.native.libllama import Device
from tests.support.tiny import tiny_model

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


class Layered:
    """Stands for an Outline: each layer takes 10 bytes of a device, or of the host."""

    capabilities = None
    generates = True

    def __init__(self, path: Path, config: EngineConfig) -> None:
        self.model = SimpleNamespace(n_ctx_train=8192, n_layer=6)
        self._config = config

    def memory(self, config: EngineConfig) -> MemoryEstimate:
        asked = self._config.model.n_gpu_layers
        n_there = 7 if asked < 0 else min(asked, 7)
        n_ctx = config.context.n_ctx
        assert n_ctx is not None
        return MemoryEstimate(
            (
                DeviceMemory("CPU", 10 * (7 - n_there), 0, 0, 0),
                DeviceMemory("GPU0", 10 * n_there, n_ctx // 256, 0, 0),
            ),
            n_ctx,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(
    ("room", "told"),
    [
        (102, []),
        (101, ["n_ctx=7936"]),
        (72, ["n_ctx=512"]),
        (71, ["n_ctx=512", "n_gpu_layers=6"]),
        (25, ["n_ctx=512", "n_gpu_layers=2"]),
        (1, ["n_ctx=512", "n_gpu_layers=0"]),
    ],
)
def test_layers_leave_a_device_once_cells_are_few(
    room: int,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """
    Cells come first, down to the floor; then as many layers stay as there is room for.
    """
    monkeypatch.setattr(fit, "Outline", Layered)
    monkeypatch.setattr(fit, "estimate", lambda p, c: Layered(p, c).memory(c))

    chosen = fitted(tiny_model("llama"), CONFIG, room={"CPU": 0, "GPU0": room})

    assert caplog.messages == [f"memory is short: {', '.join(told)}"] * bool(told)
    names = [
        f"n_ctx={chosen.context.n_ctx}",
        f"n_gpu_layers={chosen.model.n_gpu_layers}",
    ]
    assert told == [name for name in names if name in told]


def test_a_floor_holds_where_layers_cannot_be_reckoned(monkeypatch: pytest.MonkeyPatch):
    """
    Not even a failure of each try brings back the cells that do not fit.
    """

    def fail(*_: object) -> MemoryEstimate:
        raise ContextFailed("llama_init_from_model", None, "no room")

    monkeypatch.setattr(fit, "Outline", Layered)
    monkeypatch.setattr(fit, "estimate", fail)

    chosen = fitted(tiny_model("llama"), CONFIG, room={"CPU": 0, "GPU0": 0})

    assert (chosen.context.n_ctx, chosen.model.n_gpu_layers) == (512, 0)


@pytest.mark.parametrize(
    ("margin", "room"),
    [
        (None, {"GPU0": 23 * 2**30, "GPU1": 7 * 2**29}),
        (2**20, {"GPU0": 24 * 2**30 - 2**20}),
    ],
)
def test_a_margin_of_each_device_stays_free(
    margin: int | None, room: dict[str, int], monkeypatch: pytest.MonkeyPatch
):
    """
    1 GiB, or a 16th of a small device, or as many bytes as an option says.
    """
    sizes = {"GPU0": 24 * 2**30, "GPU1": 4 * 2**30}
    made = [
        Device(name, name, "gpu", sizes[name] - (name == "GPU1") * 2**28, sizes[name])
        for name in room
    ]
    monkeypatch.setattr(fit, "devices", lambda: made)

    assert fit._free(margin) == room


@pytest.mark.parametrize(
    ("layers", "chosen", "expected"),
    [(0, None, False), (-1, None, True), (0, True, True), (-1, False, False)],
)
def test_a_projector_has_a_place_of_its_own(layers, chosen, expected):
    """
    Where layers of the model are, unless an option says where.
    """
    config = EngineConfig(
        model=ModelConfig(n_gpu_layers=layers), media=MediaConfig(on_device=chosen)
    )

    assert config.projector_on_device is expected


def test_nothing_is_reckoned_where_memory_is_plenty(monkeypatch: pytest.MonkeyPatch):
    """
    The header alone tells that all fits.
    """
    monkeypatch.setattr(fit, "Outline", None)

    assert fitted(tiny_model("llama"), CONFIG, room={"CPU": 2**36}) is CONFIG


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen35", "mamba2", "bert"])
def test_plenty_is_more_than_an_engine_takes(name: str):
    """
    Wherever nothing is reckoned, it would have fitted.
    """
    path, room = tiny_model(name), 2**20

    while not fit._is_plenty(path, CONFIG, {"CPU": room}):
        room *= 2

    assert estimate(path, CONFIG).total_bytes < room // 2
