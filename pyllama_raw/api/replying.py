"""
The way in which replies to chats are taken apart: by a specification and a request's options.

The specification of a chat template is found once, because its delimiters are compared with
the special tokens of the model.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from logging import getLogger
from typing import TYPE_CHECKING, Any, NamedTuple

from pyllama_raw.api.reply import ReplyForm
from pyllama_raw.errors import InvalidRequest, Unsupported, reading
from pyllama_raw.options.requests import ChatOptions
from pyllama_raw.prompts.chat import ChatSettings
from pyllama_raw.prompts.messages import is_sequence, plain_value
from pyllama_raw.prompts.prompt import Prompt, PromptEncoder
from pyllama_raw.prompts.rendering.asking import reply_spec
from pyllama_raw.prompts.rendering.processes import Unreadable

if TYPE_CHECKING:  # most requests read no reply
    from pyllama_raw.engine.parts import EngineParts
    from pyllama_raw.replies.spec import ReplySpec

MAX_SPECS = 16  # that are kept
MAX_TAIL = 1024  # tokens at the end of a prompt that may begin a reply
WORDS = ("auto", "none", "required")  # of tool_choice
OPTIONS = ("tool_choice", "parallel_tool_calls", "reply")

_log = getLogger(__name__)


class BoundSpec(NamedTuple):
    """A specification for one vocabulary."""

    spec: ReplySpec
    marks: Mapping[int, bytes]  # its special tokens, and their names


class ReplyPlan(NamedTuple):
    """Wishes of a request for its reply."""

    bound: BoundSpec
    tools: list[Any]  # those that have a name; others are the template's business
    choice: str
    is_parallel: bool
    is_parsed: bool
    prefix: str  # the end of the prompt, where the reply may have begun
    may_think: bool = True  # by its own choice

    def form(self, *, is_formed: bool, keeps_space: bool) -> ReplyForm | None:
        """The form of each output; None: it is plain text. See ReplyParser for the arguments."""
        if not self.is_parsed:
            return None
        from pyllama_raw.replies.parser import ReplyParser

        make = partial(
            ReplyParser,
            self.bound.spec,
            tools=self.tools,
            prefix=self.prefix,
            calls=self.choice != "none" and not (is_formed and not self.tools),
            is_formed=is_formed,
            keeps_space=keeps_space,
        )
        return ReplyForm(make, self.bound.marks, self.bound.spec.delimiters)


class Replies:
    """Plans the replies of one engine; any thread may call."""

    def __init__(self, parts: EngineParts, encoder: PromptEncoder) -> None:
        self._bound = lru_cache(MAX_SPECS)(partial(_bound, parts, encoder))
        self._template, self._encoder = parts.chat_template, encoder

    def plan(
        self,
        options: ChatOptions,
        tokens: array[int],
        controls: Mapping[int, bytes],
        *,
        is_constrained: bool = False,
    ) -> ReplyPlan:
        """
        Plan the reply by the *options* of a chat that was rendered; may take seconds.

        Args:
            tokens: the prompt.
            controls: names of the control tokens.
            is_constrained: the answer has a form, which thoughts may come before.

        Raises:
            InvalidRequest: they do not fit each other.
            Unsupported: nothing can be found out about the template.
            ClosedError: the engine is closed.
        """
        from pyllama_raw.replies.spec import ReplySpec

        tools = plain_value("tools", options.get("tools")) or []
        choice = _checked_choice(options.get("tool_choice") or "auto", tools)
        reply = options.get("reply")
        is_parallel = options.get("parallel_tool_calls", True)
        is_parsed = reply is not False
        if reply is None:
            is_parsed = bool(tools) or is_constrained
        variables = options.get("template_kwargs") or {}
        source: ReplySpec | str | None = None
        if is_parsed or not is_parallel or choice not in ("auto", "none"):
            template = options.get("chat_template") or self._template
            source = reply if isinstance(reply, ReplySpec) else template
        is_asked = reply is not None or bool(tools)
        try:
            bound = self._bound(source or ReplySpec())
        except Unsupported as error:
            if is_asked:
                raise
            _log.warning("a constraint holds from the first token on: %s", error)
            bound = self._bound(ReplySpec())
        if not is_asked and not (bound.spec.reasoning or bound.spec.messages):
            is_parsed = False  # all of it is the answer
        return ReplyPlan(
            bound=bound,
            tools=[tool for tool in tools if isinstance(_name_of(tool), str)],
            choice=choice,
            is_parallel=is_parallel,
            is_parsed=is_parsed,
            prefix=self._encoder.detokenize(tail_of(tokens, controls), special=True),
            may_think=variables.get("enable_thinking") is not False,
        )


def is_planned(
    prompt: Prompt, options: ChatOptions, *, is_constrained: bool = False
) -> bool:
    """
    Whether *options* ask something of the reply to *prompt*, or a constraint does.

    Raises:
        InvalidRequest: they do, and it is no chat.
    """
    given = [name for name in OPTIONS if options.get(name) is not None]
    if options.get("reply") is False:  # as of any other prompt
        given.remove("reply")
    is_chat = is_sequence(prompt) and len(prompt) and isinstance(prompt[0], Mapping)
    if not is_chat:
        for name in given:
            value = options.get(name)
            raise InvalidRequest(name, value, "it with chat messages only")
    if is_chat and is_constrained and options.get("reply") is not False:
        return True
    tools = options.get("tools")
    with reading("tools", tools, "a list of mappings, or None"):
        return bool(given) or bool(tools)


def settings_of(options: ChatOptions | None) -> ChatSettings:
    """Settings of the template; a model that must call no tool is told of none."""
    settings = ChatSettings.of(options)
    if options and options.get("tool_choice") == "none":
        return settings._replace(tools=None)
    return settings


def tail_of(tokens: array[int], controls: Mapping[int, bytes]) -> array[int]:
    """
    The end of a prompt from its last control token on; nothing if it has none near its end.

    No message can write one, so a message is a part of it only if the reply goes on with it.
    The first token only begins the prompt.
    """
    for at in range(len(tokens) - 1, max(len(tokens) - MAX_TAIL, 0), -1):
        if tokens[at] in controls:
            return tokens[at:]
        if tokens[at] < 0:  # a row of an image or a sound
            break
    return array("i")


def _checked_choice(choice: str, tools: Sequence[Any]) -> str:
    names = [_name_of(tool) for tool in tools]
    if choice in ("auto", "none") or (tools and choice == "required"):
        return choice
    if not tools:
        allowed = "auto or none, because there are no tools"
        raise InvalidRequest("tool_choice", choice, allowed)
    if choice not in names:
        allowed = f"{', '.join(WORDS)} or the name of one of tools"
        raise InvalidRequest("tool_choice", choice, allowed)
    return choice


def _name_of(tool: Any) -> object:
    """The name of a tool, which is a function or holds one."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _bound(
    parts: EngineParts, encoder: PromptEncoder, source: ReplySpec | str
) -> BoundSpec:
    """
    Find the specification of replies, for this vocabulary.

    Args:
        source: a specification, or the template that it is found by.
    """
    if isinstance(source, str):
        spec = _spec_of(source, parts.template_process)
    else:
        spec = source
    vocab = parts.vocab
    ids: dict[str, int] = {}

    def is_special(text: str) -> bool:
        if text in vocab.special_texts and text not in ids:
            tokens = vocab.tokenize(text, add_special=False, parse_special=True)
            if len(tokens) == 1:
                ids[text] = tokens[0]
        return text in ids

    bound = encoder.run(partial(spec.bound, is_special))
    return BoundSpec(bound, {ids[name]: name.encode() for name in bound.special})


def _spec_of(template: str, is_apart: bool) -> ReplySpec:
    """The specification of *template*; an empty one if a reply is only content."""
    from pyllama_raw.replies.spec import ReplySpec

    try:
        return reply_spec(template, is_apart) or ReplySpec()
    except (Unreadable, OSError) as error:
        reason = f"the chat template cannot be looked at: {error}"
        raise Unsupported("a reply that is taken apart", reason) from error
