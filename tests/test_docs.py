"""What the documents show is what runs."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pyllama_raw.cli.command import _parser

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted(ROOT.glob("*.md"))
SHELLS = [*DOCS, ROOT / "benchmarks" / "README.md"]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# Runs an example on the model of the tests.
ON_MODEL = """
import runpy, sys
from pathlib import Path
from pyllama_raw import models

models.resolve_model = lambda spec: Path(sys.argv[2])
runpy.run_path(sys.argv[1], run_name="__main__")
"""

SHOWN = {
    "quickstart": ["Paris", "Usage(prompt_tokens=5"],
    "stream": ["stream 0 ended with", "stream 1 ended with", "stream 2 ended with"],
    "chat": ["> Name one colour.\n", "> And another one?\n"],
    "complete_many": ["Count on: 0, 1, 2, 3", "Count on: 7, 8, 9, 10"],
    "choices": ["0 (seed 7):", "2 (seed 9):", "['length', 'length', 'length']"],
    "profile": ["Paris"],
    "score": ["  The cat sat on the mat.", "7042 -0."],
    "cancel": ["left: cancelled", "too late: deadline True", "cancelled: True"],
}


def blocks(path: Path, language: str) -> list[str]:
    """Code blocks of *language*."""
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_python_blocks_are_examples(path: Path):
    """
    Every Python block of a document is one of the example files, word for word.
    """
    examples = {example.read_text() for example in EXAMPLES}

    assert set(blocks(path, "python")) <= examples


@pytest.mark.parametrize("path", SHELLS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_understood(path: Path):
    """
    Every command of ours in a shell block has flags that exist; every script is there.
    """
    for line in "".join(blocks(path, "bash")).splitlines():
        words = shlex.split(line, comments=True)
        for word in words:
            assert not word.startswith("benchmarks/") or (ROOT / word).is_file()
        if words[:1] == ["pyllama-raw"]:
            _parser().parse_args(words[1:])
        elif words and words[0].startswith("scripts/"):
            assert (ROOT / words[0]).is_file()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(path: Path):
    """
    Every relative link, and every path written as code, exists.
    """
    text = path.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    paths = re.findall(r"`((?:\w+/)*\w+\.py|(?:scripts|examples)/\w*)`", text)

    assert [link for link in links + paths if not (ROOT / link).exists()] == []


def test_dependencies_have_a_reason():
    """
    The table of ARCHITECTURE.md lists what pyproject.toml requires, no more, no less.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"\W", line)[0] for line in project["dependencies"]]
    table = (ROOT / "ARCHITECTURE.md").read_text().split("| --- | --- |\n")[1]

    assert re.findall(r"^\| (\w+) \|", table, re.MULTILINE) == sorted(names)


@pytest.mark.native
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path: Path, model_path: Path):
    """
    Every example ends well, without a warning, and prints what it should.
    """
    command = [sys.executable, "-W", "error", "-c", ON_MODEL, path, model_path]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},  # share busy machines
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert [text for text in SHOWN[path.stem] if text not in done.stdout] == []
