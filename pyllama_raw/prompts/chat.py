"""
The model's own chat template, rendered as its author tested it.

A template is the program of a stranger: it runs in a process of its own, bounded in time and
memory (`pyllama_raw/prompts/rendering`). It can refuse messages: that is an InvalidRequest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple, Self

from pyllama_raw.errors import ClosedError, InvalidRequest, Unsupported
from pyllama_raw.prompts.messages import (
    Message,
    check_roles,
    plain_messages,
    plain_value,
)
from pyllama_raw.prompts.rendering.processes import (
    Exceeded,
    TemplateHere,
    TemplateProcesses,
    TemplateRefused,
    Unreadable,
)

RESERVED = {"bos_token", "eos_token", "messages", "tools"}
TemplateRunner = TemplateProcesses | TemplateHere
NO_TEMPLATE = (
    "chat messages",
    "the model has no chat template",
    "give a text prompt, or a template by chat_template= or ModelConfig.chat_template, such "
    "as 'chatml'",
)
NO_TOOLS = (
    "tools",
    "the chat template prints none, so the model would not know of them",
    "describe them in a message, or give one that prints tools, such as 'hermes', by "
    "chat_template= or ModelConfig.chat_template",
)


class Rendered(NamedTuple):
    """The text of a prompt and where each of its characters came from."""

    text: str
    origins: str  # m: a message, t: the template, d: in doubt


class ChatSettings(NamedTuple):
    """Settings of a chat beside its messages; None: not given."""

    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] | None = None
    chat_template: str | None = None  # its text

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Self:
        """Settings of a chat among the *options* of a request."""
        fields = options or {}
        settings = {name: fields[name] for name in cls._fields if name in fields}
        # A model that must call no tool is told of none.
        if fields.get("tool_choice") == "none":
            settings["tools"] = None
        return cls(**settings)


NOTHING = ChatSettings()


class ChatTemplates:
    """
    The model's own template, and those that callers give; any thread may call.

    The own one is compiled by the first chat. One that a caller gives has its process for a
    single chat.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str,
        eos_token: str,
        is_apart: bool = True,
    ) -> None:
        """
        Args:
            is_apart: whether templates run in processes of their own.
        """
        self._source, self._is_apart = source, is_apart
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._lock = Lock()
        self._open: set[TemplateRunner] = set()
        self._closed = False
        self._n_mended = 0  # chats that closed ones took only changed
        self._own = None if source is None else self._started(source)

    @property
    def n_mended(self) -> int:
        """Chats that templates took only changed."""
        with self._lock:
            return self._n_mended + sum(runner.n_mended for runner in self._open)

    def render(
        self, messages: Sequence[Message], settings: ChatSettings = NOTHING
    ) -> Rendered:
        """
        The prompt that asks for the next assistant message; may take seconds.

        If the last message is the assistant's and has text, it asks for the rest of it. The
        variable add_generation_prompt, if it is given, tells whether it asks at all.

        Raises:
            Unsupported: the model has no template, or one that Jinja cannot read, or
                there are tools and the template prints none.
            InvalidRequest: the template does not take these messages, or takes too
                much time or memory for them; a role is unknown; the template that was
                given cannot be used.
            ClosedError: close() was called, perhaps meanwhile.
        """
        if settings.chat_template is None:
            return self._rendered(self._own, self._source, messages, settings)
        source = settings.chat_template
        runner = self._started(source)
        try:
            return self._rendered(runner, source, messages, settings)
        except Unsupported as error:
            allowed = f"a template that can be used ({error.reason})"
            raise InvalidRequest("chat_template", source, allowed) from error
        finally:
            runner.close()
            with self._lock:
                self._open.discard(runner)
                self._n_mended += runner.n_mended

    def close(self) -> None:
        """End what is being rendered; later calls raise ClosedError."""
        with self._lock:
            self._closed = True
            for runner in self._open:
                runner.close()

    def _started(self, source: str) -> TemplateRunner:
        with self._lock:
            if self._closed:
                raise ClosedError("the engine is closed")
            make = TemplateProcesses if self._is_apart else TemplateHere
            runner = make(source, self._tokens)
            self._open.add(runner)
        return runner

    def _rendered(
        self,
        runner: TemplateRunner | None,
        source: str | None,
        messages: Sequence[Message],
        settings: ChatSettings,
    ) -> Rendered:
        # Checked copies: nobody changes them, and the other process can have them.
        plain = plain_messages(messages)
        kwargs = plain_value("template_kwargs", settings.template_kwargs or {})
        for name in kwargs:
            if name in RESERVED or not name.isidentifier():
                allowed = f"names of variables, none of {', '.join(sorted(RESERVED))}"
                raise InvalidRequest("template_kwargs", name, allowed)
        tools = plain_value("tools", settings.tools)
        if source is None or runner is None:
            raise Unsupported(*NO_TEMPLATE)
        check_roles(plain, source)
        start = _begun(plain)
        try:
            # A template that prints no tools, or nothing of any message, would answer
            # something else in silence.
            if tools and not prints_tools(source, self._is_apart):
                raise Unsupported(*NO_TOOLS)
            asks = kwargs.pop("add_generation_prompt", start is None)
            chat = {"tools": tools, "kwargs": kwargs, "asks": bool(asks)}
            rendered = Rendered(*runner.render(plain, chat))
            if plain and not runner.reads_messages:
                raise Unsupported("chat messages", BLIND, SEEING)
        except TemplateRefused as error:
            allowed = f"what the chat template takes ({error})"
            # Most templates that refuse do so for a system message that is not the first.
            at = next((i for i, m in enumerate(plain) if i and _is_system(m)), None)
            if at is not None:
                role = plain[at]["role"]
                raise InvalidRequest(f"messages[{at}].role", role, allowed) from error
            raise InvalidRequest("messages", plain, allowed) from error
        except Exceeded as error:
            # Too much time, memory or text for these messages.
            allowed = f"messages with which the chat template is {error}"
            raise InvalidRequest("messages", plain, allowed) from error
        except Unreadable as error:
            # No fault of these messages: Jinja cannot compile the template.
            reason = f"the model's chat template cannot be read: {error}"
            raise Unsupported("chat messages", reason) from error
        except OSError as error:
            reason = f"their template needs a process, which cannot start: {error}"
            advice = "or give ModelConfig(template_process=False), if you trust it"
            raise Unsupported("chat messages", reason, advice) from error
        return rendered if start is None else _cut_after(rendered, start)


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")


def _begun(messages: list[Any]) -> str | None:
    """The text that the answer goes on with, or None."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return None
    content = last.get("content")
    if isinstance(content, list):  # of parts: they are printed one after the other
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = texts[-1] if texts else None
    return content if isinstance(content, str) and content.strip() else None


def _cut_after(rendered: Rendered, start: str) -> Rendered:
    """*rendered* up to where it has *start* last, which a template may have stripped."""
    text, origins = rendered
    for spelling in (start, start.rstrip(), start.strip()):
        at = text.rfind(spelling)
        while at >= 0:
            end = at + len(spelling)
            if "t" not in origins[at:end]:  # the template's words may be the same
                return Rendered(text[:end], origins[:end])
            at = text.rfind(spelling, 0, end - 1)
    raise InvalidRequest(
        "messages",
        start,
        "a last assistant message that the chat template prints as it is, or one of "
        "another role",
    )


# -- questions to a template, for all engines --------------------------------------------

MAX_KNOWN = 64  # templates
BLIND = (
    "the chat template prints nothing of what the messages say, so all chats would have the "
    "same prompt"
)
SEEING = (  # what to do about it
    "print the `content` of each of `messages` in it, or give another template, such as "
    "'chatml', by chat_template= or ModelConfig.chat_template"
)
NO_TOKENS = {"bos_token": "", "eos_token": ""}


@lru_cache(MAX_KNOWN)
def prints_tools(source: str, is_apart: bool = True) -> bool:
    """
    Whether the template *source* prints tools; also where it does not let itself be asked.

    The first call takes a tenth of a second, and 1 s at most.

    Args:
        is_apart: whether it runs in a process of its own.

    Raises:
        Unreadable: the template cannot be compiled.
        OSError: no process can be started.
    """
    make = TemplateProcesses if is_apart else TemplateHere
    with closing(make(source, NO_TOKENS)) as runner:
        try:
            return runner.takes_tools()
        except Exceeded:
            return True


def are_printed(template: str | None, is_apart: bool = True) -> bool:
    """Whether tools are printed by *template*, which may be none, or not to be used."""
    try:
        return template is not None and prints_tools(template, is_apart)
    except (Unreadable, OSError):
        return False


@lru_cache(MAX_KNOWN)
def check_reads(source: str, is_apart: bool = True) -> None:
    """
    Check that the template *source* prints what a user says; takes a tenth of a second.

    Raises:
        Unreadable: it does not, or it cannot be compiled.
        OSError: no process can be started.
    """
    make = TemplateProcesses if is_apart else TemplateHere
    with closing(make(source, NO_TOKENS)) as runner:
        with suppress(Exceeded):
            runner.takes_tools()
        if not runner.reads_messages:
            raise Unreadable(f"{BLIND}: {SEEING}")
