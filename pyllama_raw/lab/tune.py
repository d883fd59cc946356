"""
Finding the fastest options for one model on this machine, by measuring.

Settings are compared by the same work: prompts for all slots, then all of them streaming. It runs
on a whole engine, so that every option is seen doing what it does for a user.

A choice of a knob is the fields it sets, by part of EngineConfig, so a knob may set several. A new
option is a new line of the table; search and measurement know of none.

One knob is turned at a time, from the defaults, until none gains any more. Knobs hardly depend on
each other here, so a pass over them finds what the whole grid would, in its sum of choices instead
of its product; a second pass finds the pairs. Before a knob is turned, both sides are measured
again: a neighbour may have slowed one of them.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from tqdm import tqdm

from pyllama_raw.api.blocking import Engine
from pyllama_raw.cli.options import is_busy
from pyllama_raw.engine.estimate import kernels_used
from pyllama_raw.errors import ConfigError, PyllamaError
from pyllama_raw.lab.workloads import TEXT
from pyllama_raw.native.model import FileType, Model, quantize
from pyllama_raw.options.config import ContextConfig
from pyllama_raw.options.machine import OtherLoad, cpu_name, n_cpus
from pyllama_raw.options.models import resolve_model
from pyllama_raw.options.profile import (
    MachineFacts,
    Measured,
    Profile,
    Settings,
    check_writable,
)
from pyllama_raw.options.sampling import SamplingParams

# Tokens of the text that are scored together: few models have less context.
WINDOW = 128


@dataclass(frozen=True, slots=True)
class Work:
    """The amount of work that measures one setting."""

    n_slots: int = 8  # requests at a time
    n_prompt: int = 128  # tokens of each prompt
    n_output: int = 16  # tokens of each output
    n_repeats: int = 2  # the fastest one counts: neighbours only slow things down
    max_step_s: float = 0.3  # a fixed token budget must not stall streams for longer

    def seconds(self, measured: Measured) -> float:
        """Seconds that the work takes at these speeds."""
        prefill_s = self.n_slots * self.n_prompt / measured.prefill_tok_per_s
        return prefill_s + self.n_slots * self.n_output / measured.decode_tok_per_s

    def cost(self, settings: Settings, measured: Measured) -> float:
        """seconds(), infinite if a step of the token budget takes too long."""
        budget = settings.scheduler.get("token_budget") or 0
        if budget > self.max_step_s * measured.prefill_tok_per_s:
            return math.inf
        return self.seconds(measured)


def measure(model: Path, settings: Settings, work: Work, n_vocab: int) -> Measured:
    """
    Open *model* with *settings* and do the work.

    Raises:
        PyllamaError: these settings do not work here.
    """
    with_slots = settings.updated({"scheduler": {"n_slots": work.n_slots}})
    with Engine.open(model, with_slots.engine_config()) as engine:
        return _measure(engine, work, n_vocab)


def _measure(engine: Engine, work: Work, n_vocab: int) -> Measured:
    rng = random.Random(0)  # noqa: S311 - the same prompts for every setting

    def prompts(n_prompts: int) -> list[list[int]]:
        ids = range(n_vocab)
        return [rng.choices(ids, k=work.n_prompt) for _ in range(n_prompts)]

    _seconds(engine, prompts(2), 4)  # the scheduler learns the speed
    prefill_s, decode_s = math.inf, math.inf
    for _ in range(work.n_repeats):
        new = prompts(work.n_slots)
        prefill_s = min(prefill_s, _seconds(engine, new, 1))
        # Their slots still hold them: what is left is output.
        decode_s = min(decode_s, _seconds(engine, new, work.n_output))
    return Measured(
        prefill_tok_per_s=work.n_slots * work.n_prompt / prefill_s,
        decode_tok_per_s=work.n_slots * work.n_output / decode_s,
    )


def _seconds(engine: Engine, prompts: list[list[int]], n_output: int) -> float:
    params = SamplingParams(max_tokens=n_output, temperature=0, ignore_eos=True)
    started = perf_counter()
    engine.complete_many(prompts, params)
    return perf_counter() - started


def perplexity(model: Path, settings: Settings) -> float:
    """Perplexity of the bundled text: the rough cost of settings and file in quality."""
    with Model.load(model, vocab_only=True) as loaded:
        tokens = loaded.vocab.tokenize(TEXT, add_special=False, parse_special=False)
    windows = [tokens[i : i + WINDOW] for i in range(0, len(tokens) - 1, WINDOW)]
    many_rows = {"context": {"n_outputs_max": WINDOW}, "scheduler": {"n_slots": 1}}
    config = settings.updated(many_rows).engine_config()
    with Engine.open(model, config) as engine:
        scores = [engine.score(window) for window in windows]
    n_scored = sum(len(score.logprobs) for score in scores)
    return math.exp(-math.fsum(score.total for score in scores) / n_scored)


Choice = Mapping[str, dict[str, Any]]
Point = tuple[int, ...]  # the choice of each knob, by index
MIN_GAIN = 0.01  # of the cost; less is noise, and the default is better known
MAX_PASSES = 2


@dataclass(frozen=True, slots=True)
class Knob:
    """Something to turn, and the positions it has."""

    name: str
    choices: tuple[Choice, ...]


def knobs(n_cpus: int, n_threads: int) -> tuple[Knob, ...]:
    """
    The table for a machine; what matters most is turned first.

    Args:
        n_cpus: logical CPUs that may be used.
        n_threads: the default.
    """
    counts = (n_cpus, n_cpus - 1, n_cpus // 2, n_cpus // 4)
    threads = dict.fromkeys(n for n in counts if n > 0 and n != n_threads)
    wide = {"n_threads_batch": n_cpus}  # prompts gain from threads that streams do not
    return (
        _knob("threads", "context", *({"n_threads": n} for n in threads)),
        _knob("threads for prompts", "context", wide),
        # Left as in the file, for our kernels, or in libllama's order, as for AMX.
        _knob("weights", "model", *({"use_extra_bufts": on} for on in (False, True))),
        _knob("flash attention", "context", {"flash_attn": "off"}),
        _knob("KV layout", "context", {"kv_unified": False}),
        _knob("KV type", "context", {"type_k": "q8_0", "type_v": "q8_0"}),
        _knob("ubatch", "context", *({"n_ubatch": n} for n in (256, 1024))),
        _knob("sampler placement", "engine", {"sampler_placement": "backend"}),
        _knob("token budget", "scheduler", *({"token_budget": n} for n in (256, 1024))),
    )


def _knob(name: str, part: str, *choices: dict[str, Any]) -> Knob:
    return Knob(name, ({}, *({part: fields} for fields in choices)))


def settings_of(table: Sequence[Knob], point: Point) -> Settings | None:
    """Settings of *point*; None if its choices do not fit each other."""
    settings = Settings()
    try:
        for knob, index in zip(table, point, strict=True):
            settings = settings.updated(knob.choices[index])
    except ConfigError:
        return None
    context = settings.engine_config().context
    if context.n_threads_batch and context.n_threads_batch == context.threads:
        return None  # as many threads for prompts as there are without it
    return settings


Cost = Callable[[Point], float]


def descend(
    sizes: Sequence[int], cost: Cost, may_go_on: Callable[[], bool] = lambda: True
) -> Point:
    """
    The best point that was measured.

    Args:
        sizes: choices of each knob; 0 is the default.
        cost: lower is better, infinite for what does not run; never more when asked again.
        may_go_on: whether there is time for one more knob.
    """
    costs: dict[Point, float] = {}

    def cost_of(point: Point) -> float:
        if point not in costs:
            costs[point] = cost(point)
        return costs[point]

    def gains(point: Point, best: Point) -> bool:
        return cost_of(point) < cost_of(best) * (1 - MIN_GAIN)

    best: Point = (0,) * len(sizes)
    for _ in range(MAX_PASSES):
        before = best
        for knob, size in enumerate(sizes):
            if not may_go_on():
                return best
            neighbours = [_turned(best, knob, choice) for choice in range(size)]
            best_of_knob = min(neighbours, key=cost_of)
            if gains(best_of_knob, best):
                costs.update({point: cost(point) for point in (best_of_knob, best)})
                best = best_of_knob if gains(best_of_knob, best) else best
        if best == before:
            break
    return best


def _turned(point: Point, knob: int, choice: int) -> Point:
    return (*point[:knob], choice, *point[knob + 1 :])


Speed = Callable[[Settings], Measured]


class Space:
    """
    Measures points; of several times the fastest counts.

    Args:
        speed: does the work; an error means that the settings do not run.
    """

    def __init__(self, table: Sequence[Knob], work: Work, speed: Speed) -> None:
        self.table, self.work, self.speed = table, work, speed
        self.default: Point = (0,) * len(table)
        self._measured: dict[Point, Measured] = {}

    @property
    def sizes(self) -> list[int]:
        """Choices of each knob."""
        return [len(knob.choices) for knob in self.table]

    def measure(self, point: Point) -> Measured:
        """
        Do the work; what was faster before stands.

        Raises:
            PyllamaError: these settings do not work here.
        """
        settings = settings_of(self.table, point)
        assert settings is not None
        speed = self.speed(settings)
        best = min(speed, self._measured.get(point, speed), key=self.work.seconds)
        self._measured[point] = best
        return best

    def cost(self, point: Point) -> float:
        """Seconds of the work; infinite if *point* does not run."""
        settings = settings_of(self.table, point)
        if settings is None:
            return math.inf
        try:
            return self.work.cost(settings, self.measure(point))
        except PyllamaError:
            return math.inf


Progress = Callable[[str], object]  # told what was done, one call a measurement


@dataclass(frozen=True, slots=True)
class Tuning:
    """The findings of a search."""

    profile: Profile
    requantised: dict[FileType, Measured]  # by type: the file in it, same settings


def n_measurements() -> int:
    """About how many there will be."""
    return sum(len(knob.choices) for knob in _knobs())


def _knobs() -> tuple[Knob, ...]:
    return knobs(n_cpus(), ContextConfig().threads)


def find_settings(
    model: Path,
    work: Work | None = None,
    *,
    file_types: Sequence[FileType] = ("q4_0",),
    keep: Path | None = None,
    progress: Progress = lambda _: None,
    max_s: float = math.inf,
) -> Tuning:
    """
    Search the options that do *work* fastest on this machine; takes minutes.

    The model is also requantised to each of *file_types*, in a temporary folder, to see
    whether that would pay. *model* itself is only read.

    Args:
        keep: where to leave the requantised file if it is the fastest; then the profile
            names it. None: the profile keeps to *model*.
        max_s: seconds after which no further option is tried. The defaults, what was found and
            each requantised file are measured all the same, with their perplexity.

    Raises:
        ConfigError: *keep* exists or cannot be written.
        PyllamaError: the model does not work with the defaults.
    """
    work, neighbours = work or Work(), OtherLoad()
    end = time.monotonic() + max_s
    with tempfile.TemporaryDirectory(dir=_folder_of(keep), prefix=".tune.") as scratch:
        files = _requantised(model, file_types, Path(scratch), progress)
        spaces = make_spaces(
            [model, *files.values()], work, lambda: progress("speed"), neighbours
        )
        ours = spaces[model]
        ours.measure(ours.default)  # raises what is wrong with the model
        path = model if keep is None else _fastest(spaces)
        tuning = _search(spaces, path, files, progress, end)
        if keep is not None and path != model:
            path = path.replace(keep)
        facts = {
            "path": path.absolute(),
            "machine": MachineFacts(cpu=cpu_name(), n_cpus=n_cpus()),
            "model_bytes": path.stat().st_size,
            "others_cpus": neighbours.cpus,
        }
        return replace(tuning, profile=tuning.profile.model_copy(update=facts))


def _search(
    spaces: Mapping[Path, Space],
    path: Path,
    files: Mapping[FileType, Path],
    progress: Progress,
    end: float,
) -> Tuning:
    """The best settings of *path*, against the defaults of the model, the first of *spaces*."""
    (model, ours), *_ = spaces.items()
    space = spaces[path]
    best = descend(space.sizes, space.cost, lambda: time.monotonic() < end)
    settings = settings_of(space.table, best)
    assert settings is not None

    def rated(file: Path, settings: Settings, measured: Measured) -> Measured:
        progress("perplexity")
        value = perplexity(file, settings)
        return measured.model_copy(update={"perplexity": value})

    before = after = rated(model, Settings(), ours.measure(ours.default))
    if (path, best) != (model, space.default):
        after = rated(path, settings, space.measure(best))
    requantised = {
        kind: rated(file, settings, spaces[file].speed(settings))
        for kind, file in files.items()
    }
    return Tuning(Profile(settings=settings, before=before, after=after), requantised)


def _fastest(spaces: Mapping[Path, Space]) -> Path:
    """The file that is fastest with the defaults; the first one unless another gains."""
    files = list(spaces)

    def cost(point: Point) -> float:
        space = spaces[files[point[0]]]
        return space.cost(space.default)

    return files[descend([len(files)], cost)[0]]


def _requantised(
    model: Path, file_types: Sequence[FileType], folder: Path, progress: Progress
) -> dict[FileType, Path]:
    """*model* in each of *file_types* but its own."""
    with Model.load(model, vocab_only=True) as loaded:
        own = loaded.ftype.lower()
    files = {kind: folder / f"{kind}.gguf" for kind in file_types if kind != own}
    for kind, file in files.items():
        progress(f"requantised to {kind}")
        quantize(model, file, kind)
    return files


def make_spaces(
    files: Sequence[Path],
    work: Work,
    progress: Callable[[], object] = lambda: None,
    neighbours: OtherLoad | None = None,
) -> dict[Path, Space]:
    """All that is searched: each of *files*, one model, with every choice of the knobs."""
    table, watch = _knobs(), neighbours or OtherLoad()
    with Model.load(files[0], vocab_only=True) as loaded:
        n_vocab = loaded.n_vocab

    def speed(file: Path, settings: Settings) -> Measured:
        try:
            with watch.watched():
                return measure(file, settings, work, n_vocab=n_vocab)
        finally:
            progress()

    return {file: Space(table, work, partial(speed, file)) for file in files}


def _folder_of(keep: Path | None) -> Path | None:
    if keep is None:
        return None
    if keep.exists():
        raise ConfigError(f"{keep} exists: it is not replaced, name another file")
    folder = keep.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{keep} cannot be written: there is no folder {folder}")
    return folder


# -- the command -------------------------------------------------------------------


def tune(options: Namespace) -> int:
    """Run the command; return its exit status."""
    model = resolve_model(options.model)
    out = Path(options.out or f"{model.stem}.profile.json")
    check_writable(out)
    work = Work(
        n_slots=options.n_slots,
        n_prompt=options.prompt_tokens,
        n_output=options.output_tokens,
        max_step_s=options.max_step_s,
    )
    total, began = n_measurements(), time.monotonic()
    with tqdm(desc="measuring", total=total, unit="", disable=None) as bar:

        def note(text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update()
            if bar.disable:  # no terminal: a line each, for who reads a log
                bar.n += 1
                seconds = time.monotonic() - began
                line = f"measured {bar.n} of about {total}, {seconds:.0f} s: {text}"
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()

        tuning = find_settings(
            model,
            work,
            file_types=options.file_types or ["q4_0"],
            keep=options.requantize,
            progress=note,
            max_s=math.inf if options.minutes is None else 60 * options.minutes,
        )
        bar.total = bar.n
    tuning.profile.save(out)
    sys.stdout.write("\n".join(_lines(tuning, out, copy=options.requantize)) + "\n")
    return 2 if is_busy(tuning.profile) else 0


def _lines(tuning: Tuning, out: Path, *, copy: Path | None) -> Iterator[str]:
    profile = tuning.profile
    before, after = profile.before, profile.after
    assert before is not None
    assert after is not None
    yield f"{'':22} {'prefill':>13} {'decode':>13} {'perplexity':>18}"
    yield _row("the defaults", before, before)
    yield _row("this profile", after, before)
    for file_type, measured in tuning.requantised.items():
        yield _row(f"the same in {file_type}", measured, before)
    yield f"settings: {_settings(profile)}"
    yield f"kernels: {_kernels(profile)}"
    yield f"model: {profile.path}"
    best = max(tuning.requantised.values(), key=_decode, default=after)
    if copy is None and _decode(best) > 1.1 * _decode(after):
        yield "requantising pays here: --requantize FILE keeps the file in a new place"
    yield f"written: {out}"
    if is_busy(profile):
        yield (
            f"NO PROOF: other processes used {profile.others_cpus:.2f} CPUs meanwhile; "
            "run it again on a quiet machine"
        )


def _kernels(profile: Profile) -> str:
    """Kernels that compute with the profile: the search may have turned some off."""
    assert profile.path is not None
    config = profile.engine_config()
    with Model.load(profile.path, **config.model.loading) as model:
        return kernels_used(model, config)


def _decode(measured: Measured) -> float:
    return measured.decode_tok_per_s


def _row(name: str, measured: Measured, before: Measured) -> str:
    prefill = measured.prefill_tok_per_s
    decode = measured.decode_tok_per_s
    return (
        f"{name:22} {prefill:6.0f} ({prefill / before.prefill_tok_per_s:3.1f}x) "
        f"{decode:6.0f} ({decode / before.decode_tok_per_s:3.1f}x) "
        f"{_perplexity(measured, before):>18}"
    )


def _perplexity(measured: Measured, before: Measured) -> str:
    if measured.perplexity is None or before.perplexity is None:
        return "-"
    change = measured.perplexity / before.perplexity - 1
    return f"{measured.perplexity:.2f} ({100 * change:+.1f} %)"


def _settings(profile: Profile) -> str:
    fields = profile.settings.model_dump()
    settings = [
        f"{name}={value}" for part in fields.values() for name, value in part.items()
    ]
    return ", ".join(settings) or "the defaults"
