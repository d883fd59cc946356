"""
What pyproject.toml cannot say: the extension and the libraries that go beside it.

Nothing is looked for or built until build_ext runs, so reading metadata stays quick. An
extension is kept beside the library in the cache: other environments take it from there.
"""

from __future__ import annotations

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

sys.path.insert(0, str(Path(__file__).resolve().parent))
import build_lib

NAME = "pyllama_raw._ffi._llama"


class BuildWithLibrary(build_ext):
    """Compile the extension and put the libraries into lib/ next to it."""

    def build_extension(self, ext: Extension) -> None:
        try:
            self._build_extension(ext)
        except (build_lib.BuildError, OSError) as error:
            # pip shows all that this process says: one line helps more than the frames of setuptools.
            raise SystemExit(f"error: {error}") from None

    def _build_extension(self, ext: Extension) -> None:
        build_lib.toolchain.check_python_headers()
        library = build_lib.find_or_build()
        kept = build_lib.kept_extension(library)
        made = Path(self.get_ext_fullpath(ext.name))
        if kept is not None and kept.is_file():
            made.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(kept, made)
        else:
            self._compile(ext, library)
            if kept is not None:
                kept.parent.mkdir(exist_ok=True)
                with build_lib.fetch.atomic_file(kept) as file:
                    file.write(made.read_bytes())
        ext.sources = []  # the manifest of sources takes no absolute paths
        _copy_libraries(library, made.parent / "lib")

    def _compile(self, ext: Extension, library: Any) -> None:
        builder = build_lib.ffibuilder(library)
        described = builder.distutils_extension(self.build_temp, verbose=False)
        for field in (
            "sources",
            "include_dirs",
            "library_dirs",
            "libraries",
            "extra_compile_args",
            "extra_link_args",
            "define_macros",
        ):
            setattr(ext, field, getattr(described, field))
        self.force = True  # objects of an earlier library or header must not be reused
        _compile_side_by_side(self.compiler)
        try:
            super().build_extension(ext)
        except CompileError as error:
            raise CompileError(
                f"{error}\nThe headers in {library.include} do not fit the declarations "
                f"of this version, written for llama.cpp {build_lib.LLAMA_COMMIT}."
            ) from error

    def copy_extensions_to_source(self) -> None:
        """An editable install and --inplace: the source tree gets the libraries too."""
        super().copy_extensions_to_source()
        built = Path(self.build_lib) / "pyllama_raw" / "_ffi" / "lib"
        target = build_lib.FFI_DIR / "lib"
        shutil.rmtree(target, ignore_errors=True)
        if built.is_dir():
            shutil.copytree(built, target)


def _compile_side_by_side(compiler: Any) -> None:
    """Let *compiler* use all CPUs: setuptools compiles the files of an extension in turn."""
    compile_in_turn = compiler.compile

    def compile_all(sources: list[str], **options: Any) -> list[str]:
        with ThreadPoolExecutor(build_lib.toolchain.n_jobs()) as pool:
            parts = pool.map(lambda one: compile_in_turn([one], **options), sources)
            return [path for part in parts for path in part]

    compiler.compile = compile_all


def _copy_libraries(library: Any, beside: Path) -> None:
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    record = json.dumps(build_lib.record(library), indent=2)
    (beside / build_lib.loaded.RECORD).write_text(f"{record}\n")
    if library.bundled:
        for path in [*library.files, *library.lib.glob("LICENSE.*")]:
            shutil.copy(path, beside / path.name)
        (beside / build_lib.cpu_level.LEVEL_FILE).write_text(f"{library.cpu}\n")


setup(
    ext_modules=[Extension(NAME, sources=[], py_limited_api=True)],
    cmdclass={"build_ext": BuildWithLibrary},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
