"""
The model's own chat template, rendered as its author tested it.

A template is the program of a stranger: it runs in a process of its own, bounded in time and
memory (`pyllama_raw/prompts/rendering`). It can refuse messages: that is an InvalidRequest.

The tokenizer finds the spelling of a special token wherever it stands in a text. In a
chat only the template may write one: where a message has a hand in it, the text is cut
there, so that the tokenizer never sees the spelling as a whole (`Markers`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import lru_cache
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple, Self

from pyllama_raw.errors import ClosedError, InvalidRequest, Unsupported
from pyllama_raw.prompts.messages import (
    REASONING,
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

Span = tuple[int, int]

_MARKER_FORM = re.compile("<[|\uff5c].*[|\uff5c]>", re.DOTALL)
# Characters by which spellings are looked for: a file may have 200,000 of them.
N_FIRST = 4
PIECE = 2**14  # characters: libllama takes quadratic time for many markers in a text


class Markers:
    """
    The spellings that only a template may write.

    Control tokens always are. Of the tokens that are "user defined" those are that look
    like markers or that the template itself writes; others are runs of spaces, words,
    and tags of HTML, which people may write.

    Args:
        special: spellings of special tokens, and whether they are control tokens.
        template: the source of the chat template.
    """

    def __init__(self, special: Mapping[str, bool], template: str | None) -> None:
        self._certain = {
            text
            for text, is_control in special.items()
            if is_control or (_is_tag(text) and _is_marker(text, template or ""))
        }
        # Other tags are markers if the template puts them together.
        self._spellings = self._certain.union(filter(_is_tag, special))
        self._lengths = sorted({len(text) for text in self._spellings}, reverse=True)
        firsts = {text[:N_FIRST] for text in self._spellings}
        self._starts = re.compile(f"(?={_any_of(firsts)})")

    def parts(self, text: str, origins: str) -> Iterator[tuple[str, bool]]:
        """
        *text* in pieces, and whether a piece may be searched for special tokens.

        What may be found in a piece is then written by the template. Long texts are
        also cut in front of its markers, where the tokenizer cuts them anyway.

        Args:
            origins: of each character: m a message, t the template, d in doubt.

        Raises:
            InvalidRequest: the writer of a marker is in doubt.
        """
        spans = list(self._occurrences(text))
        # No marker: the tokenizer may search all of it, and finds nothing.
        if not spans:
            yield from [(text, True)] if text else ()
            return
        forged = self._forged(spans, text, origins)
        # A marker that a message has a hand in is cut in two. One of a single character cannot
        # be cut, so it is a piece that is not searched.
        alone = {start for start, stop in forged if stop - start == 1}
        cuts = {*_cuts(forged, origins), *_seams(spans, origins)}
        bounds = [0, *sorted(cuts), len(text)]
        for start, stop in pairwise(bounds):
            if start < stop:
                yield text[start:stop], start not in alone

    def _forged(self, spans: list[Span], text: str, origins: str) -> list[Span]:
        """The ones of *spans* in which a message wrote a part of a marker; by their ends."""
        certain = self._certain.union(
            text[start:stop] for start, stop in spans if _is_own(origins[start:stop])
        )
        forged = []
        for start, stop in spans:
            writers = origins[start:stop]
            # Written by the template, or no marker at all: both are left as they are.
            if _is_own(writers) or text[start:stop] not in certain:
                continue
            # Nobody knows the writer, so it may be a message.
            if "m" not in writers:
                raise InvalidRequest(
                    "messages",
                    text[start:stop],
                    "messages with which the chat template writes control tokens by "
                    "operations whose origin can be followed, or a text prompt",
                )
            forged.append((start, stop))
        return sorted(forged, key=lambda span: span[1])

    def _occurrences(self, text: str) -> Iterator[Span]:
        """All places of all spellings, which may lie in each other."""
        longest = max(self._lengths, default=0)
        # Window by window, because no other thread runs while a pattern is searched.
        for begin in range(0, len(text), PIECE):
            window = text[begin : begin + PIECE + longest]
            for match in self._starts.finditer(window):
                start = begin + match.start()
                if match.start() >= PIECE:  # the next window has it
                    break
                for stop in (start + length for length in self._lengths):
                    if stop <= len(text) and text[start:stop] in self._spellings:
                        yield start, stop


def _any_of(texts: Iterable[str]) -> str:
    """A pattern that matches where one of *texts* begins, letter by letter."""
    following: dict[str, list[str]] = {}
    for text in texts:
        if not text:
            return ""
        following.setdefault(text[0], []).append(text[1:])
    ways = (re.escape(first) + _any_of(endings) for first, endings in following.items())
    return f"(?:{'|'.join(ways)})" if following else "(?!)"


def _cuts(forged: Iterable[Span], origins: str) -> list[int]:
    """
    Places at which all *forged* spans are cut in two, beside a message's character.

    No marker of the template is cut: it has no character of a message. Spans of one
    character are cut out.
    """
    cuts: set[int] = set()
    latest = 0
    for start, stop in forged:
        if stop - start == 1:
            cuts |= {start, stop}
        elif latest <= start:
            at = origins.rindex("m", start, stop)
            latest = at + 1 if at + 1 < stop else at
            cuts.add(latest)
    return sorted(cuts)


def _seams(spans: list[Span], origins: str) -> Iterator[int]:
    """
    Starts of markers that the template wrote, PIECE characters or more apart.

    Not of those that lie in others: which of them the tokenizer takes is its business.
    """
    reached = latest = 0
    for (start, stop), (following, _) in pairwise([*spans, (len(origins), 0)]):
        is_apart = reached <= start and stop <= following
        if is_apart and start - latest >= PIECE and _is_own(origins[start:stop]):
            latest = start
            yield start
        reached = max(reached, stop)


def _is_own(origins: str) -> bool:
    return set(origins) == {"t"}


def _is_tag(text: str) -> bool:
    """Whether *text* has letters or digits and something else, as "[INST]" has."""
    return any(map(str.isalnum, text)) and not text.strip().isalnum()


def _is_marker(text: str, template: str) -> bool:
    return text.strip() in template or _MARKER_FORM.fullmatch(text) is not None


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
    """
    The text that the answer goes on with, or None.

    An answer that begins with nothing has not begun: its message is taken off.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return None
    texts = content = last.get("content")
    if isinstance(content, list):  # of parts: they are printed one after the other
        texts = [p.get("text", p) if isinstance(p, dict) else p for p in content]
        content = texts[-1] if texts else None
    if isinstance(content, str) and content.strip():
        return content
    is_blank = not texts or not "".join(map(str, filter(None, texts))).strip()
    if is_blank and len(messages) > 1 and not any(map(last.get, REASONING)):
        messages.pop()
    return None


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
