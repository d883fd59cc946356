"""What must not grow again: registries of requests, names that say nothing, hidden imports."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.trees import nodes, trees  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pyllama_raw"
FOLDERS = ("api", "core", "engine", "testing")  # that have requests

# What is known by the id of a request, and why the record of engine/requests.py has it not.
REGISTRIES = {
    "engine/requests.py": {"OpenRequests"},  # the records
    "engine/sampling.py": {"by_id"},  # executors know no records
    "engine/mailbox.py": {"_unwanted"},  # until the step is over
    "api/generation.py": {"_by_id"},  # the outputs of one prompt
    "core/scheduling/roster.py": {"alive"},
    "core/memory/slots.py": {"running"},
    "core/policies.py": {"_waiting"},  # a policy knows no more than a user's
    "testing/executor.py": {"_requests"},
}
# What is known by another number: a slot, a cell, a save, a fetch, an adapter, a token, a state, rows.
OTHERS = {
    "core/costs.py": {"_decodes"},
    "core/memory/tiers.py": {"_loading", "_fetching", "saves"},
    "core/memory/memory.py": {"fetchers", "loads"},
    "core/text.py": {"moves"},
    "engine/adapters.py": {"_all", "_adapters"},
    "engine/draft_executor.py": {"_trails"},
    "engine/executor.py": {"_lost"},
    "engine/rows.py": {"_Tokens"},
    "engine/operations.py": {"_saved", "_lost", "_restore_s"},
    "testing/executor.py": {"shifted", "_lost", "_saved", "_n_users", "_sources"},
}
BY_NUMBER = re.compile(r"\b(\w*[dD]ict|\w*set|Counter)\[int\b")

# A user's word for what is the same thing inside, as far as users see it.
DOUBLE = {"Model"}

# Words that say what happened to a thing, or point at it: neither says what the thing is.
WORDS = """
    asked begun chosen constraining declared described drawn each found given held keeping kept
    known looking made many more most named one opened others replacing replying rest said seen
    shown taken telling told wanted what who whole
"""
# Names that are such words, by folder of the root. They may become fewer and not more.
N_WORDS = {
    "benchmarks": 5,
    "examples": 0,
    "pyllama_raw": 0,
    "scripts": 11,
    "tests": 1056,
}

# Files of the package, of which each is a chapter. They may become fewer; a new one is a new concept.
N_FILES = 210

# Modules that are imported where they are used, with what they have, and why.
LATE_MODULES = {
    "pyllama_raw.native": "loads the library of C, and many programs need none",
    "pyllama_raw._ffi": "the same",
    "pyllama_raw.cli": "programs ask for a version first, and wait for the answer",
    "pyllama_raw.options.models": "the same",
    "importlib.metadata": "the same, and one message alone needs it",
    "pyllama_raw.lab.plot": "extra `bench`",
    "pyllama_raw.api.vectors": "imports numpy, of which its array is a kind",
    "pyllama_raw.prompts.rendering.template": "imports jinja2",
    "pyllama_raw.replies.spec": "few requests give a specification",
    "pyllama_raw.serve.processes": "few services have models in processes of their own",
    "ssl": "only downloads need it, and a model that is in the cache need not wait for it",
    "urllib.request": "the same",
    "http.client": "the same",
    "tqdm": "the same",
    "ctypes": "some milliseconds of each start, and only servers give memory back",
    "PIL": "extra `media`",
    "genai_prices": "extra `prices`",
    "httpx2": "extra `runners`",
    "huggingface_hub": "extra `hf`",
    "matplotlib": "extra `bench`",
    "opentelemetry": "extra `otel`",
    "prometheus_client": "extra `metrics`",
    "psutil": "extra `bench`",
    "soundfile": "extra `media`",
    "soxr": "extra `media`",
    "numpy": "a tenth of a second of each start, and most programs need no vector",
    "llguidance": "the same, for the first grammar",
    "jinja2": "the same, for the first chat",
    "readline": "not every Python has it",
}
# Imports inside of functions beside these, in all files of the package. They may become fewer and not more.
# Nearly all stand before the first use of libllama: Python imports the rest while C loads a model.
N_LATE = 13

# Files that still import two modules of one name.
TWICE = {
    "engine/executor.py": {"sampling"},
    "prompts/reply_plan.py": {"sampling"},
    "cli/serve.py": {"config"},
    # Users import the errors of runners by this name.
    "runners/child.py": {"errors"},
    "runners/connection.py": {"errors"},
    "runners/guards.py": {"errors"},
    "runners/remote.py": {"errors"},
    "runners/spawned.py": {"errors"},
    "serve/actions.py": {"errors"},
    "serve/processes.py": {"errors"},
}

# Folders whose docstrings still begin with one of these, behind which the noun is to be found.
OLD_WORDS = {"_ffi", "core", "engine", "native", "serve"}
HEADLESS = re.compile(
    r"\s*(What|Who|Whose|Whom|Where|When|Why|How|Of|Those|Which|That)\b"
)


def registries(path: Path) -> Iterator[str]:
    """Attributes and classes of *path* that are kept by number."""
    for node in nodes(path):
        match node:
            case ast.AnnAssign(target=ast.Attribute(attr=name), annotation=kind):
                kinds = [kind]
            case ast.Assign(targets=[ast.Attribute(attr=name)], value=value):
                kinds = [value]
            case ast.ClassDef(name=name, bases=kinds):
                pass
            case _:
                continue
        if any(BY_NUMBER.search(ast.unparse(kind)) for kind in kinds):
            yield name


def test_what_an_engine_has_of_a_request_is_in_one_place():
    """
    A new registry is a finding: the record, the sequence or the view may have the fact.
    """
    found = defaultdict(set)
    for folder in FOLDERS:
        for path in (PACKAGE / folder).rglob("*.py"):
            if names := set(registries(path)):
                found[str(path.relative_to(PACKAGE))] = names
    known = defaultdict(set)
    for group in (REGISTRIES, OTHERS):
        for file, names in group.items():
            known[file] |= names

    assert found == known
    assert sum(map(len, REGISTRIES.values())) <= 9


def test_no_class_name_means_two_things():
    """
    A name that is read anywhere in the package needs no second look.
    """
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))

    assert {name for name, files in places.items() if len(files) > 1} == DOUBLE


def test_docstrings_begin_with_a_noun_or_a_verb():
    """
    The first word says what the thing is or does; attributes included.
    """
    headless = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value.value}"
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in OLD_WORDS
        for node in nodes(path)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and HEADLESS.match(node.value.value)
    ]

    assert headless == []


def bound_names(path: Path) -> Iterator[str]:
    """Variables, attributes, parameters and classes that *path* makes, and its own name."""
    yield path.stem
    for node in nodes(path):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name):
                yield name
            case ast.ClassDef(name=name):
                yield name.lower()
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield name


@pytest.mark.parametrize("folder", N_WORDS)
def test_names_are_nouns(folder):
    """
    A reader who sees a name knows what it stands for; whoever renames one lowers the number.
    """
    words, counts = set(WORDS.split()), {}
    for path in (ROOT / folder).rglob("*.py"):
        names = [name for name in bound_names(path) if name.strip("_") in words]
        if names:
            counts[str(path.relative_to(ROOT))] = len(names)

    assert sum(counts.values()) <= N_WORDS[folder], counts


def test_the_package_has_few_files():
    """
    A new concept is a file; what only one file uses stands there.
    """
    assert len(list(PACKAGE.rglob("*.py"))) <= N_FILES


def late_imports(path: Path) -> list[str]:
    """Modules that *path* imports inside of functions, without LATE_MODULES."""
    functions = (
        node
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    inside = {node for function in functions for node in ast.walk(function)}
    modules = [
        alias.name
        for node in inside
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    modules += [
        node.module or "" for node in inside if isinstance(node, ast.ImportFrom)
    ]
    late = tuple(f"{name}." for name in LATE_MODULES)
    return [name for name in modules if not f"{name}.".startswith(late)]


def test_imports_stand_at_the_top():
    """
    Whoever opens a file sees what it needs; whoever moves an import up lowers the number.
    """
    late = {
        str(path.relative_to(PACKAGE)): names
        for path in PACKAGE.rglob("*.py")
        if (names := late_imports(path))
    }

    assert sum(map(len, late.values())) <= N_LATE, late


def imported_modules(path: Path, modules: set[str]) -> set[str]:
    """Those of *modules* that *path* imports, whole or names of them."""
    imported = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            imported |= {name if name in modules else node.module for name in names}
    return imported & modules


def test_a_file_imports_no_two_modules_of_one_name():
    """
    The last word of an import says which module it is.
    """
    modules = {
        ".".join(("pyllama_raw", *path.relative_to(PACKAGE).with_suffix("").parts))
        for path in PACKAGE.rglob("*.py")
    }
    modules = {name.removesuffix(".__init__") for name in modules}
    twice = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        counts = Counter(
            name.split(".")[-1] for name in imported_modules(path, modules)
        )
        if names := {name for name, n in counts.items() if n > 1}:
            twice[str(path.relative_to(PACKAGE))] = names

    assert twice == TWICE


def imports(path: Path, names: set[str]) -> set[str]:
    """Those of *names* that *path* imports, for types only, too."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return found & names


@pytest.mark.parametrize(
    "folder", sorted(path.name for path in PACKAGE.iterdir() if path.is_dir())
)
def test_files_of_a_folder_do_not_import_each_other_in_a_circle(folder):
    """
    A file is understood without those that use it; a CycleError names the circle. Folders in a
    folder count as well.
    """
    files = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in (PACKAGE / folder).rglob("*.py")
    }
    graph = {name: imports(path, set(files)) for name, path in files.items()}

    assert len(list(TopologicalSorter(graph).static_order())) == len(files)
