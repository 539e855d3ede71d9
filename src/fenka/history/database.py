"""An SQLite file that may break, fill its disk or be unusable without any other consequence.

Its only user is one thread of the program that records. The file is locked, so other programs read it through
that program's protocol.
"""

import contextlib
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from fenka.history.series import NOT_RECORDED

Connection = sqlite3.Connection
T = TypeVar("T")

PAGE_BYTES = 4096
MIN_BYTES = 1 << 20
"""The least limit of the file: its tables alone take a tenth."""

_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_WAYS: dict[int, str] = {
    sqlite3.SQLITE_FULL: "the disk is full, or --history-size reached",
    sqlite3.SQLITE_BUSY: "another program uses it",
    sqlite3.SQLITE_LOCKED: "another program uses it",
    sqlite3.SQLITE_READONLY: "it cannot be written",
    sqlite3.SQLITE_IOERR: "the disk fails, or is full",
}


class Unusable(Exception):
    """The file must not or cannot be used. The message says why, without the file."""


class Database:
    """One file, opened when it is used first, and again after each failure.

    Attributes:
        problem: Why nothing is recorded now, or what was lost, in a sentence; empty without a problem.
    """

    def __init__(
        self,
        file: Path,
        max_bytes: int,
        version: int,
        schema: str,
        shrink: Callable[[Connection], None],
    ) -> None:
        """Set up, without touching the disk.

        Args:
            file: Need not exist. Of its directories all but the last must be trusted already.
            max_bytes: The file's limit.
            version: Of the schema.
            schema: Statements that make it.
            shrink: Deletes the oldest rows when the limit is reached.
        """
        self.file, self.problem = file, ""
        self._pages = max(max_bytes, MIN_BYTES) // PAGE_BYTES
        self._version, self._schema, self._shrink = version, schema, shrink
        self._connection: Connection | None = None
        self._lost = ""

    def run(self, work: Callable[[Connection], T]) -> T | None:
        """Do some work in one transaction. Return None if it failed; then nothing of it was recorded."""
        try:
            try:
                result = self._transact(work)
            except sqlite3.Error as why:
                if _code(why) in _BROKEN:
                    self._put_aside()
                elif _code(why) == sqlite3.SQLITE_FULL and self._at_limit():
                    self._transact(self._shrink)
                else:
                    raise
                result = self._transact(work)
        except sqlite3.Error as why:
            self._fail(_WAYS.get(_code(why), str(why)))
        except OSError as why:
            self._fail(why.strerror or str(why))
        except Unusable as why:
            self._fail(str(why))
        else:
            self.problem = self._lost
            return result
        return None

    @property
    def used_pages(self) -> tuple[int, int]:
        """The pages with content, and the limit."""
        connection = self._open()
        count, free = (
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count")
        )
        return count - free, self._pages

    def close(self) -> None:
        """Close the file. The next use opens it again."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _fail(self, why: str) -> None:
        self.problem = f"{NOT_RECORDED}: {self.file}: {why}"
        self.close()

    def _transact(self, work: Callable[[Connection], T]) -> T:
        connection = self._open()
        with _transaction(connection):
            return work(connection)

    def _open(self) -> Connection:
        if self._connection is None:
            _check(self.file)
            # Its own thread alone uses it, but that thread may be another one after a restart of the loop.
            self._connection = sqlite3.connect(
                self.file, timeout=0, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare(self._connection)
            except BaseException:
                self.close()
                raise
        return self._connection

    def _prepare(self, connection: Connection) -> None:
        # Without shared memory, which home directories on a network do not have.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > self._version:
            raise Unusable("a newer fenka has written it: use that one, or remove the file")
        for setting in (
            f"page_size = {PAGE_BYTES}",
            "auto_vacuum = INCREMENTAL",
            "journal_mode = WAL",
            # A power loss costs the last seconds, not the file.
            "synchronous = NORMAL",
            f"journal_size_limit = {MIN_BYTES}",
            f"max_page_count = {self._pages}",
        ):
            connection.execute(f"PRAGMA {setting}")
        with _transaction(connection):
            if version == 0:
                for statement in self._schema.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {self._version}")

    def _at_limit(self) -> bool:
        (count,) = self._open().execute("PRAGMA page_count").fetchone()
        return int(count) >= self._pages

    def _put_aside(self) -> None:
        self.close()
        aside = self.file.with_name(f"{self.file.name}.broken")
        os.replace(self.file, aside)
        for suffix in ("-wal", "-shm", "-journal"):
            self.file.with_name(self.file.name + suffix).unlink(missing_ok=True)
        self._lost = f"history begins again: {self.file} was broken, and is now {aside.name}"


def _code(why: sqlite3.Error) -> int:
    """Return the primary error code; 0 for an error of the module itself."""
    return getattr(why, "sqlite_errorcode", 0) & 0xFF


@contextlib.contextmanager
def _transaction(connection: Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _check(file: Path) -> None:
    """Make the directory and the file, or check that only this user can change them.

    Raises Unusable, OSError.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    user, directory = os.geteuid(), os.lstat(file.parent)
    if directory.st_uid not in (user, 0) or directory.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unusable(f"other users can write {file.parent}: `chmod go-w {file.parent}`")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        # SQLite's locks are not there yet: closing any descriptor of the file would end them.
        descriptor = os.open(file, flags, 0o600)
    except OSError:
        if file.is_symlink():
            raise Unusable("it is a symbolic link: remove it") from None
        raise
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != user or status.st_nlink > 1:
        raise Unusable(f"it is no file of user {user} alone: remove it")
