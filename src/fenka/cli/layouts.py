"""The layout of all screens: an option, else FENKA_LAYOUT, else the user's configuration file."""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import typer

from fenka.cli.errors import UserError
from fenka.core.errors import INVALID_INPUT

Layout = Literal["fenka", "old", "arena"]
NAMES = ("fenka", "old", "arena")
CONFIGURATION = Path(".config/fenka/config.toml")
"""In the user's home directory."""

LayoutOption = Annotated[
    Layout | None,
    typer.Option("--layout", help="arena: as arena today; old: as before 0.2 (the default)"),
]


def uses_arena(option: Layout | None) -> bool:
    """Return whether screens look as today's arena; else they look as the articles show them.

    Raises UserError for a layout that does not exist.
    """
    return (option or _configured()) == "arena"


def _configured() -> str:
    if name := os.environ.get("FENKA_LAYOUT"):
        return _checked(name, "FENKA_LAYOUT")
    file = CONFIGURATION
    try:
        file = Path.home() / CONFIGURATION
        settings = tomllib.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError, RuntimeError):
        # RuntimeError: the user has no home directory, as in many containers.
        return "fenka"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as why:
        raise UserError(f"{file} cannot be read: {why}", INVALID_INPUT) from None
    unknown = settings.keys() - {"layout"}
    if unknown:
        raise UserError(
            f"unknown setting {min(unknown)!r} in {file}: the only setting is layout", INVALID_INPUT
        )
    return _checked(settings.get("layout", "fenka"), f"layout in {file}")


def _checked(name: object, source: str) -> str:
    if name not in NAMES:
        raise UserError(f"invalid {source}: {name!r} is none of {', '.join(NAMES)}", INVALID_INPUT)
    return str(name)
