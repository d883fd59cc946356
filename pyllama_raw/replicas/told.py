"""Part of an answer that a client has: whether another replica may begin the answer again."""

from __future__ import annotations

from starlette.types import Message

COMMENT = b":"  # what a frame begins with that keeps a stream open


class Told:
    """The messages so far."""

    has_begun = has_token = False

    def goes_on_with(self, message: Message) -> bool:
        """Whether *message* is sent: a second replica begins the answer again."""
        is_second = self.has_begun and message["type"] == "http.response.start"
        self.has_begun = True
        frames = message.get("body", b"").split(b"\n\n")
        self.has_token |= any(f and not f.startswith(COMMENT) for f in frames)
        return not is_second
