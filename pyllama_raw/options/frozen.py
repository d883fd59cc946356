"""
Options that are checked once and then frozen, and the error that names a wrong one.

Rules:
1. A mistake is one error of this package: which option, what was given, what is allowed.
   Nobody has to read pydantic's.
2. A copy is checked like new options.
3. Another model that holds these options, as the body of a web request, checks them in
   pydantic's own way, so its errors tell the whole place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError, PydanticUndefined

from pyllama_raw.errors import ConfigError, PyllamaError, cut, shown
from pyllama_raw.options.described import about, descriptions, help_of
from pyllama_raw.options.requests import RequestOptions

T = TypeVar("T")
K = TypeVar("K")

# What checkers allow callers to give, and what it is once it was checked.
if TYPE_CHECKING:
    Listed = list[T] | tuple[T, ...]
    Mapped = Mapping[K, T]
    AnyPath = str | Path
else:
    Mapped, AnyPath = dict, Path

    class Listed:
        """Listed[T] is read into a tuple[T, ...]."""

        def __class_getitem__(cls, kind: Any) -> Any:
            return tuple[kind, ...]


if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

COLLECTIONS = (str, bytes, list, tuple, set, frozenset, dict, BaseModel)
MAX_TOLD = 5  # mistakes in one message

# What pydantic finds, in words that follow "give"; the names in them are of its context.
ALLOWED = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "True or False",
    "bool_parsing": "True or False",
    "string_type": "text",
    "string_unicode": "text of valid unicode, without lone surrogates",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "string_pattern_mismatch": "text without NUL",
    "tuple_type": "a list",
    "too_long": "at most {max_length} items",
    "dict_type": "a mapping",
    "path_type": "a path",
    "literal_error": "{expected}",
    "model_type": "a {class_name}",
    "wrong_option": "{allowed}",
    "wrong_value": "{allowed}",
}


class Mistake(NamedTuple):
    """One wrong option."""

    name: str  # with dots, from the class that was made
    value: object
    allowed: str  # follows "give"


class Told(str):
    """The text of a value, which is shown as it is."""

    __slots__ = ()
    __repr__ = str.__str__


class Given(str):
    """A value inside of pydantic's error, which prints all of them: as text that is short."""

    value: object

    def __new__(cls, value: object) -> Self:
        made = super().__new__(cls, shown(value))
        made.value = value
        return made


class Documented(type(BaseModel)):  # type: ignore[misc]
    """Of a class whose `__doc__` lists its options, made when somebody asks."""

    @property
    def __doc__(cls) -> str:  # type: ignore[override]
        defaults = {
            name: _shown_default(field.get_default(call_default_factory=True))
            for name, field in getattr(cls, "model_fields", {}).items()
        }
        return help_of(cls, defaults)


def _shown_default(value: object) -> str:
    if value is PydanticUndefined:
        return "..."
    return f"{type(value).__name__}()" if isinstance(value, BaseModel) else repr(value)


if TYPE_CHECKING:
    Options = BaseModel  # editors and checkers know the fields of its classes
else:

    class Options(BaseModel, metaclass=Documented):
        """What help() tells of."""


class Frozen(Options):
    """Options that cannot change; mistakes are a ConfigError that names them."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    if not TYPE_CHECKING:  # editors and checkers know the options of each class

        def __init__(self, /, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                found = _mistakes(type(self), error, values)
            except PyllamaError:
                raise
            except Exception as error:  # noqa: BLE001 - a value is a stranger's object
                kind = type(error).__name__
                found = [
                    Mistake("options", values, f"values that can be read ({kind})")
                ]
            else:
                return
            raise self.refusal(found)

        # Pydantic does not call such an __init__ for options inside of others (rule 3).
        __init__.__pydantic_base_init__ = True

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The schema with what each option is for."""
        made = handler(core_schema)
        schema = handler.resolve_ref_schema(made)
        schema["description"] = about(cls)
        properties = schema.get("properties", {})
        for name, text in descriptions(cls).items():
            if name in properties:
                properties[name]["description"] = text
        return made

    @model_validator(mode="before")
    @classmethod
    def _check_kinds(cls, values: Any) -> Any:
        """Pydantic would read an iterator to its end, which may never come."""
        if isinstance(values, dict):
            for name, value in values.items():
                if isinstance(value, Iterable) and not isinstance(value, COLLECTIONS):
                    raise wrong(name, value, "a plain value or a list")
                if isinstance(value, int) and int.bit_length(value) > 64:
                    raise wrong(name, value, "a smaller number")
        return values

    @classmethod
    def refusal(cls, mistakes: list[Mistake]) -> PyllamaError:
        """The error that tells of *mistakes*, of which there is at least one."""
        shown_ones = [
            (name, shown(v), allowed) for name, v, allowed in mistakes[:MAX_TOLD]
        ]
        told = [
            f"{cls.__name__}.{name}={value}: give {allowed}"
            for name, value, allowed in shown_ones
        ]
        if len(mistakes) > MAX_TOLD:
            told.append(f"and {len(mistakes) - MAX_TOLD} more")
        return ConfigError("; ".join(told), tuple(shown_ones))

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> Self:
        """A copy; *update* is checked as in new options."""
        if not update:
            return super().model_copy(deep=deep)
        mine = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**((deepcopy(mine) if deep else mine) | dict(update)))


def wrong(name: str, value: object, allowed: str) -> PydanticCustomError:
    """What a validator of several fields raises; the words of *allowed* follow "give"."""
    context = {"name": name, "value": Given(value), "allowed": allowed}
    return PydanticCustomError("wrong_option", "{name}: give {allowed}", context)


def _mistakes(
    kind: type[BaseModel], error: ValidationError, values: dict[str, Any]
) -> list[Mistake]:
    try:
        return [
            mistake
            for item in error.errors(include_url=False)
            for mistake in _inner(item) or [_mistake(kind, item)]
        ]
    except Exception:  # noqa: BLE001 - pydantic cannot print a value inside a list
        return [Mistake("options", values, "values that can be printed")]


def _inner(item: ErrorDetails) -> list[Mistake]:
    """Those of other options, which a validator of these has made."""
    cause = item.get("ctx", {}).get("error")
    if not isinstance(cause, ConfigError):
        return []
    place = [str(part) for part in item["loc"]]
    return [
        Mistake(".".join([*place, name]), Told(value), allowed)
        for name, value, allowed in cause.mistakes
    ]


def _mistake(kind: type[BaseModel], item: ErrorDetails) -> Mistake:
    path, value, words = (
        [str(part) for part in item["loc"]],
        item["input"],
        allowed(item),
    )
    if item["type"] == "extra_forbidden":
        words = f"a known option{_suggestion(kind, path)}"
    elif item["type"] == "wrong_option":
        path.append(item["ctx"]["name"])
        value = item["ctx"]["value"].value
    return Mistake(cut(".".join(path) or "options", 80), value, words)


def allowed(item: ErrorDetails) -> str:
    """What fits in the place of a mistake that pydantic found; follows "give"."""
    context = item.get("ctx", {})
    if "error" not in context and item["type"] in ALLOWED:
        return ALLOWED[item["type"]].format(**context)
    return f"what fits: {context.get('error', item['msg'])}"  # a validator's own words


def _suggestion(kind: type[BaseModel], path: list[str]) -> str:
    """Where an unknown name belongs: in these options, in others, or it is misspelt."""
    from difflib import get_close_matches

    name, places = path[-1], dict(_places(kind))
    here = [place for place in places if places[place] == name]
    if here:
        return f"; did you mean {here[0]}?"
    home = home_of(name)
    if home is not None:
        return f"; {name} goes into {home}"
    if name in RequestOptions.__annotations__:
        return f"; {name} goes with the prompt, as generate(prompt, {name}=...)"
    for close in get_close_matches(cut(name, 80), places.values(), n=1):
        return f"; did you mean {next(p for p in places if places[p] == close)}?"
    return ""


def home_of(name: str) -> str | None:
    """The class of ours, of those that are imported, that has an option *name*."""
    for other in Frozen.__subclasses__():
        if name in other.model_fields and other.__module__.startswith("pyllama_raw."):
            return other.__name__
    return None


def _places(kind: type[BaseModel], before: str = "") -> Iterator[tuple[str, str]]:
    """Each option in *kind* and the options inside it: with dots, and by its name."""
    for name, field in kind.model_fields.items():
        yield f"{before}{name}", name
        if isinstance(field.annotation, type) and issubclass(
            field.annotation, BaseModel
        ):
            yield from _places(field.annotation, f"{before}{name}.")
