"""
Run the tests of llama.cpp's own server with pyllama-llama-server in its place.

    python -m scripts.try_llama_tests [FILE ...] [--keep FOLDER] [--server PROGRAM] [-k EXPRESSION]

The tests are those of the pinned source, unchanged, in an environment of their own with what
they require, and pyllama-llama-server is started as they would start llama-server. Their models lie
on a hub: tiny random ones stand in the folder into which they would be fetched.

scripts/llama_tests.toml names what is out of scope, and which tests have to fail here, each with a
reason: it is a mistake if one of these passes, or another one fails. With another program, such as
llama.cpp's own, the failures are shown, and nothing is expected of them.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree as ET

import build_lib
from scripts.llama_source import unpack
from scripts.mutations import gguf_file
from scripts.tiny_models import vocab
from tests.support.tiny import tiny_adapter, tiny_model, tiny_projector

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "scripts" / "llama_tests.toml"
PARTS = ("tools/server/tests", "models/templates", "tools/mtmd/test-1.jpeg")
ADAPTER = "moe_shakespeare15M.gguf"  # the name of the file that the tests would fetch
COMMIT = "0" * 40
SPLIT = "tinyllamas/split/stories15M-q8_0-0000{}-of-00003.gguf"
MODELS = {  # tiny ones by the files of a hub for which they stand
    "ggml-org/test-model-stories260K": {"stories260K-f32.gguf": "llama"},
    "ggml-org/models": {
        "bert-bge-small/ggml-model-f16.gguf": "bert",
        "jina-reranker-v1-tiny-en/ggml-model-f16.gguf": "bert-rank",
        **{SPLIT.format(n): "llama" for n in (1, 2, 3)},
    },
    "ggml-org/stories15M_MOE": {"stories15M_MOE-F16.gguf": "llama-moe"},
}
INFILL = "ggml-org/test-model-stories260K-infill"
VISION, PROJECTOR = "ggml-org/tinygemma3-GGUF", "gemma3"
FILL = {  # what the model for gaps has, and no other
    "tokenizer.ggml.fim_pre_token_id": vocab.MASK,
    "tokenizer.ggml.fim_suf_token_id": vocab.SEP,
    "tokenizer.ggml.fim_mid_token_id": vocab.UNKNOWN,
}


def main() -> int:
    """0 if exactly those tests failed that have to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="such as test_basic.py; all in scope")
    parser.add_argument("--keep", type=Path, help="unpack to this folder, and keep it")
    parser.add_argument("--server", help="another program than pyllama-llama-server")
    parser.add_argument("-k", dest="expression", help="as of pytest")
    options = parser.parse_args()
    table = tomllib.loads(TABLE.read_text())
    with tempfile.TemporaryDirectory() as scratch:
        tests = unpacked(options.keep or Path(scratch)) / "tools/server/tests"
        files = options.files or in_scope(tests, table["out_of_scope"])
        outcomes = run(tests, files, options.expression, options.server)
    if options.server is not None:
        return report(outcomes, set())
    is_all = not (options.files or options.expression)
    idle = unmatched(table["fails"], outcomes) if is_all else []
    for pattern in idle:
        print(f"{TABLE.name} has {pattern}, which is no test")
    return report(outcomes, expected(table["fails"], outcomes)) or int(bool(idle))


# -- the tests and their models ----------------------------------------------------------


def unpacked(folder: Path) -> Path:
    """What the tests need of the pinned source, in *folder*."""
    unpack(folder, PARTS)
    downloads = folder / "tools/server/tests/tmp"
    downloads.mkdir(exist_ok=True)
    shutil.copy(tiny_adapter("lora-moe"), downloads / ADAPTER)
    fill_hub(downloads)
    return folder


def fill_hub(folder: Path) -> None:
    """Put the models into *folder*, as if they had been fetched."""
    for repo, files in MODELS.items():
        for name, model in files.items():
            shutil.copy(tiny_model(model), _place(folder, repo, name))
    file = gguf_file.read(tiny_model("llama"))
    for key, token in FILL.items():
        file.values[key.encode()] = gguf_file.Value(gguf_file.U32, token)
    _place(folder, INFILL, "stories260K-infill-f32.gguf").write_bytes(file.encode())
    projector, model = tiny_projector(PROJECTOR)
    shutil.copy(model, _place(folder, VISION, "tinygemma3-Q8_0.gguf"))
    shutil.copy(projector, _place(folder, VISION, "mmproj-tinygemma3.gguf"))


def _place(folder: Path, repo: str, name: str) -> Path:
    """Where a file of a repository lies in the folder of Hugging Face's library."""
    base = folder / f"models--{repo.replace('/', '--')}"
    (base / "refs").mkdir(parents=True, exist_ok=True)
    (base / "refs/main").write_text(COMMIT)
    path = base / "snapshots" / COMMIT / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def in_scope(tests: Path, exceptions: Mapping[str, str]) -> list[str]:
    """Names of the files that have to be tried."""
    names = sorted(path.name for path in (tests / "unit").glob("test_*.py"))
    return [name for name in names if name not in exceptions]


# -- a run -------------------------------------------------------------------------------


def environment(tests: Path) -> Path:
    """The Python of an environment with what the tests require; it is made once."""
    requirements = (tests / "requirements.txt").read_bytes()
    key = hashlib.sha256(requirements + sys.version.encode()).hexdigest()[:16]
    folder = build_lib.fetch.cache_dir() / "llama-tests" / key
    python = folder / "bin" / "python"
    if not (folder / "done").is_file():
        venv.create(folder, clear=True, with_pip=True)
        pip = [python, "-m", "pip", "install", "--quiet", "-r"]
        subprocess.run([*pip, tests / "requirements.txt"], check=True)
        (folder / "done").touch()
    return python


def run(
    tests: Path, files: list[str], expression: str | None, server: str | None
) -> dict[str, str]:
    """Outcomes by id: "passed", "skipped", or the line that says what failed."""
    report = tests / "outcomes.xml"
    command = [environment(tests), "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    command += ["-m", "not slow", f"--junitxml={report}", "--tb=short"]
    command += [f"unit/{name}" for name in files]
    command += ["-k", expression] if expression else []
    program = Path(sys.executable).with_name("pyllama-llama-server")
    own = {
        "LLAMA_SERVER_BIN_PATH": server or str(program),
        "PYTHONPATH": str(ROOT),  # the program is that of this tree
        "PORT": str(free_port()),
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "no_proxy": "*",
    }
    subprocess.run(command, cwd=tests, env={**os.environ, **own}, check=False)
    return read_outcomes(report)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read_outcomes(report: Path) -> dict[str, str]:
    """From a file of JUnit's form."""
    outcomes: dict[str, str] = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it
        name = f"{case.get('classname', '').rpartition('.')[2]}.py::{case.get('name')}"
        outcome = "passed"
        for child in case:
            if child.tag in ("failure", "error"):
                outcome = (child.get("message") or "failed").splitlines()[0][:150]
            elif child.tag == "skipped":
                outcome = "skipped"
        outcomes[name] = outcome
    return outcomes


# -- what is expected of it --------------------------------------------------------------


def expected(fails: Mapping[str, list[str]], outcomes: Mapping[str, str]) -> set[str]:
    """Ids of tests that have to fail, by patterns."""
    return {name for names in _found(fails, outcomes).values() for name in names}


def unmatched(fails: Mapping[str, list[str]], outcomes: Mapping[str, str]) -> list[str]:
    """Patterns that stand for no test."""
    return [pattern for pattern, names in _found(fails, outcomes).items() if not names]


def _found(
    fails: Mapping[str, list[str]], outcomes: Mapping[str, str]
) -> dict[str, list[str]]:
    patterns = [pattern for of_reason in fails.values() for pattern in of_reason]
    return {p: fnmatch.filter(outcomes, p.replace("[", "[[]")) for p in patterns}


def report(outcomes: Mapping[str, str], expected: set[str]) -> int:
    """Tell what is otherwise than it has to be."""
    bad = {n: o for n, o in outcomes.items() if o not in ("passed", "skipped")}
    wrong = {n: o for n, o in bad.items() if n not in expected}
    passed = sorted(expected - bad.keys())
    for name, outcome in wrong.items():
        print(f"FAILS: {name}: {outcome}")
    for name in passed:
        print(f"PASSES, although {TABLE.name} says that it fails: {name}")
    n_skipped = list(outcomes.values()).count("skipped")
    n_passed = len(outcomes) - n_skipped - len(bad)
    print(
        f"{n_passed} passed, {len(bad)} failed, {len(expected)} of which have to, "
        f"{n_skipped} skipped by the tests themselves"
    )
    return 1 if wrong or passed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
