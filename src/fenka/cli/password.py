"""Passwords of notebooks: where they come from, and how the process list does not keep them."""

import ctypes
import getpass
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fenka.cli.errors import UserError
from fenka.core.errors import INVALID_INPUT

MAX_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PasswordOptions:
    """The password of a notebook."""

    password: Annotated[
        str,
        typer.Option(
            "--password",
            envvar="PASSWORD",
            help="password of the login page; for a moment, ps shows one that is given here",
        ),
    ] = ""
    password_file: Annotated[
        Path | None,
        typer.Option(
            "--password-file", metavar="FILE", help="first line is the password; -: standard input"
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.password:
            conceal(self.password)

    def read(self, *, ask: bool) -> str:
        """Return the password. `ask`: prompt for it on a terminal if none is given. Raises UserError."""
        if self.password_file is not None:
            if self.password:
                raise UserError("--password-file: leave out --password and PASSWORD", INVALID_INPUT)
            return _first_line(self.password_file)
        if not self.password and ask and sys.stdin.isatty():
            return getpass.getpass("Password of the notebook: ")
        return self.password


def _first_line(path: Path) -> str:
    if str(path) == "-":
        line = sys.stdin.readline(MAX_FILE_BYTES)
    else:
        with path.open() as file:
            line = file.readline(MAX_FILE_BYTES)
    if not line.strip():
        raise UserError(f"{path} has no password in its first line", INVALID_INPUT)
    return line.rstrip("\r\n")


def conceal(password: str) -> None:
    """Overwrite the password among this process's arguments, which all users of the machine can read."""
    try:
        line = Path("/proc/self/cmdline").read_bytes()
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start = int(fields[45])  # arg_start, the 48th field of the file
    except (OSError, IndexError, ValueError):
        return
    secret = password.encode(errors="surrogateescape")
    for match in re.finditer(rb"(?<=[\0=])%b(?=\0)" % re.escape(secret), line):
        if start:
            ctypes.memset(start + match.start(), ord("x"), len(secret))
