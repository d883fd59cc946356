"""From a model file to a profile."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.tune.knobs import Knob, knobs
from pyllama_raw.lab.tune.search import descend
from pyllama_raw.lab.tune.space import Space
from pyllama_raw.lab.tune.work import Work, measure, perplexity
from pyllama_raw.native.model import Model
from pyllama_raw.native.quantize import FileType, quantize
from pyllama_raw.options import host
from pyllama_raw.options.config import ContextConfig
from pyllama_raw.options.cpus import n_cpus
from pyllama_raw.options.host import Others
from pyllama_raw.options.profile import Machine, Measured, Profile, Settings

Progress = Callable[[str], object]  # told what was done, one call a measurement


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was found."""

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
) -> Tuning:
    """
    Search the options that do *work* fastest on this machine; takes minutes.

    The model is also requantised to each of *file_types*, in a temporary folder, to see
    whether that would pay. *model* itself is only read.

    Args:
        keep: where to leave the requantised file if it is the fastest; then the profile
            names it. None: the profile keeps to *model*.

    Raises:
        ConfigError: *keep* exists or cannot be written.
        PyllamaError: the model does not work with the defaults.
    """
    folder = None if keep is None else _folder_of(keep)
    work = work or Work()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".tune.") as scratch:
        facts = _facts(model)
        files = {
            file_type: Path(scratch) / f"{file_type}.gguf"
            for file_type in file_types
            if file_type != facts.file_type
        }
        for file_type, file in files.items():
            progress(f"requantised to {file_type}")
            quantize(model, file, file_type)
        others = Others()
        space = make_space(
            model,
            list(files.values()) if keep else [],
            work,
            progress=lambda: progress("speed"),
            others=others,
        )
        tuning = _search(space, files, progress)
        tuning = _described(tuning, others.cpus)
        return tuning if keep is None else _kept(tuning, model, keep)


def make_space(
    model: Path,
    files: Sequence[Path],
    work: Work,
    progress: Callable[[], object] = lambda: None,
    others: Others | None = None,
) -> Space:
    """All that is searched: *model*, or one of *files*, with every choice of the knobs."""
    table = _knobs()
    n_vocab = _facts(model).n_vocab
    watch = others or Others()

    def measuring(file: Path, settings: Settings, work: Work) -> Measured:
        with watch.watched():
            return measure(file, settings, work, n_vocab=n_vocab)

    return Space([model, *files], table, work, measuring, progress)


def _search(space: Space, files: Mapping[FileType, Path], progress: Progress) -> Tuning:
    default = space.default
    space.measure(default)  # raises what is wrong with the model
    best = descend(space.sizes, space.cost)
    settings = space.settings(best)
    assert settings is not None

    def rated(file: Path, settings: Settings, measured: Measured) -> Measured:
        progress("perplexity")
        value = perplexity(file, settings)
        return measured.model_copy(update={"perplexity": value})

    before = rated(space.files[0], Settings(), space.measure(default))
    after = before
    if best != default:
        after = rated(space.files[best[0]], settings, space.measure(best))
    requantised: dict[FileType, Measured] = {}
    for file_type, file in files.items():
        measured = space.measure_file(file, settings)
        requantised[file_type] = rated(file, settings, measured)
    path = space.files[best[0]].absolute()
    return Tuning(
        Profile(path=path, settings=settings, before=before, after=after), requantised
    )


def _described(tuning: Tuning, others_cpus: float | None) -> Tuning:
    """With what tells whether the profile fits elsewhere, and whether it is proof."""
    assert tuning.profile.path is not None
    facts = {
        "machine": Machine(cpu=host.cpu_name(), n_cpus=host.n_cpus()),
        "model_bytes": tuning.profile.path.stat().st_size,
        "others_cpus": others_cpus,
    }
    return replace(tuning, profile=tuning.profile.model_copy(update=facts))


def _kept(tuning: Tuning, model: Path, keep: Path) -> Tuning:
    """Give the file of the profile its name, if it is not the model itself."""
    profile = tuning.profile
    if profile.path is None or profile.path == model.absolute():
        return tuning
    profile.path.replace(keep)
    moved = profile.model_copy(update={"path": keep.absolute()})
    return replace(tuning, profile=moved)


def _folder_of(keep: Path) -> Path:
    if keep.exists():
        raise ConfigError(f"{keep} exists: it is not replaced, name another file")
    folder = keep.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{keep} cannot be written: there is no folder {folder}")
    return folder


@dataclass(frozen=True, slots=True)
class _Facts:
    file_type: str
    n_vocab: int


def _facts(model: Path) -> _Facts:
    with Model.load(model, vocab_only=True) as loaded:
        return _Facts(loaded.ftype.lower(), loaded.n_vocab)
