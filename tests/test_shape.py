"""What must not grow again: registries of requests, and names that mean two things."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "pyllama_raw"
FOLDERS = ("api", "core", "engine", "testing")  # that have requests

# What is known by the id of a request, and why the record of engine/requests.py has it not.
REGISTRIES = {
    "engine/requests.py": {"OpenRequests"},  # the records
    "engine/built_samplers.py": {"_all"},  # executors know no records
    "engine/abort.py": {"_unwanted"},  # until the step is over
    "api/generation.py": {"_by_id"},  # the outputs of one prompt
    "core/scheduling/roster.py": {"alive"},
    "core/memory/slots.py": {"running"},
    "core/policies/vtc.py": {"_waiting"},  # a policy knows no more than a user's
    "testing/executor.py": {"_requests"},
}
# What is known by another number: a slot, a cell, a save, a fetch, an adapter, a token, a state.
OTHERS = {
    "core/memory/tiers.py": {"_loading", "_fetching", "_saves"},
    "core/memory/memory.py": {"_fetchers", "_loads"},
    "core/stop_strings.py": {"moves"},
    "engine/adapters.py": {"_all"},
    "engine/adapter_sets.py": {"_known"},
    "engine/executor.py": {"_lost"},
    "engine/rows.py": {"_Tokens"},
    "engine/operations.py": {"_saved", "_lost", "_restore_s"},
    "testing/memory.py": {"shifted", "_lost", "_saved", "_n_users"},
    "testing/executor.py": {"_sources"},
}
BY_NUMBER = re.compile(r"\b(\w*[dD]ict|\w*set|Counter)\[int\b")

# A user's word for what is the same thing inside, as far as users see it.
DOUBLE = {"Model"}


# Folders whose docstrings still begin with one of these, behind which the noun is to be found.
OLD_WORDS = {"_ffi", "core", "engine", "lab", "native", "serve"}
HEADLESS = re.compile(
    r"\s*(What|Who|Whose|Whom|Where|When|Why|How|Of|Those|Which|That)\b"
)


def registries(path: Path) -> Iterator[str]:
    """Attributes and classes of *path* that are kept by number."""
    for node in ast.walk(ast.parse(path.read_text())):
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
        for node in ast.walk(ast.parse(path.read_text())):
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
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and HEADLESS.match(node.value.value)
    ]

    assert headless == []


def imports(path: Path, names: set[str]) -> set[str]:
    """Those of *names* that *path* imports, for types only, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
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
