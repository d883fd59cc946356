"""From a model file to a profile."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.tune.space import Knob, Point, Space, descend, knobs, settings_of
from pyllama_raw.lab.tune.work import Work, measure, perplexity
from pyllama_raw.native.model import FileType, Model, quantize
from pyllama_raw.options.config import ContextConfig
from pyllama_raw.options.machine import OtherLoad, cpu_name, n_cpus
from pyllama_raw.options.profile import MachineFacts, Measured, Profile, Settings

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


def tune(
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
