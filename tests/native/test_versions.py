"""Other versions of llama.cpp: what they lack is said, and their states are nobody else's."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import build_lib
from pyllama_raw import CacheConfig, Engine, EngineConfig, SamplingParams
from pyllama_raw.errors import Unsupported
from pyllama_raw.native import libllama
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import lib, llama_version, need
from pyllama_raw.native.model import Model
from pyllama_raw.native.projector import Projector
from scripts.llama_source import CMAKE_ARGS, WINDOW, home_of
from tests.support.limits import LIMIT_S
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

ONE = "one llama.cpp is built here: scripts/test --llama newest builds another"
CHILD = """
import json, sys
from pyllama_raw import Engine, EngineConfig, SamplingParams
from pyllama_raw.errors import InvalidRequest
from pyllama_raw.native.libllama import llama_version, state_version
from pyllama_raw.options.config import CacheConfig, ContextConfig, SchedulerConfig

model, directory, saved, *restored = sys.argv[1:]
config = EngineConfig(
    context=ContextConfig(n_ctx=2048, n_threads=1),
    scheduler=SchedulerConfig(n_slots=1, token_budget=512),
    cache=CacheConfig(directory=directory, max_entries=0),
)
prompt = [3 + i * 7 % 250 for i in range(150)]
with Engine.open(model, config) as engine:
    refused = []
    for file in restored:
        try:
            engine.restore_slot(0, file)
        except InvalidRequest as error:
            refused.append(error.name)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    result = engine.complete(prompt, params)
    if saved:
        engine.save_slot(0, saved)
print(json.dumps([
    f"{llama_version()}, states {state_version()}", result.token_ids,
    result.usage.cached_tokens > 0, refused,
]))
"""


def other_packages(folder: Path) -> dict[str, Path]:
    """Copies of this package in *folder*, each with a version of the window that is built here."""
    packages = {}
    for name, version in WINDOW.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("PYLLAMA_RAW_SOURCE", raising=False)
            patch.delenv("PYLLAMA_RAW_CMAKE_ARGS", raising=False)
            if name != "pinned":
                if not home_of(version).is_dir():
                    continue
                patch.setenv("PYLLAMA_RAW_SOURCE", str(home_of(version)))
                patch.setenv("PYLLAMA_RAW_CMAKE_ARGS", CMAKE_ARGS)
            key = build_lib.build_key(build_lib.cpu_of_library())
            prefix = build_lib.fetch.cache_dir() / "lib" / key
        library = build_lib.Library(prefix, prefix / "include", prefix / "lib", True)
        extension = build_lib.kept_extension(library)
        if extension is None or not extension.is_file():
            continue
        package = folder / name / "pyllama_raw"
        native = shutil.ignore_patterns("lib", "_llama*.so", "__pycache__")
        shutil.copytree(build_lib.ROOT / "pyllama_raw", package, ignore=native)
        shutil.copy(extension, package / "_ffi" / "_llama.abi3.so")
        (package / "_ffi" / "lib").mkdir()
        for path in library.files:
            shutil.copy(path, package / "_ffi" / "lib")
        packages[name] = package.parent
    return packages


def complete(
    package: Path,
    directory: Path,
    target: Path | str = "",
    sources: Sequence[Path] = (),
) -> Any:
    """
    Version, tokens, whether some of the prompt were computed before, and refusals.

    Args:
        directory: of states that are looked for by themselves.
        target: a file for the slot, afterwards.
        sources: files for the slot, before.
    """
    arguments = (tiny_model("llama"), directory, target, *sources)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, arguments)],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_state_of_one_version_is_a_miss_for_another(tmp_path):
    """
    Each finds its own in a directory that versions share, and computes what it would without.
    """
    packages = other_packages(tmp_path)
    if len(packages) < 2:
        pytest.skip(ONE)
    shared, expected = tmp_path / "shared", []
    for name, package in packages.items():
        version, tokens, *_ = complete(package, tmp_path / f"alone-{name}")
        expected.append([version, tokens, False, []])

    first = [complete(package, shared) for package in packages.values()]
    second = [complete(package, shared) for package in packages.values()]

    assert len({version for version, *_ in expected}) == len(packages)
    assert first == expected
    assert second == [[version, tokens, True, []] for version, tokens, *_ in expected]


def test_the_file_of_a_slot_is_refused_by_another_version(tmp_path):
    """
    It computes what it would without. Its own file has what it goes on from.
    """
    packages = other_packages(tmp_path)
    if len(packages) < 2:
        pytest.skip(ONE)
    files = {name: tmp_path / f"slot-{name}" for name in packages}
    expected = [
        complete(package, tmp_path / f"first-{name}", files[name])
        for name, package in packages.items()
    ]

    answers, answers_of_own = [], []
    for name, package in packages.items():
        foreign = [file for other, file in files.items() if other != name]
        answers.append(complete(package, tmp_path / f"others-{name}", "", foreign))
        answers_of_own.append(
            complete(package, tmp_path / f"own-{name}", "", [files[name]])
        )

    refusals = ["path"] * (len(packages) - 1)
    assert answers == [
        [version, tokens, False, refusals] for version, tokens, *_ in expected
    ]
    assert answers_of_own == [
        [version, tokens, True, []] for version, tokens, *_ in expected
    ]


def test_what_a_version_lacks_is_said_with_the_version():
    """
    By the feature that needs it, and not when the library is loaded.
    """
    need("all", "llama_decode", "LLAMA_DEFAULT_SEED")
    with pytest.raises(Unsupported) as caught:
        need("a feature", "llama_decode", "llama_of_tomorrow")

    assert str(caught.value) == (
        f"a feature: llama.cpp {llama_version()}, which is loaded, has no "
        "llama_of_tomorrow: build pyllama_raw with a newer llama.cpp, as the pinned one"
    )


def test_files_of_states_need_a_version_that_bounds_them(monkeypatch, tmp_path):
    """
    One that takes what memory a file asks for is refused at the directory and at files of slots.
    """
    message = f"llama.cpp {llama_version()}, which is loaded, makes room for as many"
    path, refusals = tiny_model("llama"), []
    monkeypatch.setattr(libllama.lib, "plr_state_is_bounded", lambda: False)
    with pytest.raises(Unsupported, match=message):
        Engine.open(path, EngineConfig(cache=CacheConfig(directory=tmp_path)))
    with Engine.open(path) as engine:
        result = engine.complete("a text", SamplingParams(max_tokens=2))
        for move in (engine.save_slot, engine.restore_slot):
            with pytest.raises(Unsupported, match=message) as caught:
                move(0, tmp_path / "slot")
            refusals.append(caught.value.operation)

    assert result.usage.completion_tokens == 2
    assert refusals == ["states of slots in files"] * 2
    assert [*tmp_path.iterdir()] == []


@pytest.mark.skipif(
    hasattr(lib, "LLAMA_LAZY_MODE_ON"), reason="this llama.cpp lacks nothing"
)
def test_an_older_version_does_all_else(tmp_path):
    """
    Options and images that it cannot have are refused; models compute without.
    """
    path = tiny_model("llama")
    with Model.load(path, lazy_mode="auto") as model:
        with Context(model, n_seq_max=1) as context:
            assert context.max_tokens == context.n_batch
        with pytest.raises(Unsupported, match="has no mtmd_tokenize_from_parts"):
            Projector.load(tmp_path / "any", model)
    with pytest.raises(Unsupported, match=r"lazy_mode='on': .* no LLAMA_LAZY_MODE"):
        Model.load(path, lazy_mode="on")
