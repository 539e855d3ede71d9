"""YAML with JSON's types and nothing else, for files whose mistakes must not pass unseen.

pyyaml's own loaders read `no` as false, 12:30 as 750 and a date as an object. They take the last of equal
keys, and let a small file with aliases become a huge value.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from fenka.core.errors import INVALID_INPUT, FenkaError

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


def parse_yaml(data: bytes, *, as_texts: bool = False) -> Any:
    """Return a document as dicts, lists, texts, numbers, booleans and None.

    Args:
        data: UTF-8. Of a file read one byte more than MAX_BYTES at most.
        as_texts: return every scalar as the text that is written there.

    Raises:
        InvalidYaml: for anything else.
    """
    import yaml

    if len(data) > MAX_BYTES:
        raise InvalidYaml(f"has more than {MAX_BYTES} bytes: leave out what is not needed")
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
