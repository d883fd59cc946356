"""
The model's own chat template, rendered as its author tested it.

Templates are written against the Jinja settings of the Transformers library; these are
the same, in Jinja's sandbox. A template can refuse messages: that is an InvalidRequest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyllama_raw.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from jinja2 import Template, nodes
    from jinja2.parser import Parser

Message = Mapping[str, Any]


class ChatTemplate:
    """One template, compiled once; rendering is safe from any thread."""

    def __init__(self, source: str | None, *, bos_token: str, eos_token: str) -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._source = source

    def render(self, messages: Sequence[Message]) -> str:
        """
        The prompt that asks for the next assistant message.

        Raises:
            Unsupported: the model has no template, or one that Jinja cannot read.
            InvalidRequest: the template does not take these messages.
        """
        template = self._template
        try:
            return template.render(
                messages=messages,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._tokens,
            )
        except Exception as error:  # templates are programs of strangers
            raise InvalidRequest(
                "messages", _shown(messages), f"what the chat template takes ({error})"
            ) from error

    @property
    def is_compiled(self) -> bool:
        """Whether render() need not import Jinja and compile first, for some 50 ms."""
        return "_template" in self.__dict__

    @cached_property
    def _template(self) -> Template:
        from jinja2 import TemplateError

        if self._source is None:
            raise Unsupported("the model has no chat template: give a text prompt")
        try:
            template: Template = _environment().from_string(self._source)
        except TemplateError as error:
            raise Unsupported(
                f"the model's chat template cannot be read: {error}"
            ) from error
        return template


def _environment() -> Any:
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}`: marks assistant text for training; prints its body."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML and sorts keys."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _shown(messages: Sequence[Message]) -> str:
    text = repr(list(messages))
    return text if len(text) <= 200 else f"{text[:200]}..."
