"""What is published: one version, and a workflow that has no password."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import pyllama_raw
from tests.support.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs_of(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text())["jobs"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_takes_what_others_wrote_by_its_commit(path):
    """
    A tag of another project can be moved. Jobs wait for jobs that exist.
    """
    jobs = jobs_of(path)
    used = [
        step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step
    ]
    awaited = {job["needs"] for job in jobs.values() if "needs" in job}

    assert [
        name for name in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name)
    ] == []
    assert awaited <= set(jobs)
    assert all(job["runs-on"] and job["timeout-minutes"] for job in jobs.values())


def test_one_job_publishes_and_shows_who_it_is_instead_of_a_password():
    """
    What was tried is published, from a tag; no other job may write anything.
    """
    jobs = jobs_of(ROOT / ".github" / "workflows" / "wheels.yml")
    rights = {name: job["permissions"] for name, job in jobs.items()}

    assert {name for name, job in jobs.items() if "environment" in job} == {"publish"}
    assert rights.pop("publish") == {"id-token": "write"}
    assert {right for job in rights.values() for right in job.values()} == {"read"}
    assert jobs["publish"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert jobs["publish"]["needs"] == "try"
    assert "secrets." not in str(jobs)
    steps = [step.get("run", "") for step in jobs["publish"]["steps"]]
    assert any('-"${GITHUB_REF_NAME#v}"-' in command for command in steps)


def test_the_version_has_one_place():
    """
    Packaging reads it from the package, and the changelog begins with it.
    """
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    changelog = (ROOT / "CHANGELOG.md").read_text()
    places = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "pyllama_raw").rglob("*.py"))
        if f'"{pyllama_raw.__version__}"' in path.read_text()
    ]

    assert described["project"]["dynamic"] == ["version"]
    assert places == ["pyllama_raw/options/__init__.py"]
    assert (
        re.findall(r"^## (\S+)", changelog, re.MULTILINE)[0] == pyllama_raw.__version__
    )


def test_entries_of_the_changelog_have_no_dash():
    """
    The template gives each file one; with its own it would be a list in a list.
    """
    files = (ROOT / "changelog.d").glob("*.*.md")

    assert not [
        path.name
        for path in files
        if re.search("^ *- ", path.read_text(), re.MULTILINE)
    ]


def test_entries_of_the_changelog_are_files(tmp_path):
    """
    By section, in the order of the sections, above what is there.
    """
    pytest.importorskip("towncrier")
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    folder = tmp_path / "changelog.d"
    folder.mkdir()
    shutil.copy(ROOT / "changelog.d" / "template.md.jinja", folder)
    (folder / "read-ahead.speed.md").write_text("Files are\nread ahead.\n")
    (folder / "new-option.engine.md").write_text("An option.\n")
    before = (tmp_path / "CHANGELOG.md").read_text()
    options = ["--yes", "--version", "9.0.0", "--date", "2030-01-02"]
    command = [sys.executable, "-m", "towncrier", "build", *options]
    # The package lies elsewhere, and git does not know the folder.
    subprocess.run(
        command, cwd=tmp_path, check=True, capture_output=True, timeout=LIMIT_S
    )

    added = """
## 9.0.0 (2030-01-02)

**Engine**

- An option.

**Speed**

- Files are
  read ahead.
"""
    after = (tmp_path / "CHANGELOG.md").read_text()
    mark = re.search(r"<!-- what towncrier adds .* -->\n", before)
    assert mark is not None
    assert re.sub(r"\n{3,}", "\n\n", after) == before.replace(
        mark[0], mark[0] + added, 1
    )
    assert sorted(path.name for path in folder.iterdir()) == ["template.md.jinja"]
