"""Reads users.toml, in which the machine's administrator caps users and says who may book cards."""

import os
import re
import stat
import tomllib
from collections.abc import Collection, Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.users.caps import Caps
from fenka.formats.documents import InvalidDocument, Written, convert
from fenka.formats.durations import parse_duration
from fenka.formats.quantities import InvalidSize, parse_memory
from fenka.isolation.lease_files import open_regular_file

MAX_BYTES = 64 << 10
"""A line for each of a thousand users."""

MAX_LIST_LINES = 200
"""Lines of one list within which the line of a mistake is found."""

UNLIMITED = "unlimited"
EVERYBODY = "*"

T = TypeVar("T")
_TOML_LINE = re.compile(r" \(at (?:line ([0-9]+), column [0-9]+|end of document)\)$")
_AUDIENCE = re.compile(r"(group|user):([^\s:]+)")


class InvalidUsersFile(FenkaError):
    """The file of users has a mistake. The message has its line, and what to write instead."""

    exit_code = INVALID_INPUT


def _number(value: Any, most: float) -> float:
    if value == UNLIMITED:
        return inf
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= most:
        raise InvalidDocument(f"must be a number of 0 or more, or {UNLIMITED!r}, not {value!r:.40}")
    return float(value)


def _cards(value: Any) -> float:
    return _number(value, 1024)


def _hours(value: Any) -> float:
    return _number(value, 24 * 1024)


def _read_size(value: Any) -> float:
    if value == UNLIMITED:
        return inf
    try:
        if isinstance(value, str):
            memory = parse_memory(value, 1024)
            return float(memory.nominal_mib(1024))
    except InvalidSize as why:
        raise InvalidDocument(f"must be a size: {why}") from None
    raise InvalidDocument(
        f"must be a size in quotation marks, as '16GiB', or {UNLIMITED!r}, not {value!r:.40}"
    )


def _seconds(value: Any) -> float:
    if value == UNLIMITED:
        return inf
    seconds = parse_duration(value) if isinstance(value, str) else None
    if not seconds:
        raise InvalidDocument(f"must be a duration, as '24h', or {UNLIMITED!r}, not {value!r:.40}")
    return seconds


def _read_durations(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        return dict.fromkeys(("default", "at_most"), _seconds(value))
    unknown = [key for key in value if key not in ("default", "at_most")]
    if unknown or not value:
        raise InvalidDocument("has default and at_most, each a duration as '24h'")
    limits = {key: _seconds(text) for key, text in value.items()}
    if limits.get("default", 0.0) > limits.get("at_most", inf):
        raise InvalidDocument("has a default above at_most: make it smaller")
    return limits


def _audiences(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise InvalidDocument("must be a list, as ['group:staff', 'user:bob']")
    for text in value:
        if text != EVERYBODY:
            check_audience(text if isinstance(text, str) else repr(text))
    return value


def check_audience(text: str) -> None:
    """Raise InvalidDocument unless this names a user or a group."""
    if not _AUDIENCE.fullmatch(text):
        raise InvalidDocument(f"names a group or user as group:staff or user:bob, not {text!r:.40}")


class TimeLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time limits in seconds. default: of jobs that name none. at_most: the longest."""

    default: float = inf
    at_most: float = inf


class UserCaps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The caps of users: of one (`user.NAME`), of a group's (`group.NAME`), or of all (`user."*"`).

    Attributes:
        memory: Card memory at once, as `"16GiB"`; a number in quotation marks counts GiB.
        cards: Cards at once. A slice counts for the larger of its shares of memory and compute.
        card_hours_per_day: Cards × hours since midnight. When they are used, running jobs go on, and no new
            one starts.
        time_limit: Time limit of jobs that name none, and the longest: `"24h"` for both, or
            `{default = "8h", at_most = "48h"}`.
    """

    memory: Annotated[float | None, Written(_read_size)] = None
    cards: Annotated[float | None, Written(_cards)] = None
    card_hours_per_day: Annotated[float | None, Written(_hours)] = None
    time_limit: Annotated[TimeLimit | None, Written(_read_durations)] = None


class BookRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The users who may book cards, beside root.

    Attributes:
        may: Users and groups, as `"group:staff"` and `"user:bob"`; `"*"` for all.
    """

    may: Annotated[list[str], Written(_audiences)] = []


class _Sections(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    user: dict[str, Any] = {}
    group: dict[str, Any] = {}
    book: dict[str, Any] = {}


class UsersFile(msgspec.Struct, frozen=True):
    """The content of users.toml."""

    user: Mapping[str, UserCaps] = {}
    group: Mapping[str, UserCaps] = {}
    may_book: Collection[str] = ()

    @property
    def caps_anybody(self) -> bool:
        """Whether there is any cap."""
        return bool(self.user or self.group)

    def caps(self, names: Iterable[str], groups: Iterable[str]) -> Caps:
        """Return a user's caps: of each key the user's own, else the largest of its groups, else everybody's.

        Args:
            names: The user's name and number.
            groups: The names of the user's groups.
        """
        of_user = [self.user[name] for name in names if name in self.user and name != EVERYBODY]
        of_groups = [self.group[name] for name in groups if name in self.group]
        of_all = [self.user[EVERYBODY]] if EVERYBODY in self.user else []
        levels = of_user, of_groups, of_all

        def largest(field: str) -> Any:
            for level in levels:
                values = [value for entry in level if (value := getattr(entry, field)) is not None]
                if values:
                    return max(values, key=_generosity)
            return None

        limit = largest("time_limit") or TimeLimit()
        sums = (largest(name) for name in ("memory", "cards", "card_hours_per_day"))
        memory, cards, hours = (inf if value is None else value for value in sums)
        return Caps(memory, cards, hours, limit.default, limit.at_most)


def _generosity(value: Any) -> Any:
    return (value.at_most, value.default) if isinstance(value, TimeLimit) else value


def read_users_file(path: Path, owners: Collection[int]) -> bytes | None:
    """Return the file's content; None without a file. Only these users may own it and write to it.

    Raises InvalidUsersFile.
    """
    try:
        with open_regular_file(path, follow_link=True) as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in owners or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise InvalidUsersFile(
                    f"{path} belongs to another user or can be written by others, who would choose their own "
                    "caps: `chown` it to the daemon's user, and `chmod 644` it"
                )
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        if path.is_symlink():
            raise InvalidUsersFile(
                f"{path} is a link to nothing: remove it or make its target"
            ) from None
        return None
    except OSError as why:
        raise InvalidUsersFile(
            f"{path} cannot be read: {why.strerror}" if why.errno else f"{why}: replace it by one"
        ) from None
    if len(content) > MAX_BYTES:
        raise InvalidUsersFile(f"{path} has more than {MAX_BYTES >> 10} KiB: shorten it")
    return content


def parse_users_file(content: bytes, path: Path) -> UsersFile:
    """Return what the file says. Raises InvalidUsersFile, with its line and one sentence."""
    try:
        text = content.decode()
        document = tomllib.loads(text)
    except UnicodeDecodeError:
        raise InvalidUsersFile(f"{path} is no text in UTF-8: save it as UTF-8") from None
    except RecursionError:
        raise InvalidUsersFile(f"{path} is nested too deeply: flatten it") from None
    except tomllib.TOMLDecodeError as why:
        match = _TOML_LINE.search(str(why))
        line = (match and match[1]) or text.count("\n") + 1
        what = str(why)[: match.start()] if match else str(why)
        raise InvalidUsersFile(f"{path}, line {line}: it is no TOML: {what}") from None

    def section(value: Any, kind: type[T], *keys: str) -> T:
        try:
            return convert(value, kind, ".".join(keys) or "the file")
        except InvalidDocument as why:
            sentence = str(why).partition("; ")[0]
            first = re.split(r"[.\[ ]", sentence, maxsplit=1)[0]
            inside = isinstance(value, dict) and first in value
            where = (*keys, first) if inside else keys
            named = ".".join(keys)
            sentence = f"{named}.{sentence}" if named and inside else sentence
            line = _line_of(text, where)
            raise InvalidUsersFile(f"{path}, line {line}: {sentence}") from None

    top = section(document, _Sections)
    return UsersFile(
        {name: section(value, UserCaps, "user", name) for name, value in top.user.items()},
        {name: section(value, UserCaps, "group", name) for name, value in top.group.items()},
        section(top.book, BookRules, "book").may,
    )


def _line_of(text: str, keys: tuple[str, ...]) -> int:
    """Return the line of a TOML document in which a key's value begins: the one after the last without it."""
    lines = text.splitlines()
    last, low, high = 0, 0, len(lines) if keys else 0
    while high - low > 1:
        middle = (low + high) // 2
        count, has_key = _beginning(lines, keys, low, middle)
        if has_key:
            high = count
        else:
            last, low = max(last, count), middle
    return last + 1


def _beginning(lines: list[str], keys: tuple[str, ...], least: int, most: int) -> tuple[int, bool]:
    """Return the most lines that are TOML, which a part of a list is not, and whether they have a key."""
    for count in range(most, max(least, most - MAX_LIST_LINES), -1):
        try:
            value: Any = tomllib.loads("\n".join(lines[:count]))
        except tomllib.TOMLDecodeError:
            continue
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return count, value is not None
    return 0, False
