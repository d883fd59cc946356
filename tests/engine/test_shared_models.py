"""One model for all who open it at the same time: who loads, waits, leaves, and frees."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pyllama_raw.engine import shared_models
from pyllama_raw.engine.shared_models import ModelUse, Shared, open_model
from pyllama_raw.errors import ClosedError, ModelLoadFailed
from tests.engine.support import HANG_S


class Halfway:
    """Stands for the native LoadProgress."""

    fraction = 0.5
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loads:
    """Stands for the native Model: counts what is loaded, and loads when it is told to."""

    def __init__(self) -> None:
        self.n_loads = self.n_open = 0
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.error: Exception | None = None
        self._lock = threading.Lock()

    def load(self, path: Path, *, progress: Halfway, **options: object) -> "Loads":
        with self._lock:
            self.n_loads += 1
        self.begun.set()
        while not self.go_on.wait(0.001):
            if progress.cancelled:
                raise ModelLoadFailed(str(path), "stopped")
        if self.error is not None:
            raise self.error
        with self._lock:
            self.n_open += 1
        return self

    def close(self) -> None:
        with self._lock:
            self.n_open -= 1

    @property
    def counts(self) -> tuple[int, int]:
        return self.n_loads, self.n_open


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loads]:
    fake = Loads()
    monkeypatch.setattr(shared_models, "Model", fake)
    monkeypatch.setattr(shared_models, "LoadProgress", Halfway)
    monkeypatch.setattr(shared_models, "_models", Shared())
    yield fake
    assert len(shared_models._models) == 0
    assert fake.n_open == 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "model.gguf"
    found.write_bytes(b"weights")
    return found


def test_a_model_is_loaded_once_and_freed_by_the_last_who_leaves(loads, path):
    """
    In whatever order they leave; who comes after that loads it again.
    """
    first, second = open_model(path, {}), open_model(path, {})
    third = first.share()
    assert loads.counts == (1, 1)
    first.close()
    first.close()
    third.close()
    assert loads.counts == (1, 1)
    second.close()
    assert loads.counts == (1, 0)
    open_model(path, {}).close()

    assert loads.counts == (2, 0)


def test_other_options_and_another_file_are_another_model(loads, path, tmp_path):
    """
    Also a file that has replaced the one that was loaded; another name of a file is not.
    """
    other_name = tmp_path / "link.gguf"
    other_name.symlink_to(path)
    override = {"kv_overrides": {"a": 1}}
    uses = [
        open_model(path, {}),
        open_model(other_name, {}),
        open_model(path, {"no_host": True}),
        open_model(path, override),
        open_model(path, {"kv_overrides": {"a": True}}),  # equal, for Python
        open_model(path, override),
    ]
    assert loads.n_open == 4
    (tmp_path / "new.gguf").write_bytes(b"weights")
    (tmp_path / "new.gguf").replace(path)
    uses.append(open_model(path, {}))
    assert loads.n_open == 5
    for use in uses:
        use.close()


def test_nothing_is_had_of_a_use_that_is_closed(loads, path):
    """
    Neither the model nor another use.
    """
    use = open_model(path, {})
    use.close()
    for ask in (lambda: use.model, lambda: use.files, use.share):
        with pytest.raises(ClosedError, match="open it again"):
            ask()


def opened_at_once(
    path: Path, reports: list[Callable[[float], bool]]
) -> list[ModelUse | Exception]:
    """What each thread gets."""

    def run(report: Callable[[float], bool]) -> ModelUse | Exception:
        try:
            return open_model(path, {}, report)
        except Exception as error:  # noqa: BLE001 - it is told
            return error

    with ThreadPoolExecutor(len(reports)) as threads:
        return list(threads.map(run, reports))


class Together:
    """A report that waits, once in each thread, until *n* have called it."""

    def __init__(self, n: int, loads: Loads) -> None:
        self._barrier = threading.Barrier(n, action=loads.go_on.set)
        self._waited = threading.local()

    def __call__(self, fraction: float) -> bool:
        if not hasattr(self._waited, "once"):
            self._waited.once = self._barrier.wait(HANG_S)
        return True


def test_who_leaves_while_it_loads_does_not_disturb_the_others(loads, path):
    """
    Those who are cancelled get an error, those who wait get the one model.
    """
    loads.go_on.clear()
    stay = Together(4, loads)

    def leave(fraction: float) -> bool:
        return not stay(fraction)

    found = opened_at_once(path, [leave, stay, leave, stay])

    kinds = [type(each) for each in found]
    assert kinds == [ModelLoadFailed, ModelUse, ModelLoadFailed, ModelUse]
    assert loads.counts == (1, 1)
    for use in found[1::2]:
        use.close()


def test_the_loading_stops_when_all_have_left(loads, path):
    """
    The next one loads anew.
    """
    loads.go_on.clear()

    found = opened_at_once(path, [lambda _: False] * 3)

    assert [type(each) for each in found] == [ModelLoadFailed] * 3
    assert loads.n_open == 0
    assert len(shared_models._models) == 0
    loads.go_on.set()
    open_model(path, {}).close()


def test_a_failure_is_told_to_all_who_wait(loads, path):
    """
    Each has an error of his own; the next one tries again.
    """
    loads.error = ModelLoadFailed(str(path), "damaged")
    loads.go_on.clear()
    found = opened_at_once(path, [Together(3, loads)] * 3)

    assert [str(each) for each in found] == [str(loads.error)] * 3
    assert len({id(each) for each in found}) == 3
    assert loads.counts == (1, 0)
    loads.error = None
    open_model(path, {}).close()


def test_what_a_report_raises_is_its_own(loads, path):
    """
    It ends that opening only.
    """
    loads.go_on.clear()

    def fail(fraction: float) -> bool:
        loads.go_on.set()
        raise LookupError("of the caller")

    found = opened_at_once(path, [fail, lambda _: True])

    assert [type(each) for each in found] == [LookupError, ModelUse]
    found[1].close()


def test_any_thread_may_come_and_leave(loads, path):
    """
    However they do there is at most one model, while anybody uses it.
    """

    def work(seed: int) -> None:
        chance = random.Random(seed)  # noqa: S311 - no secret
        uses: list[ModelUse] = []
        for _ in range(200):
            if uses and chance.random() < 0.5:
                uses.pop(chance.randrange(len(uses))).close()
            elif uses and chance.random() < 0.5:
                uses.append(uses[0].share())
            else:
                uses.append(open_model(path, {}))
            assert not uses or loads.n_open >= 1
        for use in uses:
            use.close()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
