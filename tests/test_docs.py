"""What the documents show is what runs."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Mapping
from pathlib import Path

import pytest

import pyllama_raw
from benchmarks.figures import BEGIN, END, table
from pyllama_raw import errors, policy, results, runners, serve, testing, tools
from pyllama_raw.cli.command import main, root_parser
from pyllama_raw.runners import errors as runner_errors
from tests.support.limits import LIMIT_S
from tests.support.tiny import tiny_adapter, tiny_model, tiny_projector

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
SHELLS = [*DOCS, ROOT / "benchmarks" / "README.md"]
INCLUDED = r'--8<-- "(.*)"\n'  # how a page of the site includes a file
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ENDLESS = {"service", "ray_cluster"}  # tests/examples and tests/replicas run them

ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.PyllamaError)
]
OF_RUNNERS = [
    kind
    for kind in vars(runner_errors).values()
    if isinstance(kind, type) and kind.__module__ == runner_errors.__name__
]
# Public names of modules that list none, and modules whose names are for programs.
ALONE = {"cluster", "application", "EngineMetrics", "EngineSpans", "RunnerContract"}
PUBLIC = (results, tools, runners, serve, policy, testing)

# Runs an example on the model of the tests.
ON_MODEL = """
import runpy, sys
from pathlib import Path
from pyllama_raw.options import models

models.resolve_model = lambda spec: Path(sys.argv[2])
models.resolve_projector = lambda *_: Path(sys.argv[3])
runpy.run_path(sys.argv[1], run_name="__main__")
"""

SHOWN = {
    "handler": [],  # a server runs it, as tests/examples does
    "adapters": ["{}: ", "{'legal': 1.0}: ", "{'legal': 1.0, 'brief': 0.5}: "],
    "quickstart": ["Paris", "Usage(prompt_tokens=5"],
    "speculation": [" drafts\n0\n"],
    "draft": [" of ", " drafts\n"],
    "stream": ["stream 0 ended with", "stream 1 ended with", "stream 2 ended with"],
    "chat": ["> Name one colour.\n", "> And another one?\n"],
    "tools": ["> Is it warmer in Oslo or in Rome?\n"],
    "reply_spec": ["\ncalls: ["],
    "complete_many": ["Count on: 0, 1, 2, 3", "Count on: 7, 8, 9, 10"],
    "classify": [" positive", " negative", "True ", " Paris"],
    "choices": ["0 (seed 7):", "2 (seed 9):", "['length', 'length', 'length']"],
    "policy": [
        "policy         ",
        "\nfcfs  ",
        "\nshort_prompts  ",
        "seconds;",
        " Paris",
    ],
    "steps": [
        "step 0",
        "request 1: ' Paris'",
        "request 2: ",
        "request 1 has ended: length",
    ],
    "image": ["4 rows of the image", "1 encode"],
    "observe": [
        "engine: running",
        "request 2: running",
        "engine: closed",
        "ann: 8 tokens in ",
        "steps computed ",
        "trace: True",
        "health: ready, waits 0.0 s",
        "vllm:generation_tokens_total 16.0",
    ],
    "life": [
        "level 1: sleeping",
        "level 2: sleeping",
        " tokens are cached after that",
        "equal: True; the engine is ",
    ],
    "profile": ["Paris"],
    "packets": [" bytes:  Paris"],
    "models": [
        "first:' ",
        "{'first': 'loaded', 'second': 'unloaded'}",
        "{'first': 'unloaded', 'second': 'loaded'}",
    ],
    "runners": ["Usage(prompt_tokens=", "completion_tokens="],
    "search": ["  Paris is the capital of France.", "0."],
    "rerank": ["  The giant panda is a bear", "  Paris is the capital of France."],
    "score": ["  The cat sat on the mat.", "7042 -0."],
    "two_engines": [
        "streams (4096 tokens a slot): ' Paris",
        "long (8192 tokens a slot)",
    ],
    "cancel": ["left: cancelled", "too late: deadline True", "cancelled: True"],
}


COMMANDS = ("bench", "chat", "embed", "generate", "info", "plot", "rank", "simulate")
COMMANDS += ("serve", "trace", "tune")


def blocks(path: Path, language: str) -> list[str]:
    """Code blocks of *language*; those of files are what the site shows of them."""
    found = re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)
    return [re.sub(INCLUDED, included, block) for block in found]


def included(match: re.Match[str]) -> str:
    return (ROOT / match[1]).read_text()


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_python_blocks_are_examples(path: Path):
    """
    Every Python block of a document is one of the example files, word for word.
    """
    examples = {example.read_text() for example in EXAMPLES}

    assert set(blocks(path, "python")) <= examples


def without_program(words: list[str]) -> list[str] | None:
    """The arguments of a command of ours; None if it is another one."""
    if words[1:3] == ["-m", "pyllama_raw"]:
        return words[3:]
    return words[1:] if words[:1] == ["pyllama-raw"] else None


def choices_of(parser: ArgumentParser) -> Mapping[str, ArgumentParser] | None:
    """Its commands; None if it has flags instead."""
    found = [each for each in parser._actions if isinstance(each, _SubParsersAction)]
    return found[0].choices if found else None


def unknown_words(words: list[str]) -> list[str]:
    """
    Of a command in prose: commands and flags that do not exist, and what a positional does
    not allow. It may lack what a whole command needs.
    """
    parser: ArgumentParser = root_parser()
    while (commands := choices_of(parser)) is not None and words:
        if words[0] not in commands:
            return words[:1]
        parser, words = commands[words[0]].filled(), words[1:]
    flags = {flag for action in parser._actions for flag in action.option_strings}
    named = [a.choices for a in parser._actions if a.choices and not a.option_strings]
    first = [word for word in words[:1] if named and not word.startswith("-")]
    return [word for word in first if word not in named[0]] + [
        word for word in words if word.startswith("-") and word not in flags
    ]


@pytest.mark.parametrize("path", SHELLS, ids=name_of)
def test_commands_in_prose_exist(path: Path):
    """
    Every command and flag of ours that is written as code, within a line or over two.
    """
    prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    wrong = []
    for code in re.findall(r"`([^`]+)`", prose):
        words = code.split()
        arguments = without_program(words)
        if arguments is None and len(words) > 1 and words[0] in COMMANDS:
            arguments = words
        if arguments and unknown_words(arguments):
            wrong.append(code)

    assert wrong == []


@pytest.mark.parametrize("path", SHELLS, ids=name_of)
def test_commands_are_understood(path: Path):
    """
    Every command of ours in a shell block has flags that exist; every script is there.
    """
    shown = "".join(blocks(path, "(?:bash|sh|shell|console)"))
    for line in shown.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        for word in words:
            assert not word.startswith("benchmarks/") or (ROOT / word).is_file()
        arguments = without_program(words)
        if arguments is not None:
            root_parser().parse_args(arguments)
        elif words and words[0].startswith("scripts/"):
            assert (ROOT / words[0]).is_file()


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_links_and_paths_lead_somewhere(path: Path):
    """
    Every relative link, and every path written as code, exists.
    """
    text = path.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", text)
    paths = re.findall(r"`((?:\w+/)*\w+\.py|(?:scripts|examples)/\w*)`", text)

    assert [link for link in links if not (path.parent / link).exists()] == []
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_readme_has_the_figures_that_were_measured():
    """
    Its table is what benchmarks/figures.py makes of the files of results.
    """
    shown = (ROOT / "README.md").read_text().partition(BEGIN)[2].partition(END)[0]

    assert shown == table()


def test_the_errors_page_has_every_error():
    """
    Its tables have each class in the order of the tree, those of runners behind, its code,
    whether to try again, and its HTTP status.
    """
    text = (ROOT / "docs" / "errors.md").read_text()

    told = [
        (
            *(kind.__name__, kind.code, "yes" if kind.is_retryable else "no"),
            str(kind.http_status),
        )
        for kind in ERRORS[1:] + OF_RUNNERS
    ]
    line = r"^\| `(\w+)` \| `(\w+)` \|.*\| (yes|no) \| (\d+) \|$"
    assert re.findall(line, text, re.MULTILINE) == told


def test_the_api_page_has_every_public_name():
    """
    Each class and function is shown; errors together, types of arguments and constants where
    they are used.
    """
    text = (ROOT / "docs" / "api.md").read_text()
    shown = set(re.findall(r"^::: pyllama_raw\.[\w.]*\.(\w+)$", text, re.MULTILINE))
    others = {"FinishDetail", "Key", "Message", "NextToken", "Part", "Prompt"} | {
        kind.__name__ for kind in ERRORS
    }

    names = {
        name
        for module in PUBLIC
        for name in module.__all__
        if callable(getattr(module, name)) and name != "Key"
    }
    assert shown == {*pyllama_raw.__all__, *names, *ALONE} - others


@pytest.mark.nightly
def test_the_site_is_built_without_a_warning(tmp_path: Path):
    """
    Every page is in the menu, every link has its target, every docstring is understood.
    """
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path / "site"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    built = {page.stem for page in (tmp_path / "site").glob("*.html")} - {"404"}
    assert (done.returncode, "WARNING" in done.stderr) == (0, False), done.stderr
    assert built == {page.stem for page in ROOT.glob("docs/*.md")}


def test_the_report_in_the_docs_is_what_is_printed(capsys):
    """
    The page on benchmarks shows what `bench report` makes of the file that it names.
    """
    main(["bench", "report", str(ROOT / "docs" / "images" / "demo.jsonl")])

    assert capsys.readouterr().out in (ROOT / "docs" / "benchmarks.md").read_text()


def test_dependencies_have_a_reason():
    """
    The table of ARCHITECTURE.md lists what pyproject.toml requires, no more, no less.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"\W", line)[0] for line in project["dependencies"]]
    text = (ROOT / "ARCHITECTURE.md").read_text().split("## Dependencies")[1]
    table = text.split("| --- | --- |\n")[1].split("\n## ")[0]

    assert re.findall(r"^\| (\w+) \|", table, re.MULTILINE) == sorted(names)


@pytest.mark.native
@pytest.mark.parametrize(
    "path",
    [path for path in EXAMPLES if path.stem not in ENDLESS],
    ids=lambda path: path.stem,
)
def test_examples_run(
    path: Path, model_path: Path, tmp_path: Path, request: pytest.FixtureRequest
):
    """
    Every example ends well, without a warning, and prints what it should.
    """
    if path.stem == "image":
        request.getfixturevalue("media_library")
    projector, model = tiny_projector("llava")
    models = {"image": model, "rerank": tiny_model("bert-rank")}
    models["adapters"] = tiny_model("llama")
    for name, adapter in (("legal", "lora-a"), ("brief", "lora-b")):
        (tmp_path / f"{name}.gguf").symlink_to(tiny_adapter(adapter))
    files = [models.get(path.stem, model_path), projector]
    command = [sys.executable, "-W", "error", "-c", ON_MODEL, path, *files]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},  # share busy machines
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert [text for text in SHOWN[path.stem] if text not in done.stdout] == []
