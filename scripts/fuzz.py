"""
Try what reads bytes from outside on bytes that nobody has written.

    python -m scripts.fuzz --seconds 60                  # each target for so long
    python -m scripts.fuzz regex gguf --seconds 20 --seed 2
    python -m scripts.fuzz regex --replay AAEC           # what a report has as base64

Each target of scripts/fuzz_targets/ runs in a process of its own, with a limit of memory and one
of CPU time for each case. A finding is an error that the reader does not promise, a signal, or a
limit that was passed; one of each kind is printed, and makes the exit status 1.

Cases are seeds with random edits, the same ones for a seed. With `--guided`, atheris (of PyPI)
also draws them by what they reach in pyllama_raw, and goes on from those that reach something new.
"""

from __future__ import annotations

import argparse
import base64
import faulthandler
import json
import mmap
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripts.fuzz_targets.target import Target, Try

MAX_TEXT = 6000  # characters of what a process has said
MAX_DEATHS = 10  # of processes of one target
MAX_SILENCE_S = 120.0  # of a case: it may wait for other processes
LOOK_S = 0.05
SETUP_S = 300.0  # tiny models may have to be made
_HEAD = struct.Struct("<qq")  # cases that were begun, and bytes of the latest


@dataclass(slots=True)
class Report:
    """What came of one target."""

    n_cases: int = 0
    findings: dict[str, tuple[str, bytes]] = field(
        default_factory=dict
    )  # by kind: text, case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("targets", nargs="*", help="names; none: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each target")
    parser.add_argument("--count", type=int, help="cases of each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--guided", action="store_true", help="by atheris, if it is installed"
    )
    parser.add_argument("--replay", help="one case in base64, of one target")
    options = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # no thread before a fork
    atheris = _atheris() if options.guided else None
    with _instrumented(atheris):
        targets = import_module("scripts.fuzz_targets").TARGETS
    if unknown := set(options.targets) - set(targets):
        parser.error(
            f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(targets)}"
        )
    if options.replay is not None:
        if len(options.targets) != 1:
            parser.error("--replay takes one target")
        targets[options.targets[0]].make()(base64.b64decode(options.replay))
        return
    n_findings = 0
    for name in options.targets or targets:
        report = fuzz(
            targets[name], options.seconds, options.count, options.seed, atheris
        )
        print(
            f"{name}: {report.n_cases} cases, {len(report.findings)} findings",
            flush=True,
        )
        for kind, (text, case) in report.findings.items():
            print(
                f"  {kind}\n{text}\n  --replay {base64.b64encode(case).decode()}",
                flush=True,
            )
        n_findings += len(report.findings)
    raise SystemExit(int(n_findings > 0))


def _atheris() -> ModuleType | None:
    try:
        return import_module("atheris")
    except ImportError:
        print("atheris is not installed: cases are not guided", flush=True)
        return None


def _instrumented(atheris: ModuleType | None) -> AbstractContextManager[Any]:
    """Imports in this block, and those of later forks, are counted by branches."""
    if atheris is None:
        return nullcontext()
    block: AbstractContextManager[Any] = atheris.instrument_imports(
        include=["pyllama_raw"]
    )
    return block


def fuzz(
    target: Target,
    seconds: float,
    count: int | None,
    seed: int,
    atheris: ModuleType | None = None,
) -> Report:
    """Try *target* for *seconds*, or *count* cases; a process that ends too early is replaced."""
    report, n_deaths = Report(), 0
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(dir=_fast_folder()) as scratch:
        folder = Path(scratch)
        while n_deaths < MAX_DEATHS:
            left_s = end - time.monotonic()
            left = None if count is None else count - report.n_cases
            if left_s <= 0 or (left is not None and left <= 0):
                break
            work = _Work(target, folder, seed + n_deaths, left_s, left, atheris)
            if not work.run(report):
                break
            n_deaths += 1
    return report


def _fast_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108


@dataclass(slots=True)
class _Work:
    """One process of a target."""

    target: Target
    folder: Path
    seed: int
    seconds: float
    count: int | None
    atheris: ModuleType | None

    def run(self, report: Report) -> bool:
        """Add to *report* what came; whether the process ended before it was done."""
        shared = mmap.mmap(-1, _HEAD.size + self.target.max_bytes)
        findings, output, done = (
            self.folder / name for name in ("findings", "stderr", "done")
        )
        for path in (findings, done):
            path.unlink(missing_ok=True)
        pid = os.fork()
        if not pid:
            try:
                self._try_all(shared, findings, output)
                done.touch()
            except BaseException:  # noqa: BLE001 - told by its text
                traceback.print_exc()
            finally:
                os._exit(0)
        status, is_silent = self._wait(pid, shared)
        n_cases, n_bytes = _HEAD.unpack_from(shared)
        report.n_cases += n_cases
        for line in findings.read_text().splitlines() if findings.exists() else ():
            kind, text, case = json.loads(line)
            report.findings.setdefault(kind, (text, base64.b64decode(case)))
        if done.exists():
            return False
        if not (
            self.target.may_exceed
            and os.WIFSIGNALED(status)
            and os.WTERMSIG(status) == signal.SIGPROF
        ):
            kind = _end_of(status, is_silent, self.target)
            text = output.read_text(errors="replace") if output.exists() else ""
            if len(text) > MAX_TEXT:
                text = f"{text[: MAX_TEXT // 2]}\n...\n{text[-MAX_TEXT // 2 :]}"
            report.findings.setdefault(
                kind, (text, shared[_HEAD.size : _HEAD.size + n_bytes])
            )
        return n_cases > 0

    def _wait(self, pid: int, shared: mmap.mmap) -> tuple[int, bool]:
        """The status of the process, and whether it was ended because it was silent."""
        n_before, since = 0, time.monotonic()
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return status, False
            time.sleep(LOOK_S)
            n_cases, _ = _HEAD.unpack_from(shared)
            if n_cases != n_before:
                n_before, since = n_cases, time.monotonic()
            silence_s = MAX_SILENCE_S if n_cases else SETUP_S
            if time.monotonic() - since > silence_s:
                os.kill(pid, signal.SIGABRT)
                return os.waitpid(pid, 0)[1], True

    # -- in the process of the target ---------------------------------------------------

    def _try_all(self, shared: mmap.mmap, findings: Path, log: Path) -> None:
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
        faulthandler.enable(output)
        faulthandler.register(signal.SIGPROF, output, chain=True)
        with _instrumented(
            self.atheris
        ):  # readers that are imported when they are made
            attempt = self.target.make()
            seeds = self.target.seeds()
        attempt = _limited(self.target, attempt, shared, findings)
        for seed in seeds:
            assert len(seed) <= self.target.max_bytes, f"a seed of {len(seed)} bytes"
        if self.atheris is not None:
            self._guided(self.atheris, attempt, seeds)
            return
        until = time.monotonic() + self.seconds
        for number, case in enumerate(_cases(self.target, seeds, self.seed)):
            if number == self.count or time.monotonic() > until:
                return
            attempt(case)

    def _guided(self, atheris: ModuleType, attempt: Try, seeds: list[bytes]) -> None:
        """Let libFuzzer choose; it ends the process itself."""
        corpus = self.folder / "corpus"
        corpus.mkdir(exist_ok=True)
        for number, seed in enumerate(seeds):
            (corpus / f"seed{number}").write_bytes(seed)
        end, done = time.monotonic() + self.seconds, self.folder / "done"

        def one(data: bytes) -> None:
            if time.monotonic() > end:
                done.touch()
                os._exit(0)
            attempt(data)

        def mutate(data: bytes, max_size: int, seed: int) -> bytes:
            if seed % 2:
                return bytes(atheris.Mutate(data, max_size))
            return _edited(self.target, random.Random(seed), data, seeds)[:max_size]  # noqa: S311

        flags = {
            "seed": self.seed,
            "max_len": self.target.max_bytes,
            "timeout": 10**6,
            "rss_limit_mb": 0,
            "artifact_prefix": f"{self.folder}/",  # the report has the case already
        }
        flags |= dict.fromkeys(
            (
                "handle_segv",
                "handle_abrt",
                "handle_fpe",
                "handle_bus",
                "handle_ill",
                "verbosity",
            ),
            0,
        )
        flags |= {"len_control": 0, "runs": -1 if self.count is None else self.count}
        arguments = [
            sys.argv[0],
            *(f"-{name}={value}" for name, value in flags.items()),
            str(corpus),
        ]
        atheris.Setup(arguments, one, custom_mutator=mutate)
        atheris.Fuzz()


def _limited(target: Target, attempt: Try, shared: mmap.mmap, findings: Path) -> Try:
    """*attempt* within limits, which writes down its case before, and its findings behind."""
    pages = (
        int(Path("/proc/self/statm").read_text().split()[0])
        if sys.platform == "linux"
        else 0
    )
    limit = pages * mmap.PAGESIZE + target.max_mib * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kinds: set[str] = set()
    n_cases = 0

    def limited(data: bytes) -> None:
        nonlocal n_cases
        data = data[: target.max_bytes]
        n_cases += 1
        shared[_HEAD.size : _HEAD.size + len(data)] = data
        _HEAD.pack_into(shared, 0, n_cases, len(data))
        signal.setitimer(signal.ITIMER_PROF, target.max_cpu_s)
        try:
            attempt(data)
        except target.allowed:
            pass
        except MemoryError as error:
            if not target.may_exceed:
                note(error, data)
        except Exception as error:  # noqa: BLE001 - a finding
            note(error, data)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def note(error: Exception, data: bytes) -> None:
        kind = _kind(error)
        if kind not in kinds:
            kinds.add(kind)
            text = "".join(traceback.format_exception(error))[-3000:]
            with findings.open("a") as lines:
                lines.write(
                    json.dumps([kind, text, base64.b64encode(data).decode()]) + "\n"
                )

    return limited


def _kind(error: Exception) -> str:
    """The type of *error* and the last place in this tree that it passed."""
    root = str(Path(__file__).resolve().parents[1])
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(root)]
    at = (ours or frames)[-1]
    return f"{type(error).__name__} at {Path(at.filename).name}:{at.lineno}"


def _end_of(status: int, is_silent: bool, target: Target) -> str:
    if is_silent:
        return f"no answer in {MAX_SILENCE_S:g} s"
    if not os.WIFSIGNALED(status):
        return f"the process ended with {os.waitstatus_to_exitcode(status)}"
    number = signal.Signals(os.WTERMSIG(status))
    if number == signal.SIGPROF:
        return f"more than {target.max_cpu_s:g} s of CPU time"
    return f"ended by {number.name}"


def _cases(target: Target, seeds: list[bytes], seed: int) -> Iterator[bytes]:
    """The seeds, then edited ones, of which some are edited again."""
    yield from seeds
    pool, rng = [*seeds], random.Random(seed)  # noqa: S311 - repeats
    while True:
        case = _edited(target, rng, rng.choice(pool), seeds)
        if rng.random() < 0.1 and len(case) <= target.max_bytes:
            if len(pool) < 4 * len(seeds):
                pool.append(case)
            else:
                pool[rng.randrange(len(seeds), len(pool))] = case
        yield case


def _edited(
    target: Target, rng: random.Random, case: bytes, seeds: list[bytes]
) -> bytes:
    from scripts.mutations.edits import mutated

    n_head = target.n_head
    head, tail = case[:n_head], case[n_head:]
    if n_head and rng.random() < 0.05:
        head = rng.randbytes(n_head)
    return (head + mutated(rng, tail, [seed[n_head:] for seed in seeds], target.words))[
        : target.max_bytes
    ]


if __name__ == "__main__":
    main()
