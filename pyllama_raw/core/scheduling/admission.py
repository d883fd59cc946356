"""
How many requests an engine takes on: one for each slot, and those that may wait.

Rule: a request counts from the moment it is posted until it has ended, so what was
posted during a long step counts as what is in the queue. Only what has no slot to go to
counts as waiting.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Items

from pyllama_raw.core.request import Request
from pyllama_raw.errors import InvalidRequest, QueueFull

Place = tuple[int, int, int, int]  # priority, order of arrival, request_id, n_prompt


class Admission:
    """
    The requests of one engine that have not ended, each with or without a slot.

    Slots are given in the order of the scheduler: by priority, then by arrival. Not
    thread-safe: the mailbox, which shares it between threads, has the lock.
    """

    def __init__(
        self, n_slots: int, max_waiting: int = 1024, max_waiting_tokens: int = 2**20
    ) -> None:
        self.n_slots = n_slots
        self.max_waiting = max_waiting
        self.max_waiting_tokens = max_waiting_tokens
        self.n_tokens = 0  # of prompts that wait
        self._n_entered = 0
        self._seated: set[int] = set()  # request ids; at most n_slots
        self._waiting: dict[int, Place] = {}  # by request_id
        self._queue: list[Place] = []  # the same, best first

    @property
    def max_requests(self) -> int:
        """The most requests that an engine has at once."""
        return self.n_slots + self.max_waiting

    def enter(self, requests: Items[Request]) -> None:
        """
        Take on all *requests*, the outputs of one prompt, or none.

        Raises:
            QueueFull: too much waits at present.
            InvalidRequest: there are more outputs than an idle engine takes.
        """
        assert all(isinstance(request.priority, int) for request in requests)
        self._check_number(requests)
        n_seats = self.n_slots - len(self._seated)
        late = requests[n_seats:]
        self._check_room(late)
        for request in late:
            self._wait(request)
        self._seated.update(request.request_id for request in requests[:n_seats])

    def leave(self, request_id: int) -> None:
        """A request has ended; unknown ids are ignored."""
        if request_id in self._waiting:
            self._unqueue(self._waiting[request_id])
        elif request_id in self._seated:
            self._seated.remove(request_id)
            if self._queue:
                place = self._queue[0]
                self._unqueue(place)
                self._seated.add(place[2])

    def _check_number(self, requests: Items[Request]) -> None:
        n_prompt = requests[0].n_prompt
        n_fitting = self.max_waiting_tokens // n_prompt
        n_most = self.n_slots + min(self.max_waiting, n_fitting)
        if len(requests) > n_most:
            raise InvalidRequest(
                "n",
                len(requests),
                f"at most {n_most} outputs of a prompt of {n_prompt} tokens, or raise "
                "max_waiting or max_waiting_tokens",
            )

    def _check_room(self, late: Items[Request]) -> None:
        if not late:
            return
        n_waiting = len(self._queue) + len(late)
        if n_waiting > self.max_waiting:
            raise QueueFull("max_waiting", n_waiting, self.max_waiting)
        n_tokens = self.n_tokens + sum(request.n_prompt for request in late)
        if n_tokens > self.max_waiting_tokens:
            raise QueueFull("max_waiting_tokens", n_tokens, self.max_waiting_tokens)

    def _wait(self, request: Request) -> None:
        place = (
            request.priority,
            self._n_entered,
            request.request_id,
            request.n_prompt,
        )
        self._n_entered += 1
        self._waiting[request.request_id] = place
        insort(self._queue, place)
        self.n_tokens += request.n_prompt

    def _unqueue(self, place: Place) -> None:
        del self._waiting[place[2]]
        self._queue.remove(place)
        self.n_tokens -= place[3]

    def check_integrity(self) -> None:
        """Nobody waits beside a free slot, and the tokens add up."""
        assert self._queue == sorted(self._waiting.values())
        assert not self._seated & self._waiting.keys()
        assert len(self._seated) <= self.n_slots
        assert len(self._seated) == self.n_slots or not self._queue
        assert self.n_tokens == sum(place[3] for place in self._queue)
        assert len(self._queue) <= self.max_waiting
        assert self.n_tokens <= self.max_waiting_tokens
