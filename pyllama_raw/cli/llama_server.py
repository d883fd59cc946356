"""
The program that stands in the place of llama-server: its arguments, its answers, its signs.

Programs that start llama-server find it by its name, so this one is linked or named so. They ask
for its version or its devices, or start it without a model and end it as soon as it says
`system_info:`. All of that comes before anything of a server is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from pyllama_raw.cli import FAILED, INTERRUPTED, open_missing
from pyllama_raw.cli.llama_arguments import Arguments, read
from pyllama_raw.cli.llama_flags import FLAGS, described
from pyllama_raw.errors import ConfigError, PyllamaError
from pyllama_raw.options import __version__

SERVING = "pyllama_raw.cli.llama_serving"
VERBS = ("serve", "server")  # of a program that is named llama
FOREIGN = ("GGML_BACKEND_PATH",)  # a backend of the ggml of another program
MIB = 2**20
VERBOSE = 4  # from here on libllama's lines are told
PATH_WIDTH = 40  # columns of flags in the help


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status, 1 for all mistakes, as llama-server does."""
    try:
        open_missing()
    except OSError as error:
        sys.stderr.write(f"error: {error}\n")
        return FAILED
    for variable in FOREIGN:
        os.environ.pop(variable, None)
    if folder := os.environ.get("LLAMA_CACHE"):
        os.environ["HF_HUB_CACHE"] = folder
    line = list(sys.argv[1:] if arguments is None else arguments)
    if line[:1] and line[0] in VERBS:
        del line[0]
    try:
        parsed = read(line)
        for place, answer in ANSWERS.items():
            if parsed.values.get(f"own.{place}"):
                answer()
                sys.stdout.flush()
                return 0
        return _served(parsed)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ConfigError as error:
        text = str(error)
        start = "" if text.startswith("error") else "error: "
        sys.stderr.write(f"{start}{text}\n\nto show complete usage, run with -h\n")
    except (PyllamaError, OSError) as error:
        sys.stderr.write(f"error: {error}\nllama_server: exiting due to an error\n")
    return FAILED


def _served(parsed: Arguments) -> int:
    """Tell what the machine has, then import the server and run it."""
    own = parsed.part("own")
    if own.get("offline"):
        os.environ["HF_HUB_OFFLINE"] = "1"
    if token := own.get("hf_token"):
        os.environ["HF_TOKEN"] = token
    for note in parsed.notes:
        sys.stderr.write(f"note: {note}\n")
    is_verbose = own.get("verbose") or own.get("verbosity", 0) >= VERBOSE
    if not own.get("log_disable"):
        _tell_system(is_verbose=bool(is_verbose))
    serve: Callable[[Arguments], int] = import_module(SERVING).serve
    return serve(parsed)


def _tell_system(*, is_verbose: bool) -> None:
    """Write what libllama says of itself, which some wait for, as they end the process then."""
    from pyllama_raw.native import libllama

    information = libllama.system_info()
    if is_verbose:
        for line in libllama.drain():
            sys.stderr.write(f"{line.text}\n")
    n_cpus = os.cpu_count() or 1
    text = f"system_info: n_threads = {n_cpus} / {n_cpus} | {information}"
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


# -- answers without a server ------------------------------------------------------------


def _show_help() -> None:
    """Write each flag and what it means here."""
    write = sys.stdout.write
    write(f"pyllama_raw {__version__} in the place of llama-server\n\n")
    for names, meaning in described():
        left = names.replace("`", "")
        space = "\n" + " " * PATH_WIDTH if len(left) > PATH_WIDTH - 3 else ""
        write(f"{left:<{PATH_WIDTH}}{space}{meaning}\n")


def _show_version() -> None:
    """Write the version to stderr, in the form of llama-server."""
    from pyllama_raw.native import libllama

    version = libllama.llama_version()
    sys.stderr.write(
        f"version: {version} (build 0, commit pyllama_raw-{__version__})\n"
    )
    python = f"{sys.implementation.name} {sys.version.split()[0]}"
    system = f"{sys.platform} {os.uname().machine}"
    sys.stderr.write(f"built with {python} for {system}\n")


def _show_devices() -> None:
    """Write all devices but CPUs, in the form of llama-server; the header stands alone."""
    from pyllama_raw.native import libllama

    devices = [device for device in libllama.devices() if device.kind != "cpu"]
    sys.stdout.write("Available devices:\n")
    if not devices:
        sys.stdout.write("  (none)\n")
    for device in devices:
        total, free = device.memory_total_bytes // MIB, device.memory_free_bytes // MIB
        text = f"{device.name}: {device.description} ({total} MiB, {free} MiB free)"
        sys.stdout.write(f"  {text}\n")


def _show_cache() -> None:
    """Write the models that were fetched from Hugging Face, in the form of llama-server."""
    from pyllama_raw.options.models import fetched_models

    names = [model.name for model in fetched_models()]
    sys.stdout.write(f"number of models in cache: {len(names)}\n")
    for number, name in enumerate(names, 1):
        sys.stdout.write(f"{number:4d}. {name}\n")


def _show_completion() -> None:
    """Write a script for bash that completes the flags."""
    names = " ".join(name for flag in FLAGS for name in flag.names if name[0] == "-")
    programs = "llama-server pyllama-llama-server"
    sys.stdout.write(f"complete -o default -W '{names}' {programs}\n")


ANSWERS: dict[str, Callable[[], Any]] = {
    "help": _show_help,
    "version": _show_version,
    "list_devices": _show_devices,
    "cache_list": _show_cache,
    "completion": _show_completion,
}


if __name__ == "__main__":
    sys.exit(main())
