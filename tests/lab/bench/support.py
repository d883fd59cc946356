"""A target that answers at once, and a writer without a model."""

from collections.abc import Sequence

import anyio

from pyllama_raw.lab.calls import Call, CallFailed, Record, Run
from pyllama_raw.lab.workloads import WORDS, Writer


class FakeTarget:
    """Gives so many tokens one by one, and keeps what it was asked."""

    def __init__(
        self, fails_at: Sequence[int] = (), *, names_tokens: bool = True
    ) -> None:
        self.prompts: list[object] = []
        self.running = self.most_running = 0
        self._fails_at, self._names_tokens = fails_at, names_tokens

    async def send(self, record: Record) -> None:
        index = len(self.prompts)
        self.prompts.append(record.prompt)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            for token in range(record.call.max_tokens):
                await anyio.lowlevel.checkpoint()
                if index in self._fails_at:
                    raise CallFailed("no more")
                record.take(1, f"<{token}>", [token] if self._names_tokens else [])
        finally:
            self.running -= 1


def make_writer(**options: bool) -> Writer:
    """Each word is a token."""
    ids = {word: index for index, word in enumerate(WORDS)}
    pieces = [f" {word}".encode() for word in WORDS]
    return Writer(lambda line: [ids[word] for word in line.split()], pieces, **options)


def make_record(
    times: Sequence[float] = (1.0, 2.0, 4.0),
    *,
    sent: float = 0.0,
    error: str | None = None,
    kind: str = "",
    n_cached: int | None = None,
    queue_s: float | None = None,
) -> Record:
    """A record of one token at each of *times*, for a prompt of 3 ids."""
    call = Call([1, 2, 3], len(times), kind=kind)
    record = Record(call, call.prompt, sent, list(times), [1] * len(times))
    record.n_output = len(times)
    record.n_cached, record.queue_s, record.error = n_cached, queue_s, error
    return record


def make_run(*records: Record, wall_s: float = 10.0) -> Run:
    return Run(list(records), wall_s)
