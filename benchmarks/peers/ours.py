"""Our own server, `pyllama-raw serve`, in a process of its own as the peers are."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from pyllama_raw import EngineConfig

from . import Url, serving


@contextmanager
def pyllama_raw_server(model: Path, config: EngineConfig, *flags: str) -> Iterator[Url]:
    """Serve *model* with what is given in *config*, and with further *flags*."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "serve.toml"
        file.write_text(toml(config))
        command = [sys.executable, "-m", "pyllama_raw", "serve", str(model)]
        command += ["--config", str(file), "--port", "0", *flags]
        with serving(command, None) as url:
            yield url


def toml(config: EngineConfig) -> str:
    """What is given in *config*, as a file for `serve`."""
    options = config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    lines = []
    for part, fields in options.items():
        lines.append(f"[{part}]")
        lines += [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
    return "\n".join(lines)
