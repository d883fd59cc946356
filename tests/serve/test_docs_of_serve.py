"""What documents and example files say of the server is so."""

import ast
import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from packaging.requirements import Requirement

from pyllama_raw.cli.command import root_parser
from pyllama_raw.serve import ServeConfig, make_app
from pyllama_raw.serve.deployment import Deployment, read
from pyllama_raw.serve.run import OPTIONS
from pyllama_raw.testing import fake_engine
from tests.serve.support import LIMIT_S, chatting, serving

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "service.md").read_text()
UNIT = EXAMPLES / "pyllama-raw.service"
OF_THE_SERVER = (
    "fastapi",
    "starlette",
    "uvicorn",
    "prometheus_client",
    "h11",
    "uvloop",
)
PAGE_OF_CHATS = ("GET", "/")  # it is no part of the description


def app() -> FastAPI:
    return make_app({"small": fake_engine()})


def told() -> set[tuple[str, str]]:
    """Methods and paths of the table of endpoints; a path without one has that before."""
    found, method = set(), ""
    for row in re.findall(r"^\| (`[A-Z]+ /.*?) \|", PAGE, re.MULTILINE):
        for given, path in re.findall(r"`(?:([A-Z]+) )?(/.*?)`", row):
            method = given or method
            found.add((method, path))
    return found


def test_the_table_has_every_endpoint_that_is_described():
    """
    And none that does not exist.
    """
    described = {
        (method.upper(), path)
        for path, methods in app().openapi()["paths"].items()
        for method in methods
    }

    assert told() == described | {PAGE_OF_CHATS}


def curls(file: str) -> list[list[str]]:
    """The words of each curl in the shell blocks of a document."""
    shown = re.findall(r"```bash\n(.*?)```", (ROOT / file).read_text(), re.DOTALL)
    lines = "".join(shown).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith("curl ")]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("file", "statuses"), [("README.md", [200]), ("docs/service.md", [200, 403])]
)
async def test_each_curl_that_is_shown_is_answered(
    file: str, statuses: list[int], anyio_backend_name: str
):
    """
    That of adapters needs a key, which the service of the test has not.
    """
    got = []
    async with (
        chatting() as engine,
        serving(make_app({"a": engine}), anyio_backend_name) as url,
    ):
        async with httpx.AsyncClient(timeout=LIMIT_S) as client:
            for words in curls(file):
                given = dict(pairwise(words))
                path = words[1 if words[1] != "-X" else 3].partition("/")[2]
                headers = [
                    tuple(value.split(": "))
                    for flag, value in pairwise(words)
                    if flag == "-H"
                ]
                method = given.get("-X", "POST")
                answer = await client.request(
                    method, f"{url}/{path}", content=given["-d"], headers=headers
                )
                got.append(answer.status_code)

    assert got == statuses


def test_the_file_of_the_docs_is_a_deployment():
    """
    Its options have names that exist, for three models and the service.
    """
    made = Deployment.of(read(EXAMPLES / "service.toml"))

    assert made.models == {
        name: f"{name}.gguf" for name in ("assistant", "embedder", "reranker")
    }
    waiting = [made.configs[name].scheduler.max_waiting for name in made.models]
    assert waiting == [64, 64, 256]
    assert (made.port, made.service.salt_by_key) == (8000, True)


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser["Service"]


def test_the_unit_runs_a_command_that_exists_and_lets_it_drain():
    """
    Its flags are those of the command; systemd waits longer than the service drains.
    """
    service = unit()
    program, *arguments = shlex.split(service["ExecStart"])
    options = root_parser().parse_args(arguments)

    most_s = read(EXAMPLES / "service.toml")["service"]["drain_s"]
    most_s += OPTIONS["timeout_graceful_shutdown"]
    assert (Path(program).name, Path(options.config).name) == (
        "pyllama-raw",
        "service.toml",
    )
    assert int(service["TimeoutStopSec"]) > max(most_s, ServeConfig().drain_s)
    assert (service["Type"], service["KillSignal"]) == ("exec", "SIGTERM")
    assert (service["DynamicUser"], service["NoNewPrivileges"]) == ("yes", "yes")


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze"
)
def test_systemd_understands_the_unit(tmp_path: Path):
    """
    It finds nothing to say, if the program is there.
    """
    text = UNIT.read_text()
    program = shlex.split(unit()["ExecStart"])[0]
    file = tmp_path / UNIT.name
    file.write_text(text.replace(program, sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, with continued lines as one."""
    text = (EXAMPLES / "Dockerfile").read_text().replace("\\\n", " ")
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return [(word, rest.strip()) for word, _, rest in (x.partition(" ") for x in lines)]


def test_the_dockerfile_copies_what_is_there_and_what_a_build_needs():
    """
    Each file exists; those that MANIFEST.in names for building are among them.
    """
    copied = [
        path
        for word, rest in instructions()
        if word == "COPY" and not rest.startswith("--from")
        for path in rest.split()[:-1]
    ]
    needed = re.findall(
        r"(?:build_lib|scripts/\w+)\.\w+", (ROOT / "MANIFEST.in").read_text()
    )

    assert [path for path in copied if not (ROOT / path).exists()] == []
    assert [p for p in needed if not p.startswith(tuple(copied))] == []


def test_the_dockerfile_installs_extras_that_exist_and_runs_the_command():
    """
    The last stage has a user without rights, a probe that exists, and flags that do.
    """
    text = (EXAMPLES / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.search(r"'\.\[(.*)\]'", text)
    last = dict(instructions())  # of words that come twice, those of the last stage
    program, *arguments = json.loads(last["ENTRYPOINT"])
    probe = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])

    assert extras is not None
    assert {*extras[1].split(",")} <= {*project["optional-dependencies"]}
    assert program in project["scripts"]
    assert root_parser().parse_args(arguments).port == int(last["EXPOSE"])
    assert last["USER"].isdecimal()
    assert last["USER"] != "0"
    assert ast.parse(probe[2])
    assert f"127.0.0.1:{last['EXPOSE']}/readyz" in probe[2]
    assert last["STOPSIGNAL"] == "SIGTERM"


def needed(requirements: Iterable[str]) -> set[str]:
    """Packages that are installed for *requirements* here, by their metadata."""
    found: set[str] = set()
    left = [Requirement(line) for line in requirements]
    while left:
        one = left.pop()
        name = one.name.lower().replace("_", "-")
        is_for_here = one.marker is None or one.marker.evaluate({"extra": ""})
        if is_for_here and name not in found:
            found.add(name)
            left += map(Requirement, metadata.requires(name) or [])
    return found


def test_the_extra_is_small():
    """
    It adds at most twelve packages.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = project["dependencies"]
    extra = project["optional-dependencies"]["serve"]

    added = needed([*base, *extra]) - needed(base)
    assert len(added) <= 12, added


def test_importing_the_package_imports_nothing_of_the_server():
    """
    Nor do its engines: only `pyllama_raw.serve` does.
    """
    code = "import sys, pyllama_raw; pyllama_raw.AsyncEngine; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )

    assert {*done.stdout.split()} & {*OF_THE_SERVER} == set()
