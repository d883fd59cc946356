"""
Desk of an engine for images and sounds: a projector, limits, numbers and an encoder.

A *reader* decodes an upload and has the projector cut it into runs. The *desk* makes spans of a
prompt of them, and has them encoded.

The *encoder* encodes images and sounds in a thread of its own that mostly waits. The compute
thread does the work, between steps. `core/encodes.py` says which encode is next and what is kept;
the encoder only connects the two.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Condition, Thread
from time import monotonic
from typing import Any, NamedTuple, cast

from pyllama_raw.core.encodes import Encodes, RowKey, RowNeed
from pyllama_raw.core.request import Namespace, Span
from pyllama_raw.core.stats import MediaStats
from pyllama_raw.engine.requests import (
    Cancellable,
    OpenRequest,
    RequestEncodes,
    Rows,
    Task,
)
from pyllama_raw.engine.shared_models import ModelUse, Shared, fingerprint, model_files
from pyllama_raw.engine.state_files import SpanKeys
from pyllama_raw.errors import BadMedia, EngineFault, PyllamaError
from pyllama_raw.media import decoders
from pyllama_raw.media.content import (
    Audio,
    Media,
    MediaLimits,
    MediaMessages,
    PromptPiece,
    list_pieces,
)
from pyllama_raw.media.decoders import DecodeStopped, Stop, never
from pyllama_raw.native.projector import Bitmap, Cut, EncodeCall, Projector, RowRun, Run
from pyllama_raw.options.config import EngineConfig


@dataclass(frozen=True, slots=True)
class MediaLayout:
    """Room that a part takes in a prompt: known from its size, before it is decoded."""

    runs: tuple[Run, ...]
    keys: tuple[bytes | None, ...]  # 32 bytes: rows with equal keys are equal


class MediaReader:
    """
    Plans and decodes the images and sounds of prompts for one projector.

    Args:
        identity: all that must be equal for two projectors to make equal rows.

    Thread:
        Any.
    """

    def __init__(self, projector: Projector, identity: bytes) -> None:
        self._projector, self._identity = projector, identity

    def key(self, part: Media, namespace: Namespace) -> RowKey:
        """Parts with equal ones have equal rows, and share them in *namespace* only."""
        return RowKey(sha256(self._identity + part.digest).digest(), namespace)

    def layout(self, part: Media) -> MediaLayout:
        """
        The layout of *part*, from its size.

        Raises:
            BadMedia: the size cannot be handled.
            Unsupported: the projector does not see, or does not hear.
        """
        with self._placeholder(part) as bitmap, self._projector.cut(bitmap) as cut:
            return MediaLayout(cut.runs, tuple(self._keys(part.digest, cut)))

    def read(self, part: Media, stop: Stop = never) -> Cut:
        """
        Decode *part* and cut it for the encodes; takes a second for a large image.

        Raises:
            BadMedia: it is damaged, or not what its first bytes say.
            Unsupported: the projector does not see, or does not hear.
            DecodeStopped: *stop* says so.
        """
        with self.decode(part, stop) as bitmap:
            return self._projector.cut(bitmap)

    def encode(
        self, part: Media, layout: MediaLayout, control: EncodeCall
    ) -> array[float] | None:
        """
        All rows of *part*, in order; None if it was cancelled.

        Raises:
            BadMedia, Unsupported: as read().
            EncodeFailed: the computation failed, or a value is not a number.
        """
        try:
            # Decoding stops, too, if nobody wants it any more.
            cut = self.read(part, lambda: control.cancelled)
        except DecodeStopped:
            return None
        with cut:
            assert cut.runs == layout.runs  # the size decides, and a bitmap has it
            rows = array("f")
            for index, run in enumerate(cut.runs):
                if isinstance(run, RowRun):
                    run_rows = self._projector.encode(cut, index, control)
                    if run_rows is None:
                        return None
                    rows += run_rows
            return rows

    def decode(self, part: Media, stop: Stop = never) -> Bitmap:
        """The pixels or samples of *part*; raises as read()."""
        self._projector.check_support(is_sound=isinstance(part, Audio))
        if isinstance(part, Audio):
            samples = part.samples(self._projector.sample_rate or part.rate, stop)
            return Bitmap.sound(len(samples), samples)
        return Bitmap.image(part.width, part.height, part.pixels(stop))

    def _placeholder(self, part: Media) -> Bitmap:
        if isinstance(part, Audio):
            return Bitmap.sound(
                part.n_samples(self._projector.sample_rate or part.rate)
            )
        return Bitmap.image(part.width, part.height)

    def _keys(self, digest: bytes, cut: Cut) -> Iterator[bytes | None]:
        """
        A key for each run of rows; None for tokens, which are their own.

        All slices of an image have its digest, so the place among them counts.
        """
        for ordinal, run in enumerate(cut.runs):
            if isinstance(run, RowRun):
                # Equal slices at other places have other rows.
                facts = f" {ordinal} {run.n_cells} {run.n_pos}".encode()
                yield sha256(self._identity + digest + facts).digest()
            else:
                yield None


class Encoder:
    """
    The encodes of one engine.

    Args:
        report: called with the id of a request when all its rows are there, or one of its
            encodes has failed; with the lock, so it must not wait.

    Thread:
        Any, until close().
    """

    def __init__(
        self,
        encodes: Encodes[RequestEncodes],
        report: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.report = report
        self._encodes = encodes
        self._control: Cancellable | None = None  # of the encode that runs
        self._n_failed = self._n_cancelled = 0
        self._encode_s = 0.0
        self._closed = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="pyllama-encoder", daemon=True)
        self._thread.start()

    def enter(self, requests: Sequence[RequestEncodes]) -> None:
        """
        Encode the tasks of all *requests* or of none.

        Raises:
            QueueFull, InvalidRequest: there is too much of them.
        """
        with self._changed:
            try:
                for request in requests:
                    self._encodes.add(request, [task.need for task in request.tasks])
            except BaseException:
                for request in requests:
                    self.leave(request)
                raise
            self._changed.notify_all()

    def is_done(self, encodes: RequestEncodes) -> bool:
        """Whether all rows of a request are there; never, if one of them failed."""
        with self._changed:
            return self._encodes.is_done(encodes)

    def rows(self, task: Task) -> Rows:
        """Rows that encode() gave of *task*, whose request is open."""
        with self._changed:
            return self._encodes.rows(task.need.key)

    def leave(self, encodes: RequestEncodes) -> None:
        """Forget *encodes*, because their request has ended; can be repeated."""
        with self._changed:
            # The image that is being encoded was wanted by this request alone.
            if self._encodes.leave(encodes):
                self._cancel()

    def clear(self, salt: str | None) -> int:
        """Drop the rows of *salt*, None: all; returns the bytes freed at once."""
        with self._changed:
            return self._encodes.clear(salt)

    @property
    def stats(self) -> MediaStats:
        with self._changed:
            encodes = self._encodes
            return MediaStats(
                encodes=encodes.n_encoded,
                encodes_shared=encodes.n_shared,
                encodes_failed=self._n_failed,
                encodes_cancelled=self._n_cancelled,
                encode_s=self._encode_s,
                media_bytes=encodes.n_bytes,
                row_bytes=encodes.n_kept_bytes,
            )

    def close(self) -> None:
        """Cancel the encode that runs, and wait for it: one layer."""
        with self._changed:
            # The thread sees this once the layer that is computed is done.
            self._closed = True
            self._cancel()
            self._changed.notify_all()
        self._thread.join()

    def _cancel(self) -> None:
        if self._control is not None:
            self._control.cancel()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                # Whose turn it is: requests take turns, an image each.
                turn = self._encodes.begin()
                # Nothing is to be encoded.
                if turn is None:
                    self._changed.wait()
                else:
                    encodes, index = turn
                    self._encode(encodes.tasks[index])

    def _encode(self, task: Task) -> None:
        """With the lock, but while it is computed."""
        try:
            # While the encode runs, others may cancel it by this.
            self._control = control = task.control()
        except BaseException as caught:  # noqa: BLE001 - the reader is told
            self._fail(task, _fault(caught))
            return
        # The lock is given away for the encode alone.
        start = monotonic()
        rows: Rows | None = None
        error: PyllamaError | None = None
        # Requests come and leave while it is computed.
        self._changed.release()
        try:
            rows = task.encode(control)
        except PyllamaError as caught:
            error = _own(caught)
        except BaseException as caught:  # noqa: BLE001 - the reader is told
            error = _fault(caught)
        self._changed.acquire()
        self._control = None
        seconds = monotonic() - start
        self._encode_s += seconds
        # All that share the image have waited for it.
        for encodes in self._encodes.users(task.need.key):
            encodes.seconds += seconds
        if error is not None:
            self._fail(task, error)
        # The last one that wanted it has left.
        elif rows is None:
            self._n_cancelled += 1
            self._encodes.drop()
        else:
            # Requests that have all their rows now can start.
            for encodes in self._encodes.done(rows):
                self.report(encodes.request_id)

    def _fail(self, task: Task, error: PyllamaError) -> None:
        self._n_failed += 1
        for failed in self._encodes.fail():
            # Each request is told by the index of the image in its own prompt.
            keys = [failed_task.need.key for failed_task in failed.tasks]
            failed.error = _own(error, keys.index(task.need.key))
            self.report(failed.request_id)


def _own(error: PyllamaError, index: int | None = None) -> PyllamaError:
    """
    *error* for one of the requests that it fails: each raises an object of its own.

    It has no traceback and no cause, because their frames hold what was decoded.
    """
    return BadMedia(error.reason, index) if type(error) is BadMedia else copy(error)


def _fault(error: BaseException) -> EngineFault:
    return EngineFault(f"an encode failed, the engine goes on: {error!r}")


@dataclass(frozen=True, slots=True)
class MediaTask:
    """The encode of an image or a sound; see Task."""

    part: Media
    layout: MediaLayout
    need: RowNeed
    reader: MediaReader

    def control(self) -> EncodeCall:
        return EncodeCall()

    def encode(self, control: Cancellable) -> Rows | None:
        assert isinstance(control, EncodeCall)
        try:
            return self.reader.encode(self.part, self.layout, control)
        except BadMedia as error:
            kinds = (
                decoders.SOUND_KINDS
                if isinstance(self.part, Audio)
                else decoders.PICTURE_KINDS
            )
            upload = f"{self.part!r} of {len(self.part.content)} bytes: {error.reason}"
            raise BadMedia(f"{upload}; give a whole {kinds} file") from error


@dataclass(frozen=True, slots=True)
class MediaRows:
    """
    The payload of a span of a request.

    It is there when the request is opened. Its rows are there, and never change, once the
    scheduler has the request; they stay until the request is closed, because a sequence that
    is preempted is computed again. All are finite. The engine thread reads.
    """

    run: RowRun
    task: MediaTask
    start: int  # of its rows among those of the task, in floats
    n_floats: int
    encoder: Encoder

    @property
    def rows(self) -> memoryview:
        floats = memoryview(self.encoder.rows(self.task))
        return floats[self.start : self.start + self.n_floats]


class MediaPart(NamedTuple):
    """An image or a sound as it stands in a prompt."""

    tokens: array[int]  # numbers below 0 in place of rows
    spans: tuple[Span, ...]  # as if it were the beginning of the prompt
    payloads: tuple[MediaRows, ...]  # one a span


class MediaDesk:
    """
    Makes spans of images and sounds, and has them encoded.

    Thread:
        Any, until close().

    Raises:
        ModelLoadFailed, ProjectorLoadFailed, Unsupported: as Projector.load(), of the projector
            that *config* names.
    """

    def __init__(self, use: ModelUse, config: EngineConfig, keys: SpanKeys) -> None:
        media, path = config.media, config.media.mmproj
        assert path is not None
        files = model_files(Path(path))
        options: dict[str, Any] = {
            "n_threads": config.context.n_threads_batch or config.context.threads,
            "use_gpu": config.projector_on_device,
            "min_tokens": media.image_min_tokens,
            "max_tokens": media.image_max_tokens,
        }
        # Engines on one model, with equal options, share a projector.
        self.projector = _projectors.enter(
            (id(use.model), files or str(path), *options.values()),
            partial(Projector.load, path, use.model, **options),
        )
        try:
            # Rows are equal only if all that makes them is.
            limits = {"min": media.image_min_tokens, "max": media.image_max_tokens}
            identity = fingerprint(files, 0, limits, {}).encode()
            self._reader = MediaReader(self.projector, identity)
            encodes = Encodes[RequestEncodes](
                media.max_open_bytes, media.max_kept_bytes
            )
            self.encoder = Encoder(encodes)
        except BaseException:
            _close(self.projector)
            raise
        self._keys = keys
        self.limits = MediaLimits(
            max_parts=media.max_parts,
            max_bytes=media.max_upload_bytes,
            max_pixels=media.max_pixels,
            max_seconds=media.max_seconds,
        )

    def take_list(
        self, prompt: Sequence[object]
    ) -> tuple[list[PromptPiece], list[Media]]:
        """As list_pieces(), within the limits. Raises InvalidRequest, BadMedia."""
        pieces, media = list_pieces(prompt)
        self.limits.check(media)
        return pieces, media

    def take_chat(self, messages: Sequence[Mapping[str, Any]]) -> MediaMessages:
        """*messages* without their media. Raises InvalidRequest, BadMedia."""
        chat = MediaMessages(messages, self.limits)
        self.limits.check(chat.media)
        return chat

    def place(self, part: Media, index: int, namespace: Namespace = None) -> MediaPart:
        """
        *part* as it stands in a prompt, known from its size.

        Args:
            index: among the images and sounds of the prompt.
            namespace: of the requests that share its rows.

        Raises:
            BadMedia: the size cannot be handled; names *index*.
            Unsupported: the projector does not see, or does not hear.
        """
        try:
            layout = self._reader.layout(part)
        except BadMedia as error:
            raise BadMedia(error.reason, index) from error
        # Uploads and rows count against the limit of open requests.
        n_rows = sum(run.n_cells for run in layout.runs if isinstance(run, RowRun))
        n_bytes = len(part.content) + 4 * n_rows * self.projector.n_embd
        need = RowNeed(self._reader.key(part, namespace), n_bytes)
        task = MediaTask(part, layout, need, self._reader)
        tokens, spans, payloads, n_floats = array("i"), [], [], 0
        for run, key in zip(layout.runs, layout.keys, strict=True):
            start = len(tokens)
            # Tokens that the projector writes itself, as around an image.
            if not isinstance(run, RowRun):
                tokens += run.tokens
                continue
            assert key is not None
            # Rows: a number below 0 for each cell, equal where rows are.
            tokens += array("i", [self._keys.number(key)]) * run.n_cells
            spans.append(Span(start, len(tokens), run.n_pos, run.is_causal, key))
            n_own = run.n_cells * self.projector.n_embd
            payloads.append(MediaRows(run, task, n_floats, n_own, self.encoder))
            n_floats += n_own
        return MediaPart(tokens, tuple(spans), tuple(payloads))

    def enter(self, requests: Sequence[OpenRequest]) -> None:
        """
        Have the media of all requests *requests* encoded, or of none.

        Raises:
            QueueFull, InvalidRequest: there is too much of them.
        """
        # All requests first, because either all are encoded or none is.
        encodes = []
        for request in requests:
            payloads = cast(Sequence[MediaRows], request.request.payloads)
            # An image with several runs is one task.
            if tasks := list({id(rows.task): rows.task for rows in payloads}.values()):
                request.encodes = RequestEncodes(request.request.request_id, tasks)
                encodes.append(request.encodes)
        if encodes:
            self.encoder.enter(encodes)

    def close(self) -> None:
        """End the encodes; the last desk frees the projector."""
        try:
            self.encoder.close()
        finally:
            _close(self.projector)


_projectors = Shared[Projector]()  # engines share one for a model


def _close(projector: Projector) -> None:
    if _projectors.leave(projector):
        projector.close()
