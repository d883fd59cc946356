"""One wheel for every CPU: built, installed where no compiler is, run on each of its variants."""

import faulthandler
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pyllama_raw._ffi.cpu_level import VARIANTS
from tests.support.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[1]
MAX_BYTES = 25_000_000
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a lighthouse",
    "def fibonacci(n):",
    "Water boils at 100 degrees, and",
)
N_TOKENS = 32
TEXT = (
    "Every evening the keeper climbed the stairs, lit the lamp and wrote the weather into "
    "his book. Water boils at 100 degrees, and the capital of Italy is Rome."
)
IDS = list(range(3, 60))
# What a variant computes of two models: of quantised weights, and of floats.
OUTPUTS = f"""
import json, sys
from pyllama_raw import Engine, SamplingParams, score
from pyllama_raw.native.libllama import cpu_variant
quantised, floats = sys.argv[1:]
with Engine.open(quantised) as engine:
    params = SamplingParams(max_tokens={N_TOKENS}, temperature=0, ignore_eos=True, logprobs=2)
    results = [engine.complete(prompt, params) for prompt in {PROMPTS!r}]
scores = [score({TEXT!r}, model=quantised), score({IDS!r}, model=floats)]
variant = cpu_variant()
print(json.dumps({{
    "variant": variant and variant.name,
    "tokens": [list(result.token_ids) for result in results],
    "margins": [[one.top[0][1] - one.top[1][1] for one in r.logprobs] for r in results],
    "scores": [[one.logprob for one in each.logprobs] for each in scores],
}}))
"""
# Of log-probabilities. Levels of CPUs round the inputs of quantised products otherwise, which moves
# those of a model as small as the default one by 0.06 on average; without AVX2, floats by 0.002.
MEAN_OF_QUANTISED, MAX_OF_FLOATS = 0.15, 0.02

pytestmark = [
    pytest.mark.native,
    pytest.mark.nightly,
    pytest.mark.skipif(
        not shutil.which("gcc")
        or sys.platform != "linux"
        or os.uname().machine != "x86_64",
        reason="wheels are built by GCC, for Linux on x86-64",
    ),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Made of this folder, as it is now."""
    # Compiling takes minutes, and the commands have limits of their own.
    faulthandler.cancel_dump_traceback_later()
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [ROOT / "scripts" / "wheel", "--out", out],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


class Bare:
    """A virtual environment with the wheel, and a PATH where nothing else is."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        python = [sys.executable, "-m"]
        subprocess.run([*python, "venv", folder / "venv"], check=True)
        self.run("python", "-m", "pip", "install", "-q", str(wheel))

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess:
        names = ("HOME", "PYLLAMA_RAW_CACHE", "XDG_CACHE_HOME", "PIP_INDEX_URL")
        env = {name: os.environ[name] for name in names if name in os.environ}
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.folder,
            env={**env, "PATH": str(self.bin), **environment},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> Bare:
    return Bare(tmp_path_factory.mktemp("bare"), wheel)


def test_a_wheel_is_small_and_for_every_python(wheel):
    """
    All native parts are in it, for each CPython from 3.11 on, and no path of this machine is.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name for name in archive.namelist() if "/_ffi/" in name}
        native = [archive.read(name) for name in archive.namelist() if ".so" in name]

    assert re.fullmatch(
        r"pyllama_raw-\S+-cp311-abi3-manylinux_2_\d\d_x86_64\.whl", wheel.name
    )
    assert wheel.stat().st_size <= MAX_BYTES
    assert {name for name in names if name.endswith((".so", ".0", ".1"))} == {
        "_llama.abi3.so",
        *(f"lib{name}.so.0" for name in ("llama", "mtmd", "ggml", "ggml-base")),
        *(f"libggml-cpu-{name}.so" for name in VARIANTS),
        "libgomp.so.1",
    }
    assert {"LICENSE.llama.cpp", "LICENSE.libgomp"} <= names
    assert [data for data in native if str(ROOT).encode() in data] == []


def test_a_wheel_runs_without_a_compiler(bare, model_path):
    """
    README's example, and the command, on the best variant.
    """
    example = (ROOT / "examples" / "quickstart.py").read_text()
    code = example.replace(
        "AsyncEngine.open()", f"AsyncEngine.open({str(model_path)!r})"
    )

    quickstart = bare.run("python", "-c", code)
    generated = bare.run(
        *("pyllama-raw", "generate", "--model", str(model_path)),
        *("--max-tokens", "8", "--temperature", "0", PROMPTS[0]),
    )
    info = bare.run("pyllama-raw", "info", str(model_path))

    assert "Paris" in quickstart.stdout, quickstart.stderr
    assert "Paris" in generated.stdout, generated.stderr
    assert re.search(
        r"^  cpu variant +(\w+) \(best score of", info.stdout, re.MULTILINE
    )


def test_a_wheel_says_which_variants_run(bare, model_path):
    """
    A name that nobody knows is no reason to compute with another one.
    """
    done = bare.run("pyllama-raw", "info", str(model_path), PYLLAMA_RAW_CPU="i386")

    assert done.returncode == 1
    assert (
        "PYLLAMA_RAW_CPU=i386: this library has no such variant; here run sse42"
        in done.stderr
    )


def differences(scores: list[float], reference: list[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(scores, reference, strict=True)]


def partings(native: dict, other: dict) -> list[float]:
    """The margins of native greedy tokens where the *other* outputs leave them."""
    margins = []
    outputs = zip(native["tokens"], native["margins"], other["tokens"], strict=True)
    for tokens, places, theirs in outputs:
        pairs = zip(tokens, places, theirs, strict=True)
        apart = [margin for mine, margin, token in pairs if mine != token]
        margins += apart[:1]
    return margins


def test_variants_compute_what_a_native_build_does(bare, model_path):
    """
    The best one gives the bits of a native build of this CPU. Others give the log-probabilities
    of texts within the rounding of their level, and leave greedy outputs at near ties only.
    """
    models = str(model_path), str(tiny_model("llama"))
    refusal = bare.run("python", "-c", OUTPUTS, *models, PYLLAMA_RAW_CPU="i386")
    here = re.search(r"here run ([\w, ]+) \(or", refusal.stderr)
    assert here is not None, refusal.stderr
    done = subprocess.run(
        [sys.executable, "-c", OUTPUTS, *models],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    native = json.loads(done.stdout)
    outputs = {}
    for name in here[1].split(", "):
        done = bare.run("python", "-c", OUTPUTS, *models, PYLLAMA_RAW_CPU=name)
        assert done.returncode == 0, done.stderr
        outputs[name] = json.loads(done.stdout)

    assert [output["variant"] for output in outputs.values()] == list(outputs)
    *_, best = outputs.values()
    assert (best["tokens"], best["scores"]) == (native["tokens"], native["scores"])
    for name, output in outputs.items():
        quantised, floats = map(differences, native["scores"], output["scores"])
        assert sum(quantised) / len(quantised) <= MEAN_OF_QUANTISED, name
        assert max(floats) <= MAX_OF_FLOATS, name
        ties = partings(native, output)
        assert max(ties, default=0) <= 2 * max(quantised), (name, ties)
