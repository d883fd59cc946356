"""
Admission of requests by an engine: one for each slot, and those that may wait.

Rules:
1. A request is open from the moment it is posted until it has ended, so what was posted
   during a long step counts as what is in the queue.
2. A request that finds a slot free when it comes is never refused. The prompt of any
   other one counts in tokens until the request has had a slot. Which one gets the next
   slot is the policy's business, and nothing to these counts.
3. Texts that become vectors need no slot. They count as a request, and not in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from pyllama_raw.core.request import Request
from pyllama_raw.errors import InvalidRequest, QueueFull


@dataclass(slots=True, eq=False)
class Ticket:
    """The tokens that an open request counts for."""

    n_tokens: int = 0  # of a prompt that waits; 0: it found a slot, or has had one
    is_open: bool = True


class Admission:
    """
    The counts of the requests of one engine that have not ended.

    Not thread-safe: the door, which shares it between threads, has the lock.
    """

    def __init__(
        self, n_slots: int, max_waiting: int = 1024, max_waiting_tokens: int = 2**20
    ) -> None:
        self.n_slots = n_slots
        self.max_waiting = max_waiting
        self.max_waiting_tokens = max_waiting_tokens
        self.n_open = 0
        self.n_tokens = 0  # of prompts that wait

    @property
    def max_requests(self) -> int:
        """The most requests that an engine has at once."""
        return self.n_slots + self.max_waiting

    def enter(self, requests: Items[Request]) -> list[Ticket]:
        """
        Take on all *requests*, the outputs of one prompt, or none.

        Returns:
            A ticket for each.

        Raises:
            QueueFull: too much waits at present.
            InvalidRequest: there are more outputs than an idle engine takes.
        """
        self._check_number(requests)
        # The first ones find slots free, so nothing of them counts in tokens.
        n_free = max(self.n_slots - self.n_open, 0)
        counts = [0] * len(requests)
        # The others wait. Texts that become vectors wait for no slot.
        counts[n_free:] = [
            0 if request.lot.makes_vectors else request.n_prompt
            for request in requests[n_free:]
        ]
        if len(requests) > n_free:
            self._check_room(len(requests), sum(counts))
        self.n_open += len(requests)
        self.n_tokens += sum(counts)
        return [Ticket(n_tokens) for n_tokens in counts]

    def seat(self, ticket: Ticket) -> None:
        """The request has got a slot; can be repeated."""
        self.n_tokens -= ticket.n_tokens
        ticket.n_tokens = 0

    def leave(self, ticket: Ticket) -> None:
        """The request has ended; can be repeated."""
        self.seat(ticket)
        self.n_open -= ticket.is_open
        ticket.is_open = False

    def _check_number(self, requests: Items[Request]) -> None:
        # All are outputs of one prompt, so the first one tells how many could ever wait.
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

    def _check_room(self, n_requests: int, n_tokens: int) -> None:
        n_waiting = self.n_open + n_requests - self.n_slots
        if n_waiting > self.max_waiting:
            raise QueueFull("max_waiting", n_waiting, self.max_waiting)
        n_tokens += self.n_tokens
        if n_tokens > self.max_waiting_tokens:
            raise QueueFull("max_waiting_tokens", n_tokens, self.max_waiting_tokens)
