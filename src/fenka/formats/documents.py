"""Reads documents that people write: YAML strictly, and fields by types. Errors name a field by its path.

pyyaml's own loaders read `no` as false, 12:30 as 750 and a date as an object. They take the last of equal
keys, and let a small file with aliases become a huge value. Here YAML has JSON's types and nothing else.
"""

import dataclasses
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from fenka.core.errors import INVALID_INPUT, FenkaError

MAX_NAMED = 5
"""Unknown keys that an error names."""

T = TypeVar("T")
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "empty",
}
"""Words for msgspec's names of types."""


class InvalidDocument(FenkaError):
    """A field is wrong; the message names it by its path, such as `groups[0].max`."""

    exit_code = INVALID_INPUT


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """Says in an `Annotated` type how people write a value of it.

    read: returns the value of what is written; raises InvalidDocument with the end of a sentence.
    """

    read: Callable[[Any], Any]


def decode_json(data: bytes, kind: type[T], whole: str) -> T:
    """Return a JSON document as this type. Raises InvalidDocument. whole: see `convert`."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as why:
        raise InvalidDocument(f"{whole} is no JSON: {why}") from None
    return convert(value, kind, whole)


def convert(value: Any, kind: type[T], whole: str, *, known_only: bool = True) -> T:
    """Return a document as this type.

    Args:
        value: what a JSON, YAML or TOML decoder returns.
        kind: a struct or dataclass.
        whole: what errors call the document, such as `the case`.
        known_only: refuse keys that no field has. Otherwise they are ignored.

    Raises:
        InvalidDocument: for unknown keys, or values of other types.
    """
    if known_only:
        reader = _Reader()
        value = reader.read(value, kind)
        reader.raise_first()
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as why:
        raise InvalidDocument(_sentence(str(why), whole)) from None


def without_nulls(value: Any) -> Any:
    """Return a document without the fields and items that are null: Go reads them as left out."""
    if isinstance(value, dict):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value if item is not None]
    return value


def check_names(value: Any, kind: Any) -> None:
    """Raise InvalidDocument for keys that no field has."""
    reader = _Reader(names_only=True)
    reader.read(value, kind)
    reader.raise_first()


MAX_COMPARED = 100
"""Characters of a name that is compared with known ones. The time grows with the square of the length."""


def similar(text: str, known: Collection[str]) -> str:
    """Return the end of a sentence that asks for the known text that was meant; empty if none is near."""
    near = get_close_matches(text, known, n=1) if len(text) <= MAX_COMPARED else []
    return f": did you mean {near[0]}?" if near else ""


class _Reader:
    """Reads what people write in their own way; values of other types are msgspec's to reject.

    Attributes:
        problems: a sentence for each key that no field has, and each value that is not understood.
    """

    def __init__(self, *, names_only: bool = False) -> None:
        self.problems: list[str] = []
        self._names_only = names_only

    def read(self, value: Any, kind: Any, path: str = "") -> Any:
        """Return the value as msgspec converts it to this type."""
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return self._annotated(value, arguments, path)
        if origin in (Union, types.UnionType):
            for alternative in arguments if value is not None else ():
                # A choice is one of several forms: msgspec says which there are.
                if get_origin(alternative) is not Literal:
                    value = self.read(value, alternative, path)
        elif origin is Literal and not self._names_only and value not in arguments:
            *others, last = map(str, arguments)
            words = f"{', '.join(others)} or {last}" if others else last
            given = "" if isinstance(value, dict | list) else f", not {value!r:.60}"
            self.problems.append(f"{path} must be {words}{given}")
        elif origin in (tuple, list) and isinstance(value, list):
            return [self.read(item, arguments[0], f"{path}[{n}]") for n, item in enumerate(value)]
        elif origin in (Mapping, dict) and isinstance(value, dict):
            return {
                self.read(key, arguments[0], path): self.read(
                    item, arguments[1], _joined(path, key)
                )
                for key, item in value.items()
            }
        elif isinstance(value, dict) and (fields := _fields(kind)):
            return self._record(value, fields, path)
        return value

    def raise_first(self) -> None:
        """Raise InvalidDocument if there are problems."""
        if self.problems:
            raise InvalidDocument("; ".join(self.problems[:MAX_NAMED]))

    def _annotated(self, value: Any, arguments: tuple[Any, ...], path: str) -> Any:
        kind, *notes = arguments
        written = next((note for note in notes if isinstance(note, Written)), None)
        if self._names_only or written is None:
            return self.read(value, kind, path)
        try:
            return written.read(value)
        except InvalidDocument as why:
            self.problems.append(f"{path} {why}")
            return value

    def _record(self, value: dict[str, Any], fields: dict[str, Any], path: str) -> dict[str, Any]:
        known = {}
        for key, item in value.items():
            name = _joined(path, key)
            if key in fields:
                known[key] = self.read(item, fields[key], name)
            else:
                self.problems.append(f"{name} is not known{similar(key, fields) or ': remove it'}")
        return known


def _joined(path: str, key: str) -> str:
    """Return the path of a key. One that cannot be printed, or is very long, is quoted."""
    name = key if len(key) <= MAX_SHOWN and key.isprintable() else shown(key)
    return f"{path}.{name}" if path else name


@cache
def _fields(kind: Any) -> dict[str, Any]:
    """Return the types of a record's fields by their names in documents; none of any other type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind, include_extras=True)
        return {field.encode_name: hints[field.name] for field in msgspec.structs.fields(kind)}
    return get_type_hints(kind, include_extras=True) if dataclasses.is_dataclass(kind) else {}


def _sentence(error: str, whole: str) -> str:
    """Return msgspec's error in the words of somebody who writes the document."""
    text, _, path = error.partition(" - at `$")
    where = path.removesuffix("`").lstrip(".") or whole
    named = text.partition("`")[2].partition("`")[0]
    if text.startswith("Object missing"):
        return f"{where} has no {named}: add it"
    expected, _, given = text.removeprefix("Expected ").partition(", got ")
    words = f"{where} must be {_words(expected)}"
    return f"{words}, not {_words(given)}" if given else words


def _words(names: str) -> str:
    """Return types of msgspec's errors in words, with what is said of their sizes."""
    return re.sub(
        "`([^`]*)`",
        lambda match: " or ".join(_TYPES.get(name, name) for name in match[1].split(" | ")),
        names,
    ).replace(" of length <= ", " of a length of at most ")


MAX_BYTES = 256 * 1024
"""A ConfigMap has 1 MiB; configurations have a few KiB."""

MAX_DEPTH = 20

MAX_SHOWN = 40
"""Characters of a text that an error quotes."""

_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
_NUMBER = re.compile(
    r"[-+]?(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(?:[eE][-+]?[0-9]{1,2})?"
)


class InvalidYaml(FenkaError):
    """The text is no YAML, or more than JSON's types are in it. The message is the end of a sentence."""

    exit_code = INVALID_INPUT


def parse_yaml(data: bytes, *, as_texts: bool = False, limit: int = MAX_BYTES) -> Any:
    """Return a document as dicts, lists, texts, numbers, booleans and None.

    Args:
        data: UTF-8. Of a file read one byte more than the limit at most.
        as_texts: return every scalar as the text that is written there.
        limit: of bytes.

    Raises:
        InvalidYaml: for anything else.
    """
    import yaml

    if len(data) > limit:
        raise InvalidYaml(f"has more than {limit} bytes: leave out what is not needed")
    try:
        events = yaml.parse(data.decode(), Loader=yaml.BaseLoader)
        return _document(events, str if as_texts else _plain)
    except UnicodeDecodeError:
        raise InvalidYaml("is no text in UTF-8: save it as UTF-8") from None
    except yaml.MarkedYAMLError as why:
        mark = why.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise InvalidYaml(f"is no YAML: {where}{why.problem}") from None
    except yaml.YAMLError as why:
        raise InvalidYaml(f"is no YAML: {' '.join(str(why).split())}") from None


Plain = Callable[[str], Any]
"""Returns the value of a scalar without quotes."""


def _document(events: Iterator[Any], plain: Plain) -> Any:
    from yaml.events import DocumentStartEvent, StreamEndEvent

    next(events)
    if isinstance(next(events), StreamEndEvent):
        return None
    value = _value(next(events), events, plain, 0)
    next(events)
    if isinstance(event := next(events), DocumentStartEvent):
        raise InvalidYaml(f"has a second document in {_line(event)}: remove it")
    return value


def _value(event: Any, events: Iterator[Any], plain: Plain, depth: int) -> Any:
    """Return the value that begins with an event; the events after it are its content."""
    from yaml.events import AliasEvent, MappingStartEvent, ScalarEvent, SequenceEndEvent

    if isinstance(event, AliasEvent) or event.anchor is not None:
        raise InvalidYaml(f"has an anchor or alias in {_line(event)}: write the value itself")
    if event.tag is not None:
        raise InvalidYaml(f"has a tag in {_line(event)}: remove {shown(event.tag)}")
    if depth > MAX_DEPTH:
        raise InvalidYaml(f"is nested deeper than {MAX_DEPTH} levels in {_line(event)}: flatten it")
    if isinstance(event, ScalarEvent):
        return event.value if event.style else plain(event.value)
    if isinstance(event, MappingStartEvent):
        return _mapping(events, plain, depth)
    items = []
    while not isinstance(event := next(events), SequenceEndEvent):
        items.append(_value(event, events, plain, depth + 1))
    return items


def _mapping(events: Iterator[Any], plain: Plain, depth: int) -> dict[str, Any]:
    from yaml.events import MappingEndEvent, ScalarEvent

    fields: dict[str, Any] = {}
    while not isinstance(event := next(events), MappingEndEvent):
        if not isinstance(event, ScalarEvent) or event.anchor or event.tag:
            raise InvalidYaml(f"has a key in {_line(event)} that is no plain text: write a name")
        # Keys are texts, whatever they look like.
        if event.value in fields:
            raise InvalidYaml(f"has {shown(event.value)} twice in {_line(event)}: remove one")
        fields[event.value] = _value(next(events), events, plain, depth + 1)
    return fields


def _plain(text: str) -> Any:
    """Return the value of a scalar without quotes, as YAML 1.2 reads JSON's types."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def _line(event: Any) -> str:
    return f"line {event.start_mark.line + 1}"


def shown(text: str) -> str:
    """Return the text as an error quotes it."""
    return repr(text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}...")
