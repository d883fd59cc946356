"""
Try an engine on a tiny random file of every architecture that libllama has.

    python -m scripts.try_architectures [NAME ...] [--keep FOLDER]

Each file states the keys that its loader demands. It is opened as it is, then with a 0 for
each key that gguf_check.py refuses for other architectures: both have to come to the same.
A rule itself has to be true: without it, libllama must not compute a file that breaks it. Every attempt is a process of its own.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import anyio
import numpy as np

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.engine.info import Operation
from pyllama_raw.native import gguf as model_check
from pyllama_raw.native.gguf import NEEDS, NOT_ZERO
from scripts.mutations import gguf_file, trial
from scripts.mutations.trial import DEFECT, REFUSED, WORKS, Outcome
from scripts.tiny_models import gguf, learning
from scripts.tiny_models.architectures import IMPOSSIBLE, NAMES

PROMPTS = ("The quick brown fox jumps over the lazy dog", "a", "one two three four")
PARAMS = SamplingParams(max_tokens=6, temperature=0)
NARROW, WIDE = (1, None), (3, 16)  # slots, and the budget of a step
SAME = 1e-4  # between two vectors of one text

Files = Iterable[tuple[str, bytes]]
Attempt = Callable[[Path], str]


@dataclass(slots=True)
class Report:
    """What became of all files."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, case: str, outcome: Outcome, *, right: bool) -> None:
        self.counts[f"{case}: {outcome.kind}"] += 1
        if not right:
            self.wrong.append(f"{case}, {outcome.said}: {outcome.kind} {outcome.text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of an architecture")
    parser.add_argument("--keep", type=Path, help="write the files here")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"no such architecture: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        report = run(options.names or NAMES, options.keep or Path(folder))
    for case, count in sorted(report.counts.items()):
        print(f"{count:4} {case}")
    print(*report.wrong, sep="\n")
    raise SystemExit(bool(report.wrong))


def run(names: Iterable[str], folder: Path) -> Report:
    """Make the files of *names* in *folder*, and try them."""
    report = Report()
    folder.mkdir(parents=True, exist_ok=True)
    models = make(names, folder, report)
    plain = {outcome.said: outcome for outcome in attempts(as_made(models))}
    for outcome in plain.values():
        report.add("as made", outcome, right=outcome.kind != DEFECT)
        if outcome.kind == REFUSED:
            print(f"{outcome.said}: {outcome.text}")
    for outcome in attempts(with_unread_zeros(models)):
        same = told(outcome) == told(plain[outcome.said])
        report.add("unread keys 0", outcome, right=same)
    for case, files in (
        ("read keys 0", with_read_zeros),
        ("without a tensor", without_tensors),
    ):
        for outcome in attempts(files(models)):
            right = outcome.kind == REFUSED and outcome.said in outcome.text
            report.add(case, outcome, right=right)
        for outcome in attempts(files(models), try_without_rules):
            report.add(f"{case}, rules off", outcome, right=outcome.kind != WORKS)
    return report


def told(outcome: Outcome) -> tuple[str, str]:
    """What became of a file, without its path."""
    return outcome.kind, re.sub(r"\S+\.gguf", "", outcome.text)


def make(names: Iterable[str], folder: Path, report: Report) -> dict[str, Path]:
    """A file for each architecture that can have one; the others are printed."""

    def write(path: Path) -> str:
        arch = path.read_text()
        gguf.write(learning.learn(arch), folder / f"{arch}.gguf")
        return ""

    files = {}
    possible = []
    for name in names:
        if name in IMPOSSIBLE:
            print(f"{name} is not made: {IMPOSSIBLE[name]}")
            report.counts["not made"] += 1
        else:
            possible.append(name)
    for outcome in attempts(((name, name.encode()) for name in possible), write):
        report.add("made", outcome, right=outcome.kind == WORKS)
        if outcome.kind == WORKS:
            files[outcome.said] = folder / f"{outcome.said}.gguf"
    return files


def attempts(files: Files, attempt: Attempt | None = None) -> Iterator[Outcome]:
    numbered = ((i, content, said) for i, (said, content) in enumerate(files))
    return trial.run_all(numbered, attempt=attempt or try_file)


def as_made(models: dict[str, Path]) -> Files:
    return ((arch, path.read_bytes()) for arch, path in models.items())


def with_unread_zeros(models: dict[str, Path]) -> Files:
    """Files with a 0 for every key that only other architectures read."""
    for arch, path in models.items():
        unread = unread_keys(arch)
        file = gguf_file.read(path)
        keys = [key for key in unread if f"{arch}.{key}".encode() not in file.values]
        yield arch, with_zeros(file, arch, keys)


def unread_keys(arch: str) -> list[str]:
    """Keys that others divide by; one that may be left out means something to all."""
    return [r.key for r in NOT_ZERO if arch not in r.architectures and r.default]


def with_read_zeros(models: dict[str, Path]) -> Files:
    """A file for each rule and each architecture that it is about."""
    for rule in NOT_ZERO:
        for arch in rule.architectures:
            if arch in models:
                file = gguf_file.read(models[arch])
                yield f"{arch}.{rule.key}=0", with_zeros(file, arch, [rule.key])


def without_tensors(models: dict[str, Path]) -> Files:
    """A file for each rule and tensor that it asks for, without one."""
    for rule in NEEDS:
        for arch in rule.architectures:
            file = gguf_file.read(models[arch]) if arch in models else gguf_file.File()
            names = {tensor.name.decode() for tensor in file.tensors}
            present = min((n for n in names if n.endswith(rule.tensor)), default=None)
            for needed in rule.needed if present else ():
                layer = str(present).removesuffix(rule.tensor)
                dropped = {(layer + needed).encode(), (layer + rule.instead).encode()}
                tensors = [t for t in file.tensors if t.name not in dropped]
                yield layer + needed, gguf_file.File(file.values, tensors).encode()


def with_zeros(file: gguf_file.File, arch: str, keys: Iterable[str]) -> bytes:
    zero = gguf_file.Value(gguf_file.U32, 0)
    return gguf_file.File(
        {**file.values, **{f"{arch}.{key}".encode(): zero for key in keys}},
        file.tensors,
    ).encode()


def try_without_rules(path: Path) -> str:
    with patch.object(model_check, "check_rules"):
        return try_file(path)


def try_file(path: Path) -> str:
    """What an engine makes of the file; the same over slots and budgets."""
    narrow = anyio.run(outputs, path, *NARROW)
    wide = anyio.run(outputs, path, *WIDE)
    for row, other in zip(narrow, wide, strict=True):
        if not np.allclose(row, other, rtol=0, atol=SAME):
            raise AssertionError(f"{row} alone, {other} beside others")
    return str([np.round(row, 3).tolist() for row in narrow])


async def outputs(path: Path, n_slots: int, budget: int | None) -> list[list[float]]:
    """Token ids of each prompt, or a vector where the model makes vectors."""
    config = EngineConfig(
        context=ContextConfig(n_ctx=512, n_batch=64, n_ubatch=64, n_threads=1),
        scheduler=SchedulerConfig(n_slots=n_slots, token_budget=budget),
        deterministic=True,
    )
    try:
        async with AsyncEngine.open(path, config) as engine:
            if Operation.GENERATE in engine.capabilities.operations:
                results = await engine.complete_many(list(PROMPTS), PARAMS)
                return [list(result.token_ids) for result in results]
            vectors = await engine.embed(list(PROMPTS))
            return [list(vector) for vector in vectors]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


if __name__ == "__main__":
    main()
