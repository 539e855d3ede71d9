"""users.toml: whose cap counts, and files with mistakes, which are never read in part."""

import os
from math import inf
from pathlib import Path

import pytest

from fenka.core.users.caps import NO_CAPS, Caps
from fenka.workstation.users.users_file import (
    InvalidUsersFile,
    parse_users_file,
    read_users_file,
)

HERE = Path("users.toml")
OWN = {os.geteuid()}
EXAMPLE = """version = 1
user."*" = {memory = "16GiB", cards = 1, card_hours_per_day = 12, time_limit = "24h"}
user.bob = {memory = "unlimited", time_limit = {default = "8h"}}
group.staff = {cards = 4, time_limit = {default = "1h", at_most = "48h"}}
group.guests = {cards = 2, memory = "4"}
book.may = ["group:staff", "user:bob"]
"""
DAY, HOUR = 86400.0, 3600.0


@pytest.mark.parametrize(
    ("name", "groups", "caps"),
    [
        ("alice", [], Caps(16384, 1, 12, DAY, DAY)),
        ("alice", ["staff"], Caps(16384, 4, 12, HOUR, 2 * DAY)),
        # Of each key the group that allows more.
        ("alice", ["guests", "staff"], Caps(4096, 4, 12, HOUR, 2 * DAY)),
        ("bob", ["guests"], Caps(inf, 2, 12, 8 * HOUR, inf)),
        ("*", [], Caps(16384, 1, 12, DAY, DAY)),
    ],
)
def test_most_specific_entry_with_the_key_counts(name: str, groups: list[str], caps: Caps) -> None:
    """The user's own, then the groups', then everybody's."""
    assert parse_users_file(EXAMPLE.encode(), HERE).caps([name, "7"], groups) == caps


def test_user_is_named_by_number_too() -> None:
    """Users need no name. An empty file with a version caps nobody."""
    content = parse_users_file(b"version = 1\nuser.61000.cards = 2\n", HERE)
    assert content.caps(["61000"], []) == Caps(cards=2)
    assert parse_users_file(b"version = 1", HERE).caps(["x"], ["y"]) == NO_CAPS


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "line 1: the file has no version: add it"),
        ("version = 2", "line 1: version must be 1, not 2"),
        ("version = 1\nusers.a.cards = 1", "line 2: users is not known: did you mean user.*"),
        ("version = 1\nuser = 3", "line 2: user must be an object, not a whole number"),
        ("version = 1\nuser.a = 3", "line 2: user.a must be an object, not a whole number"),
        (
            "version = 1\n\nuser.a = {card = 1}",
            "line 3: user.a.card is not known: did you mean cards.*",
        ),
        ("version = 1\nuser.a.cards = true", "line 2: user.a.cards must be a number .*, not True"),
        ("version = 1\nuser.a.cards = nan", "line 2: user.a.cards must be a number .*, not nan"),
        ("version = 1\nuser.a.cards = -1", "line 2: user.a.cards must be a number .*, not -1"),
        ("version = 1\nuser.a.memory = 4", "line 2: user.a.memory must be a size in quotation .*"),
        ("version = 1\nuser.a.memory = '4GB'", "line 2: user.a.memory must be a size: 'GB' in .*"),
        ("version = 1\nuser.a.time_limit = '8'", "line 2: user.a.time_limit must be a duration.*"),
        (
            "version = 1\n[group.b]\ncards = 1\ntime_limit = {default = '2h', at_most = '1h'}\n[book]",
            "line 4: group.b.time_limit has a default above at_most: .*",
        ),
        (
            "version = 1\nbook.may = [\n'user:a',\n'staff',\n]\nuser.a.cards = 1",
            "line 2: book.may names a group or user as group:staff .*, not 'staff'",
        ),
        ("version = 1\nuser.a = {cards = 1", "line 2: it is no TOML: .*"),
        ("version = 1\n\nuser.a = = 1", "line 3: it is no TOML: .*"),
        ("version = 1\nuser.a.cards = 1\nuser.a.cards = 2", "line 3: it is no TOML: .*"),
    ],
)
def test_mistake_is_named_with_its_line(text: str, sentence: str) -> None:
    """In one sentence, the first only."""
    with pytest.raises(InvalidUsersFile, match=f"^users.toml, {sentence}$"):
        parse_users_file(text.encode(), HERE)


@pytest.mark.parametrize("content", [b"\xff", b"version = 1\nx = " + b"[" * 9999])
def test_what_is_no_text_or_nested_is_refused(content: bytes) -> None:
    """Without a traceback."""
    with pytest.raises(InvalidUsersFile):
        parse_users_file(content, HERE)


def test_hostile_files_are_refused_at_once(tmp_path: Path) -> None:
    """A FIFO would make the daemon wait, a link to nothing would lift all caps, and so would a writer."""
    path = tmp_path / "users.toml"
    assert read_users_file(path, OWN) is None
    os.mkfifo(path)
    with pytest.raises(InvalidUsersFile, match="is not a regular file"):
        read_users_file(path, OWN)
    path.unlink()
    path.symlink_to(tmp_path / "nothing")
    with pytest.raises(InvalidUsersFile, match="is a link to nothing"):
        read_users_file(path, OWN)
    target = tmp_path / "nothing"
    target.write_text("version = 1\n")
    target.chmod(0o644)
    assert read_users_file(path, OWN) == b"version = 1\n"
    with pytest.raises(InvalidUsersFile, match="belongs to another user or can be written"):
        read_users_file(path, {os.geteuid() + 1})
    target.chmod(0o664)
    with pytest.raises(InvalidUsersFile, match="belongs to another user or can be written"):
        read_users_file(path, OWN)
    target.chmod(0o644)
    target.write_bytes(b"#" * 10_000_000)
    with pytest.raises(InvalidUsersFile, match="has more than 64 KiB"):
        read_users_file(path, OWN)
    path.unlink()
    path.mkdir()
    with pytest.raises(InvalidUsersFile, match="regular file"):
        read_users_file(path, OWN)
