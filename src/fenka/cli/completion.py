"""`fenka completion SHELL`: prints the script that lets a shell complete fenka's words."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fenka.cli.command_tree import command_tree
from fenka.cli.completion_scripts import PATHS, Shell, completions


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish", help="whose script")],
) -> None:
    """Print the installation's script, or one made from the commands of this installation."""
    installed = Path(sys.prefix) / "share" / PATHS[shell]
    if installed.is_file():
        sys.stdout.write(installed.read_text("utf-8"))
    else:
        sys.stdout.write(completions(command_tree())[PATHS[shell]])
