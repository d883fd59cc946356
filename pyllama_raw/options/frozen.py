"""
Options that are checked once and then frozen, the error that names a wrong one, and their descriptions.

Rules:
1. A mistake is one error of this package: which option, what was given, what pydantic allows.
2. A copy is checked like new options.
3. Another model that holds these options, as the body of a web request, checks them in
   pydantic's own way, so its errors tell the whole place.
4. An option is described once, by the docstring below it in the source, which help and JSON schemas
   show. Docstrings are read when somebody asks, because pydantic's `use_attribute_docstrings` would
   parse the sources at every start of a program.
5. `Checked` dataclasses are plain data that is given by position, so they are no `Frozen`; a mistake
   is told in the same words.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sized
from copy import deepcopy
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from numbers import Integral
from operator import attrgetter
from pathlib import Path
from textwrap import dedent, indent
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    Self,
    TypeVar,
    get_type_hints,
)

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from pyllama_raw.errors import ConfigError, PyllamaError, cut, shown

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

# What checkers allow callers to give, and what it is once it was checked.
if TYPE_CHECKING:
    Listed = list[T] | tuple[T, ...]
    Mapped = Mapping[K, T]
    AnyPath = str | Path
else:
    # One wrong item is told: each one costs a thousand bytes and 30 us.
    Listed = Annotated[tuple[T, ...], Field(fail_fast=True)]
    Mapped = Annotated[dict[K, V], Field(fail_fast=True)]
    AnyPath = Path
PACKAGE = "pyllama_raw."
COLLECTIONS = (str, bytes, list, tuple, set, frozenset, dict, BaseModel)
MAX_TOLD = 5  # mistakes in one message
# A sentence of pydantic, of which the group follows "give".
_SENTENCE = r"(?:\w+ should (?:be|have)|Value error,) (.*?)(?: after validation, not (?:\d+|more))?"
# The branch of a union, as pydantic has it in the place of a mistake.
_BRANCH = re.compile(r"[a-z]+(-[a-z]+)+\[|constrained-(str|int|float)$")
SHORTER = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
}
# What fits, by the beginning of pydantic's type of a mistake: callers know no "valid tuple".
KINDS = {
    "bool_": "True or False",
    "callable_type": "a function",
    "dict_": "a mapping",
    "float_": "a number",
    "int_": "a whole number",
    "list_": "a list",
    "missing": "a value, because it has no default",
    "model_type": "{of}a mapping of its options",
    "path_": "a path",
    "string_type": "text",
    "tuple_": "a list",
}


@cache
def descriptions(kind: type) -> dict[str, str]:
    """The description of each field of *kind*, by name; none where sources are missing."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith(PACKAGE):
            texts |= _docstrings(base)
    return texts


def _docstrings(kind: type) -> dict[str, str]:
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # a program may be shipped without its sources
        return {}
    (node,) = ast.parse(dedent(source)).body
    texts: dict[str, str] = {}
    for field, below in pairwise(node.body if isinstance(node, ast.ClassDef) else ()):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = inspect.cleandoc(text)
    return texts


class Documented(type(BaseModel)):  # type: ignore[misc]
    """Metaclass of options, whose `__doc__` lists them. It is made when somebody asks."""

    @property
    def __doc__(cls) -> str:  # type: ignore[override]
        lines = [
            f"{name} = {_default(cls, name)}\n{indent(text, '    ')}"
            for name, text in descriptions(cls).items()
        ]
        return "\n\n".join([about(cls), "\n".join(lines)])


def _default(kind: type[BaseModel], name: str) -> str:
    field = kind.model_fields[name]
    if field.is_required():
        return "..., which has no default"
    value = field.get_default(call_default_factory=True)
    return f"{type(value).__name__}()" if isinstance(value, BaseModel) else repr(value)


def about(kind: type) -> str:
    """The docstring of *kind* as it is in the source."""
    return inspect.cleandoc(kind.__dict__.get("__doc__") or "")


class DescribedModel(BaseModel, metaclass=Documented):
    """A model of pydantic whose help and JSON schema have the descriptions."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        schema["description"] = about(cls)
        for name, text in descriptions(cls).items():
            schema["properties"][name]["description"] = text
        return reference


if TYPE_CHECKING:
    Described = BaseModel  # editors and checkers know the fields of its classes
else:
    Described = DescribedModel


class Mistake(NamedTuple):
    """One wrong option."""

    name: str  # with dots, from the class that was made
    value: object
    allowed: str  # follows "give"


class Frozen(Described):
    """Options that cannot change; mistakes are a ConfigError that names them."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    max_items: ClassVar[Mapping[str, int]] = {}  # of lists and mappings

    if not TYPE_CHECKING:  # editors and checkers know the options of each class

        def __init__(self, /, **values: Any) -> None:
            try:
                super().__init__(**values)
            except PyllamaError:
                raise
            except Exception as error:  # noqa: BLE001 - a value is a stranger's object
                refusal = self._refusal_of(error, values)
            else:
                return
            raise refusal

        # Pydantic does not call such an __init__ for options inside of others (rule 3).
        __init__.__pydantic_base_init__ = True

    @model_validator(mode="before")
    @classmethod
    def _check_kinds(cls, values: Any) -> Any:
        """Pydantic would read an iterator to its end, which may never come, and check each item."""
        if isinstance(values, dict):
            for name, value in values.items():
                limit = cls.max_items.get(name)
                if (
                    limit is not None
                    and isinstance(value, Sized)
                    and len(value) > limit
                ):
                    count = f"a {type(value).__name__} of {len(value)} items"
                    raise wrong(name, count, f"at most {limit} items")
                if isinstance(value, Iterable) and not isinstance(value, COLLECTIONS):
                    raise wrong(name, shown(value), "a plain value or a list")
                if isinstance(value, int) and int.bit_length(value) > 64:
                    raise wrong(name, shown(value), "a number of at most 64 bits")
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, allowed in self._misfits():
            raise wrong(name, attrgetter(name)(self), allowed)
        return self

    def _misfits(self) -> Iterator[tuple[str, str]]:
        """Options that do not fit the others, and what is allowed beside those."""
        yield from ()

    @classmethod
    def _refusal_of(cls, error: Exception, values: object) -> PyllamaError:
        try:
            assert isinstance(error, ValidationError)
            items = error.errors(include_url=False)
        except Exception:  # noqa: BLE001 - a value raises while it is checked or printed
            return cls.refusal([Mistake("options", values, "values that can be read")])
        for item in items:
            if isinstance(cause := item.get("ctx", {}).get("error"), PyllamaError):
                return cause
        return cls.refusal([mistake_of(cls, item) for item in items])

    @classmethod
    def refusal(cls, mistakes: list[Mistake]) -> PyllamaError:
        """The error that tells of *mistakes*, of which there is at least one."""
        shown_ones = [
            (name, shown(v), allowed) for name, v, allowed in mistakes[:MAX_TOLD]
        ]
        sentences = [
            f"{cls.__name__}.{name}={value}: give {allowed}"
            for name, value, allowed in shown_ones
        ]
        if len(mistakes) > MAX_TOLD:
            sentences.append(f"and {len(mistakes) - MAX_TOLD} more")
        return ConfigError("; ".join(sentences), tuple(shown_ones))

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> Self:
        """A copy; *update* is checked as in new options."""
        if not update:
            return super().model_copy(deep=deep)
        mine = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**((deepcopy(mine) if deep else mine) | dict(update)))


def wrong(name: str, value: object, allowed: str) -> PydanticCustomError:
    """The error that a validator of the whole raises; *allowed* follows "give"."""
    context = {"name": name, "value": value, "allowed": allowed}
    return PydanticCustomError("wrong_option", "{name}: give {allowed}", context)


def mistake_of(kind: type[BaseModel], item: ErrorDetails) -> Mistake:
    """The mistake that pydantic found in options of *kind*."""
    path, value, words = [*item["loc"]], item["input"], allowed(item)
    if item["type"] == "extra_forbidden":
        words = f"a known option{suggestion(str(path[-1]), places(kind))}"
    elif item["type"] == "wrong_option":
        path.append(item["ctx"]["name"])
        value = item["ctx"]["value"]
    return Mistake(place(path) or "options", value, words)


def place(path: Iterable[object]) -> str:
    """The name of an option inside of others, like `settings.stop[1]`."""
    name = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}"
        for part in path
        if not _BRANCH.match(str(part))
    )
    return cut(name.removeprefix("."), 80)


def allowed(item: ErrorDetails) -> str:
    """Values that fit in the place of a mistake, in words of pydantic, after "give"."""
    if item["type"] == "wrong_option" and "ctx" in item:
        return str(item["ctx"]["allowed"])
    for kind, words in KINDS.items():
        if item["type"].startswith(kind):
            # A body of HTTP names no class of ours.
            name = item.get("ctx", {}).get("class_name")
            return words.format(of=f"{name}, or " if name else "")
    sentence = re.fullmatch(_SENTENCE, item["msg"], re.DOTALL)
    if sentence is None:
        return f"what fits: {item['msg']}"
    words = sentence[1]
    for long, short in SHORTER.items():
        words = words.replace(long, short)
    return words


def suggestion(name: str, options: Iterable[str]) -> str:
    """The known option that *name* is, or is most like; those have dots."""
    places: dict[str, str] = {}
    for where in options:
        places.setdefault(where.rpartition(".")[2], where)
    begins = [p for p in places if len(p) > 3 and name.startswith(f"{p}_")]
    close = get_close_matches(cut(name, 80), places, n=1, cutoff=0.8)
    close = close or begins or get_close_matches(cut(name, 80), places, n=1)
    return f"; did you mean {places[close[0]]}?" if close else ""


def places(kind: type[BaseModel], before: str = "") -> Iterator[str]:
    """Each option in *kind* and in the options inside it, with dots."""
    for name, field in kind.model_fields.items():
        yield f"{before}{name}"
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from places(inner, f"{before}{name}.")


Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]


class Checked:
    """
    A dataclass; all its fields are checked, but those of UNCHECKED.

    Raises:
        ConfigError: a field is not what its type allows.
    """

    __slots__ = ()
    UNCHECKED: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name in (field.name for field in fields(kind)):
            if name not in kind.UNCHECKED:
                place, value = f"{kind.__name__}.{name}", getattr(self, name)
                _check(place, value, _adapter(kind, name))


def check_value(name: str, value: object, kind: Any) -> None:
    """
    Check one value against *kind*, a type with limits.

    Raises:
        ConfigError: it does not allow *value*.
    """
    _check(name, value, TypeAdapter(kind))


@cache
def _adapter(kind: Any, name: str) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(kind, include_extras=True)[name])


def _check(name: str, value: Any, adapter: TypeAdapter[Any]) -> None:
    """Without conversions, but whole numbers of other libraries are fine."""
    is_other = isinstance(value, Integral) and not isinstance(value, int)
    try:
        adapter.validate_python(int(value) if is_other else value, strict=True)
    except ValidationError as error:
        words = allowed(error.errors(include_url=False)[0])
        text, place = shown(value), name.rpartition(".")[2]
        raise ConfigError(
            f"{name}={text}: give {words}", ((place, text, words),)
        ) from None
