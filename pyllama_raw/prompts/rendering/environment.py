"""
The Jinja that templates are written for, printing Text that knows where its characters came from.

A chat template mixes its own text with that of messages. Only its own may become control
tokens, so each character has an origin: TEMPLATE for what is written in the template,
MESSAGE for what came from messages, DOUBT for all else. Whatever `Text` does not
follow makes a plain `str`, which counts as DOUBT: nothing becomes TEMPLATE by oversight.

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
from typing import Any, Self, SupportsIndex

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment, SandboxedFormatter

MESSAGE, TEMPLATE, DOUBT = b"m", b"t", b"d"


def _respelled(method: Callable[[str], str]) -> Callable[[Text], Text]:
    """*method* of str, which writes letters otherwise, with origins."""

    def respelled(self: Text) -> Text:
        # No letter becomes nothing, so texts of one length match letter by letter.
        text = method(self)
        return (
            Text(text, self._origin)
            if len(text) == len(self)
            else derived(text, (self,))
        )

    return respelled


class Text(str):
    """A string with the origin of its characters, one byte for each."""

    __slots__ = ("_origin",)

    _origin: bytes  # the underscore hides it from templates

    def __new__(cls, value: object = "", origin: bytes | None = None) -> Self:
        text = str.__new__(cls, value)
        text._origin = DOUBT * len(text) if origin is None else origin
        return text

    # -- the same characters ----------------------------------------------------

    def __str__(self) -> str:
        return self

    def __iter__(self) -> Iterator[str]:
        for index, character in enumerate(str.__iter__(self)):
            yield Text(character, self._origin[index : index + 1])

    def __getitem__(self, key: SupportsIndex | slice) -> Text:
        if not isinstance(key, slice):
            at = range(len(self))[key]
            key = slice(at, at + 1)
        return Text(str.__getitem__(self, key), self._origin[key])

    def _cut(self, text: str, start: int) -> Text:
        return Text(text, self._origin[start : start + len(text)])

    # -- joining ----------------------------------------------------------------

    def __add__(self, other: object) -> Text:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> Text:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> Text:
        return Text(str.__mul__(self, times), self._origin * times)

    __rmul__ = __mul__

    def join(self, parts: Iterable[str], /) -> Text:
        texts = [of(part) for part in parts]
        joined = str.join(self, texts)
        return Text(joined, self._origin.join(text._origin for text in texts))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Text:
        if not old:
            return derived(str.replace(self, old, new, count), (self, new))
        return of(new).join(self.split(old, count))

    # -- taking apart -----------------------------------------------------------

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._located(str.splitlines(self, keepends), 0)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return tuple(self._located(str.partition(self, sep), 0))  # type: ignore[return-value]

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return tuple(self._located(str.rpartition(self, sep), 0))  # type: ignore[return-value]

    def _located(self, parts: Iterable[str], gap: int) -> list[str]:
        """*parts* with their origins: in order, with *gap* or white space between."""
        texts: list[str] = []
        at = 0
        for part in parts:
            at = str.index(self, part, at)
            texts.append(self._cut(part, at))
            at += len(part) + gap
        return texts

    def strip(self, chars: str | None = None, /) -> Text:
        return self.rstrip(chars).lstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> Text:
        left = str.lstrip(self, chars)
        return self._cut(left, len(self) - len(left))

    def rstrip(self, chars: str | None = None, /) -> Text:
        return self._cut(str.rstrip(self, chars), 0)

    def removeprefix(self, prefix: str, /) -> Text:
        left = str.removeprefix(self, prefix)
        return self._cut(left, len(self) - len(left))

    def removesuffix(self, suffix: str, /) -> Text:
        return self._cut(str.removesuffix(self, suffix), 0)

    # -- other letters ----------------------------------------------------------

    lower = _respelled(str.lower)
    upper = _respelled(str.upper)
    title = _respelled(str.title)
    capitalize = _respelled(str.capitalize)
    swapcase = _respelled(str.swapcase)
    casefold = _respelled(str.casefold)


def of(value: str) -> Text:
    """*value* with an origin; a plain string comes from somewhere not followed."""
    return value if type(value) is Text else Text(value)


def concat(parts: Iterable[Any]) -> Text:
    """All *parts* one after another."""
    return Text("", b"").join(parts)


def from_template(text: str) -> Text:
    """Text that the template's author wrote."""
    return Text(text, TEMPLATE * len(text))


def from_message(text: str) -> Text:
    """Text that came with a message, or is not for sure the template's own."""
    return Text(text, MESSAGE * len(text))


def origins(text: str) -> str:
    """A letter for each character of *text*: m, t or d."""
    return of(text)._origin.decode()


def derived(text: str, inputs: Iterable[object]) -> Text:
    """*text*, made from *inputs* by something that does not tell how."""
    if all(_is_foreign(value) for value in inputs):
        return from_message(text)
    return Text(text)


def is_all_template(text: str) -> bool:
    """Whether the template's author wrote every character."""
    return of(text)._origin.count(TEMPLATE) == len(text)


def _is_foreign(value: object) -> bool:
    """Whether no character of *value* may be the template's."""
    if isinstance(value, str):
        return of(value)._origin.count(MESSAGE) == len(value)
    if isinstance(value, dict):
        return all(map(_is_foreign, value)) and all(map(_is_foreign, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_foreign, value))
    return value is None or isinstance(value, int | float)


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
        self.environment.constants.append(from_template(value))
        return f"environment.constants[{len(self.environment.constants) - 1}]"


class TextEnvironment(SandboxedEnvironment):
    """Runs one template."""

    code_generator_class = TextCodeGenerator
    concat = staticmethod(concat)
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
        return concat(map(printed, values))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, str):
            return percent(of(left), right)
        return super().call_binop(context, operator, left, right)

    def call(
        self, context: Context, function: Any, /, *values: Any, **fields: Any
    ) -> Any:
        result = super().call(context, function, *values, **fields)
        owner = getattr(function, "__self__", None)
        if type(result) is str and isinstance(owner, Text):
            return derived(result, (owner, *values, *fields.values()))
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
            return derived(result, (*values[n_own:], *fields.values()))
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
    return from_message(value_json)


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
