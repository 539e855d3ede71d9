"""Checks documents that people write against the types of their fields. Errors name a field by its path."""

import dataclasses
import re
import types
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from itertools import islice
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

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


def convert(value: Any, kind: type[T], whole: str) -> T:
    """Return a document as this type.

    Args:
        value: what a JSON, YAML or TOML decoder returns.
        kind: a struct or dataclass.
        whole: what errors call the document, such as `the case`.

    Raises:
        InvalidDocument: for unknown keys, or values of other types.
    """
    check_names(value, kind)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as why:
        raise InvalidDocument(_sentence(str(why), whole)) from None


def check_names(value: Any, kind: Any) -> None:
    """Raise InvalidDocument for keys that no field has."""
    unknown = list(islice(_unknown_keys(value, kind, ""), MAX_NAMED))
    if unknown:
        raise InvalidDocument("; ".join(unknown))


def similar(text: str, known: Collection[str]) -> str:
    """Return the end of a sentence that asks for the known text that was meant; empty if none is near."""
    near = get_close_matches(text, known, n=1)
    return f": did you mean {near[0]}?" if near else ""


def _unknown_keys(value: Any, kind: Any, path: str) -> Iterator[str]:
    """Yield a sentence for each key that no field has. Values of another type are msgspec's to reject."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        yield from _unknown_keys(value, arguments[0], path)
    elif origin in (Union, types.UnionType):
        for alternative in arguments:
            yield from _unknown_keys(value, alternative, path)
    elif origin in (tuple, list) and isinstance(value, list):
        for number, item in enumerate(value):
            yield from _unknown_keys(item, arguments[0], f"{path}[{number}]")
    elif origin in (Mapping, dict) and isinstance(value, dict):
        for key, item in value.items():
            yield from _unknown_keys(item, arguments[1], f"{path}.{key}")
    elif isinstance(value, dict) and (fields := _fields(kind)):
        for key, item in value.items():
            name = f"{path}.{key}" if path else str(key)
            if key in fields:
                yield from _unknown_keys(item, fields[key], name)
            else:
                shown = name[:80] if name.isprintable() else repr(name[:80])
                yield f"{shown} is not known{similar(str(key), fields) or ': remove it'}"


@cache
def _fields(kind: Any) -> dict[str, Any]:
    """Return the types of a record's fields by their names in documents; none of any other type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        return {field.encode_name: hints[field.name] for field in msgspec.structs.fields(kind)}
    return get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}


def _sentence(error: str, whole: str) -> str:
    """Return msgspec's error in the words of somebody who writes the document."""
    text, _, path = error.partition(" - at `$")
    where = path.removesuffix("`").lstrip(".") or whole
    named = text.partition("`")[2].partition("`")[0]
    if text.startswith("Object missing"):
        return f"{where} has no {named}"
    if text.startswith("Invalid enum value"):
        return f"{where} must not be {text.removeprefix('Invalid enum value ')}"
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
