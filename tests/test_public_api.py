"""What an installed package shows before anything native is touched."""

import ast
import importlib.metadata
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import pyllama_raw
from pyllama_raw import _ffi
from pyllama_raw.errors import LibraryNotBuilt
from tests.support.limits import LIMIT_S

# A finder that refuses the extension, as on a machine where it was never built.
HIDE_EXTENSION = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "pyllama_raw._ffi._llama":
            raise ImportError("hidden by a test")

sys.meta_path.insert(0, Refuse())
"""


def run_without_extension(code: str) -> str:
    command = [sys.executable, "-c", HIDE_EXTENSION + code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_name_exists():
    """
    __all__ names only what can be imported, each once.
    """
    names = pyllama_raw.__all__

    assert len(set(names)) == len(names)
    assert all(hasattr(pyllama_raw, name) for name in names)


def test_every_public_name_is_what_checkers_take_it_for():
    """
    A name that is imported later comes from the module that the imports for types name.
    """
    tree = ast.parse(Path(pyllama_raw.__file__).read_text())
    (typing,) = (node for node in tree.body if isinstance(node, ast.If))
    later = {alias.name: node.module for node in typing.body for alias in node.names}

    found = {name: getattr(pyllama_raw, name) for name in later}

    assert found == {
        name: getattr(import_module(module), name) for name, module in later.items()
    }


def test_modules_for_programs_need_no_import_of_their_own():
    """
    Those that the package names are attributes of it from the beginning, as they are after an import.
    """
    code = """
import pyllama_raw
print([name in dir(pyllama_raw) for name in ('errors', 'policy', 'results')])
print(pyllama_raw.errors.QueueFull is pyllama_raw.QueueFull)
print(pyllama_raw.policy.__name__, pyllama_raw.results.__name__)
"""

    assert run_without_extension(code).splitlines() == [
        "[True, True, True]",
        "True",
        "pyllama_raw.policy pyllama_raw.results",
    ]


def test_the_version_is_that_of_the_installation():
    """
    The package and the metadata of its installation carry one version.
    """
    assert importlib.metadata.version("pyllama_raw") == pyllama_raw.__version__


def test_types_are_shipped():
    """
    The marker that makes type checkers read the package lies in it.
    """
    assert (Path(pyllama_raw.__file__).parent / "py.typed").is_file()


def test_every_folder_with_code_is_a_package():
    """
    A folder without __init__.py would be left out of the wheel.
    """
    package = Path(pyllama_raw.__file__).parent
    folders = {path.parent for path in package.rglob("*.py")}

    assert [path for path in folders if not (path / "__init__.py").is_file()] == []


def test_import_works_without_the_extension():
    """
    Importing every public name needs no native library.
    """
    code = "from pyllama_raw import *\nprint('pyllama_raw._ffi._llama' in sys.modules)"

    assert run_without_extension(code) == "False\n"


def test_what_only_a_running_engine_needs_comes_later():
    """
    Names of results are not imported with the package; all are listed and can be had.
    """
    code = """
import sys, pyllama_raw
print('pyllama_raw.api.results' in sys.modules, set(pyllama_raw.__all__) <= set(dir(pyllama_raw)))
print(pyllama_raw.Result.__name__, hasattr(pyllama_raw, 'Resultat'))
"""

    assert run_without_extension(code) == "False True\nResult False\n"


def test_a_model_with_default_options_waits_for_neither_pydantic_nor_the_scheduler():
    """
    Nothing that is imported before C loads a model checks options or plans steps.
    """
    code = """
import sys
from pyllama_raw import AsyncEngine
from pyllama_raw.engine import opening
print('pydantic' in sys.modules, 'pyllama_raw.core.scheduling' in sys.modules)
"""

    assert run_without_extension(code) == "False False\n"


def test_no_engine_waits_for_what_few_requests_need():
    """
    Nothing that is imported while a model loads brings it.
    """
    code = """
import sys
from importlib import import_module
from pyllama_raw.engine import opening
for name in opening.NEXT:
    import_module(name)
names = "numpy", "jinja2", "opentelemetry"
print([name for name in names if name in sys.modules])
"""

    assert run_without_extension(code) == "[]\n"


def test_first_native_use_says_what_to_run():
    """
    Without the extension the first use of C names the command that builds it.
    """
    code = """
from pyllama_raw import _ffi
from pyllama_raw.errors import LibraryNotBuilt
try:
    _ffi.load()
except LibraryNotBuilt as error:
    print(repr(str(error)))
"""

    message = ast.literal_eval(run_without_extension(code))

    assert "hidden by a test" in message
    assert "pip install" in message


@pytest.mark.native
def test_a_source_tree_names_the_installed_copy_that_it_hides(tmp_path: Path):
    """
    A copy without the extension, first on the path, says where the built one is and
    three ways to get to it.
    """
    package = Path(pyllama_raw.__file__).parent
    unbuilt = shutil.ignore_patterns("*.so", "lib", "__pycache__")
    shutil.copytree(package, tmp_path / "pyllama_raw", ignore=unbuilt)
    code = f"import sys; sys.path.append({str(package.parent)!r}); import pyllama_raw._ffi as f; f.load()"

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    message = done.stderr.splitlines()[-1]
    assert f"imports pyllama_raw from {tmp_path}/pyllama_raw" in message
    assert f"in {package.parent}: run `pyllama-raw`" in message
    assert "leave this folder, or start Python with -P" in message


def test_boundary_keeps_the_cause(monkeypatch):
    """
    What the loader refused stays as the cause of the error.
    """
    monkeypatch.setitem(sys.modules, _ffi.EXTENSION, None)

    with pytest.raises(LibraryNotBuilt, match="PYLLAMA_RAW_PREFIX") as caught:
        _ffi.load()

    assert isinstance(caught.value.__cause__, ImportError)
