"""The messages of a chat, and the commands that change them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pyllama_raw import Message
from pyllama_raw.media import Audio, Image

HELP = """\
/system TEXT  tell the model how to behave from here on; without TEXT: tell it nothing
/reset        forget what was said
/help         show this
/quit         end, as does the end of the input
Ctrl-C stops an answer; at the prompt, twice, it ends. A space before / makes it text."""


@dataclass(slots=True)
class Conversation:
    """A system message, and the turns of user and assistant after it."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def with_message(
        self, text: str, media: Sequence[Image | Audio] = ()
    ) -> list[Message]:
        """The messages to answer if the user now shows *media* and says *text*."""
        content: object = text
        if media:
            content = [*map(_part, media), {"type": "text", "text": text}]
        return [*self._system(), *self.turns, {"role": "user", "content": content}]

    def take(self, text: str, answer: str) -> None:
        """Keep a turn; one without an answer is forgotten, so that roles alternate."""
        if answer:
            self.turns.append({"role": "user", "content": text})
            self.turns.append({"role": "assistant", "content": answer})

    def command(self, line: str) -> str:
        """Do what *line* says; return what to tell the person."""
        name, _, text = line.partition(" ")
        text = text.strip()
        if name == "/system":
            self.system = text or None
            return "system message set" if text else "no system message"
        if name == "/reset" and not text:
            self.turns.clear()
            return "forgotten"
        return HELP if line == "/help" else f"{name} is no command: /help lists them"

    def _system(self) -> list[Message]:
        if self.system is None:
            return []
        return [{"role": "system", "content": self.system}]


def _part(medium: Image | Audio) -> Message:
    kind = "image" if isinstance(medium, Image) else "audio"
    return {"type": kind, kind: medium}
