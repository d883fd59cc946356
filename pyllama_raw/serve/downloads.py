"""
Models that are fetched into the cache of Hugging Face, and removed from it, while the service runs: what
llama-server's router does at `POST /models` and `DELETE /models`.

Rules:
1. A process fetches each model, so nothing of it keeps the service from its work. It ends with this one.
2. The request that begins a download is answered once the hub has told what there is to fetch.
3. A name has one download at a time, all have MAX_DOWNLOADS, and none begins beyond the room of the disk.
4. A model is listed from when its download has begun. When that has ended the list is read anew.
5. What was fetched may be removed, and nothing else. Requests that run on it go on, and then it leaves.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from anyio import Event, fail_after, sleep, to_thread
from anyio.abc import TaskGroup

from pyllama_raw.options.machine import interpreter
from pyllama_raw.options.models import FETCH, REPORT, remove_fetched
from pyllama_raw.runners import ModelCache, ModelEvent
from pyllama_raw.runners.child import Child
from pyllama_raw.serve.failures import Failure, refused

logger = logging.getLogger(__name__)
PROGRAM = "from pyllama_raw.options.models import fetch_telling; fetch_telling()"
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?", re.ASCII)
CACHE = "cache"  # the source of models that were fetched
MAX_DOWNLOADS = 4
PLAN_S = 60.0  # for the hub to tell what there is to fetch
STOP_S = 3.0  # for a process to take away what is half fetched
LOOK_S = 0.25
MARGIN_BYTES = 2**30  # of the disk that stay free
QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
OFFLINE = "HF_HUB_OFFLINE"


@dataclass(slots=True, eq=False)
class Download:
    """A model that a process fetches."""

    name: str
    child: Child
    files: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Bytes by address of a file, `done` and `total`; none are known at first."""
    n_free: int = 0  # bytes of the disk, when it began
    error: str | None = None
    ended: Event = field(default_factory=Event)

    @property
    def n_left(self) -> int:
        """Bytes that are still to come."""
        return sum(file["total"] - file["done"] for file in self.files.values())

    def look(self) -> bool:
        """Take in what the process has told; whether that is news."""
        lines = self.child.said.splitlines()
        reports = [
            line.removeprefix(REPORT) for line in lines if line.startswith(REPORT)
        ]
        facts: dict[str, Any] = {}
        for text in reports[-1:]:
            try:
                facts = json.loads(text)
            except ValueError:  # it is not all written yet
                return False
        self.error = facts.get("error")
        before, self.files = self.files, facts.get("files", self.files)
        self.n_free = facts.get("free", self.n_free)
        return self.files != before


class Downloads:
    """
    The downloads of a service.

    Args:
        group: they go on in its tasks, and end when it is cancelled.
        models: its readers hear of them, and a model that is in it is not fetched again.
        reread: has the list of models read anew.
    """

    def __init__(
        self,
        group: TaskGroup,
        models: ModelCache,
        reread: Callable[[], Awaitable[object]],
    ) -> None:
        self._group, self._models, self._reread = group, models, reread
        self._all: dict[str, Download] = {}

    def progress(self) -> dict[str, Mapping[str, Mapping[str, int]]]:
        """Bytes of the files of each model that is being fetched, by name."""
        return {
            n: download.files for n, download in self._all.items() if download.files
        }

    def close(self) -> None:
        """Have all end."""
        for download in self._all.values():
            download.child.ask_to_end()

    async def begin(self, name: str) -> None:
        """
        Begin to fetch a model, whose files and sizes the hub has told on return.

        Raises:
            Failure: it cannot be fetched, or not now.
        """
        if not NAME.fullmatch(name):
            raise refused("model", "give OWNER/REPO or OWNER/REPO:QUANT")
        if os.environ.get(OFFLINE):
            message = f"model '{name}' is not fetched, as the server was started with --offline ({OFFLINE})"
            raise Failure(400, "offline", message, "model")
        if name in self._models or name in self._all:
            message = f"model '{name}' already exists"
            raise Failure(400, "invalid_request", message, "model")
        if len(self._all) >= MAX_DOWNLOADS:
            message = f"{MAX_DOWNLOADS} models are being fetched: try again later"
            headers = {"retry-after": "60"}
            raise Failure(503, "server_is_overloaded", message, headers=headers)
        command = [interpreter(), "-c", PROGRAM]
        child = Child(f"the download of {name}", command, {FETCH: f"hf:{name}"} | QUIET)
        download = self._all[name] = Download(name, child)
        try:
            await self._plan(download)
        except BaseException:
            await self._end(download)
            raise
        self._tell(name, "model_status", {"status": "downloading"})
        self._group.start_soon(self._follow, download)

    async def cancel(self, name: str) -> bool:
        """End the download of a model; False: there is none."""
        download = self._all.get(name)
        if download is None:
            return False
        await download.child.end(STOP_S)
        await download.ended.wait()
        return True

    async def remove(self, name: str) -> None:
        """
        Remove a model from the cache; a download of it ends.

        Raises:
            Failure: it was not fetched, or cannot be removed.
        """
        models = self._models
        was_coming = await self.cancel(name)
        if name in models and models.source_of(name) != CACHE:
            message = f"model name={name} is not removable (not from cache)"
            raise Failure(400, "invalid_request", message, "model")
        if name not in models and not was_coming:
            message = f"model name={name} is not found"
            raise Failure(404, "model_not_found", message, "model")
        try:
            await to_thread.run_sync(remove_fetched, name)
        except OSError as error:
            message = f"model name={name} cannot be removed: {error.strerror}"
            raise Failure(500, "internal_error", message) from error
        await self._reread()
        self._tell(name, "model_remove")

    # -- inside --------------------------------------------------------------------------

    async def _plan(self, download: Download) -> None:
        """Wait for the sizes of files. Raises Failure if they cannot be fetched."""
        child, name = download.child, download.name
        try:
            with fail_after(PLAN_S):
                while not download.files:
                    has_ended = child.has_ended
                    if not download.look() and has_ended:
                        reason = download.error or child.said[-300:] or "it was ended"
                        message = (
                            f"model validation failed, unable to download: {reason}"
                        )
                        raise Failure(400, "model_not_found", message, "model")
                    await sleep(LOOK_S)
        except TimeoutError:
            message = f"the hub has not told of model '{name}' within {PLAN_S:g} s"
            headers = {"retry-after": "60"}
            raise Failure(503, "model_unavailable", message, headers=headers) from None
        # Others have been promised the room that they still need.
        n_left = sum(other.n_left for other in self._all.values())
        if n_left > max(download.n_free - MARGIN_BYTES, 0) and download.n_left:
            message = (
                f"model '{name}' needs {download.n_left} bytes, all downloads {n_left}, and the disk "
                f"has {download.n_free}, of which {MARGIN_BYTES} stay free: remove another one"
            )
            raise Failure(507, "disk_full", message)

    async def _follow(self, download: Download) -> None:
        """Tell how far a download is, until it has ended; then have the list read anew."""
        name, child = download.name, download.child
        progress = partial(self._tell, name, "download_progress")
        progress({"progress": download.files})
        try:
            while not child.has_ended:
                await sleep(LOOK_S)
                if download.look():
                    progress({"progress": download.files})
            is_whole = child.returned == 0
            if not is_whole:
                reason = download.error or f"its process ended with {child.returned}"
                logger.error("%s was not fetched: %s", name, reason)
        finally:
            await self._end(download)
        if is_whole:
            try:
                await self._reread()
            # Whatever happens to files of the cache meanwhile, the server goes on.
            except Exception:
                logger.exception("the list of models was not read anew")
        self._tell(name, "download_finished" if is_whole else "download_failed")

    async def _end(self, download: Download) -> None:
        with anyio.CancelScope(shield=True):
            await download.child.end(STOP_S)
        self._all.pop(download.name, None)
        download.ended.set()

    def _tell(
        self, name: str, kind: str, data: Mapping[str, Any] | None = None
    ) -> None:
        self._models.tell(ModelEvent(name, kind=kind, data=data))
