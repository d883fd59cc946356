"""
The Jinja that templates are written for, printing Text that knows its origin.

The settings are those of the Transformers library, in Jinja's sandbox. As llama-server does, it
lets a template change its own lists, and print what it filters as JSON: nothing of it outlives a
chat. Constants of a template become Text when it is compiled. Operations that put text together
keep the origins: here where Jinja would lose them, otherwise in Text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from itertools import count
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment, SandboxedFormatter

from pyllama_raw.prompts.rendering import text
from pyllama_raw.prompts.rendering.text import (
    Text,
    concat,
    derived,
    from_message,
    from_template,
    is_all_template,
    of,
)


class GenerationTag(Extension):
    """`{% generation %}`: marks assistant text for training; prints its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TextCodeGenerator(CodeGenerator):
    """Refers to constants as Text."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.value, str):
            self.write(self._constant(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(  # noqa: N802
        self,
        node: nodes.TemplateData,
        frame: Frame,  # noqa: ARG002 - Jinja's signature
    ) -> None:
        self.write(self._constant(node.data))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat_values((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._constant("".join(group))

    def _constant(self, value: str) -> str:
        assert isinstance(self.environment, TextEnvironment)
        self.environment.constants.append(text.from_template(value))
        return f"environment.constants[{len(self.environment.constants) - 1}]"


class TextEnvironment(SandboxedEnvironment):
    """Runs one template."""

    code_generator_class = TextCodeGenerator
    concat = staticmethod(text.concat)
    intercepted_binops = frozenset({"%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=printed,
            optimized=False,  # a constant that is put together is no Text
        )
        self.constants: list[Text] = []
        self.filters = {name: _followed(run) for name, run in self.filters.items()}
        self.filters |= {
            "format": _format,
            "join": self._join,
            "safe": printed,
            "string": printed,
            "title": lambda value: printed(value).title(),
            "tojson": _to_json,
        }
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _strftime_now

    def concat_values(self, values: Iterable[object]) -> Text:
        """`a ~ b`."""
        return text.concat(map(printed, values))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, str):
            return percent(text.of(left), right)
        return super().call_binop(context, operator, left, right)

    def call(
        self, context: Context, function: Any, /, *values: Any, **fields: Any
    ) -> Any:
        result = super().call(context, function, *values, **fields)
        owner = getattr(function, "__self__", None)
        if type(result) is str and isinstance(owner, Text):
            return text.derived(result, (owner, *values, *fields.values()))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        owner = getattr(value, "__self__", None)
        wrapped = super().wrap_str_format(value)
        if wrapped is None or not isinstance(owner, Text):
            return wrapped
        formatter = SandboxedFormatter(self)

        def format_map(values: Mapping[str, Any]) -> Text:
            return with_fields(formatter, owner, (), values)

        def format_(*values: Any, **fields: Any) -> Text:
            return with_fields(formatter, owner, values, fields)

        return format_map if value.__name__ == "format_map" else format_

    def _join(self, values: Any, d: str = "", attribute: Any = None) -> Text:
        """Jinja's filter `join`."""
        if attribute is not None:
            parts = attribute.split(".") if isinstance(attribute, str) else [attribute]
            for part in parts:
                key = int(part) if isinstance(part, str) and part.isdigit() else part
                values = [self.getitem(value, key) for value in values]
        return printed(d).join(map(printed, values))


def _followed(run: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose text is a message's if all that it is given is."""
    n_own = 1 if hasattr(run, "jinja_pass_arg") else 0  # Jinja's context in front

    @wraps(run)
    def call(*values: Any, **fields: Any) -> Any:
        result = run(*values, **fields)
        if type(result) is str:
            return text.derived(result, (*values[n_own:], *fields.values()))
        return result

    return call


def _format(value: object, *values: Any, **fields: Any) -> Text:
    if values and fields:
        raise TypeError(
            "can't handle positional and keyword arguments at the same time"
        )
    return percent(printed(value), fields or values)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> Text:
    """Jinja's own filter escapes HTML and sorts keys."""
    value_json = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )
    return text.from_message(value_json)


def _listed(value: object) -> list[Any]:
    """The items that a filter such as `map` gives, for JSON."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


# -- the printing of values --------------------------------------------------------------

_FIELD = re.compile(
    r"%(\((?P<key>[^()]*)\))?(?P<form>[#0\- +]*\d*(\.\d+)?)(?P<kind>[a-zA-Z%])"
)


def printed(value: object) -> Text:
    """
    The text that `{{ value }}` prints.

    A template prints its own markers as text; what a list or number looks like is none.
    """
    return of(value) if isinstance(value, str) else from_message(str(value))


def percent(text: Text, values: Any) -> Text:
    """`text % values`."""
    plain = str.__mod__(text, values)
    inputs = values if isinstance(values, tuple) else (values,)
    # Only a form that the template wrote is followed field by field.
    if not is_all_template(text):
        return derived(plain, (text, *inputs))
    left = iter(inputs)
    parts: list[str] = []
    end = 0
    for field in _FIELD.finditer(text):
        parts.append(text[end : field.start()])
        end = field.end()
        if field["kind"] == "%":
            parts.append(from_template("%"))
        else:
            value = next(left, None) if field["key"] is None else values[field["key"]]
            is_as_is = field["form"] == "" and field["kind"] == "s"
            parts.append(printed(value) if is_as_is else _formed(field, value))
    return _if_equal(concat([*parts, text[end:]]), plain)


def with_fields(
    formatter: SandboxedFormatter,
    text: Text,
    values: Sequence[Any],
    fields: Mapping[str, Any],
) -> Text:
    """`text.format(*values, **named)`."""
    plain = formatter.vformat(text, values, fields)
    if not is_all_template(text):
        return derived(plain, (text, *values, *fields.values()))
    numbers = count()
    parts: list[str] = []
    for literal, name, form, conversion in formatter.parse(text):
        parts.append(from_template(literal))
        if name is None:
            continue
        value, _ = formatter.get_field(name or str(next(numbers)), values, fields)
        parts.append(printed(value) if not (form or conversion) else Text("?"))
    return _if_equal(concat(parts), plain)


def _formed(field: re.Match[str], value: object) -> Text:
    form = f"%{field['form']}{field['kind']}" % (value,)
    return derived(form, (value,))


def _if_equal(followed: Text, plain: str) -> Text:
    """*followed*, unless rules were used that are not followed here."""
    return followed if followed == plain else Text(plain)
