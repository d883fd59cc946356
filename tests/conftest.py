"""Fixtures for all tests: the event loops, and the model file of the native tests."""

import faulthandler
import functools
import gc
import os
import re
import signal
import ssl
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from hypothesis import settings

CORE = Path(__file__).parent / "core"
PACKAGE_CORE = Path(__file__).parents[1] / "pyllama_raw" / "core"
# Other tests that reach branches of core/: what programs see of slots, stops and sources.
WATCHED = {
    CORE.with_name("api") / f"test_{name}.py"
    for name in ("content_stops", "reply_text", "slots", "sources_life")
} | {CORE.with_name("lab") / "sim" / "test_broken_policies.py"}
ALL_NATIVE = re.compile(r"^pytestmark = (\[[^]]*)?pytest\.mark\.native\b", re.MULTILINE)

# A busy machine is no failure; a hang is found by pytest's own limit.
N_EXAMPLES = int(os.environ.get("PYLLAMA_RAW_TEST_EXAMPLES", "25"))
settings.register_profile("pyllama_raw", deadline=None, max_examples=N_EXAMPLES)
settings.load_profile("pyllama_raw")

# Clients of HTTP read all certificates of the system, each for itself, in 40 ms; we use none.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# Imports and ten thousand items make much and leave no garbage.
gc.disable()

# A shell ignores interrupts for what it runs in the background; processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only files that have tests of the layer, as `-m` says it."""
    layer = config.option.markexpr
    if "native" not in layer or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    if "not native" in layer:
        return True if ALL_NATIVE.search(text) else None
    return None if "mark.native" in text else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """
    Let few tests reach the branches of core/: its own, but for the longest histories.

    A test is three times as long while it is watched, and what is reached by chance is not
    reached by the next one.
    """
    watched = WATCHED | set(CORE.rglob("*.py"))
    for item in items:
        if item.path not in watched:
            item.add_marker("unwatched")


@contextmanager
def unwatched() -> Generator[None, None, None]:
    """Keep tracers off the block; `no_cover` of pytest-cov does not in workers."""
    tracers = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracers[0])
        threading.settrace(tracers[1])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Watch how core/ is imported, and not how all tests are: that takes seconds of each worker."""
    if sys.gettrace() is None:
        return (yield)
    for path in PACKAGE_CORE.rglob("*.py"):
        names = path.relative_to(PACKAGE_CORE.parents[1]).with_suffix("").parts
        import_module(".".join(names).removesuffix(".__init__"))
    with unwatched():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Keep tracers off tests that are not watched, their fixtures and reports."""
    if item.get_closest_marker("unwatched") is None:
        return (yield)
    with unwatched():
        return (yield)


@contextmanager
def without_what_an_older_version_lacks() -> Generator[None, None, None]:
    """Skip what needs more of libllama than the one that is loaded has; the reason names both."""
    try:
        yield
    except Exception as error:
        # A group of tasks puts what ends one of them into a group of errors.
        only = error
        while isinstance(only, ExceptionGroup) and len(only.exceptions) == 1:
            [only] = only.exceptions
        # `need` of native/libllama.py, which this file does not import: core/ needs no library.
        is_lack = ", which is loaded, has no " in str(only)
        if is_lack and type(only).__name__ == "Unsupported":
            pytest.skip(str(only))
        raise


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Tests of images run with each version that can read images."""
    with without_what_an_older_version_lacks():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    """
    So do their fixtures.

    That of a module fails once, and pytest gives its error to later tests without another call.
    """
    with without_what_an_older_version_lacks():
        return (yield)


def pytest_collection_finish() -> None:
    """Leave modules out of later collections of garbage, many of which tests ask for."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say what each thread does when something was waited for too long."""
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(TimeoutError):
        with TemporaryFile("w+") as stacks:
            faulthandler.dump_traceback(stacks)
            stacks.seek(0)
            report.sections.append(("threads", stacks.read()))
    return report


@pytest.fixture
def anyio_backend() -> str:
    """One event loop; tests of what depends on loops import both from tests.support.loops."""
    return "asyncio"


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model, or the file that PYLLAMA_RAW_TEST_MODEL names."""
    path = os.environ.get("PYLLAMA_RAW_TEST_MODEL")
    if path:
        return Path(path)
    from pyllama_raw.options.models import default_model

    return default_model(progress=False)


@pytest.fixture
def media_library() -> None:
    """
    Skip a test whose processes load projectors, where libllama is too old for any.

    They would tell it by their exit codes and outputs only.
    """
    from pyllama_raw.native.libllama import need

    need("images and sounds", "mtmd_tokenize_from_parts")
