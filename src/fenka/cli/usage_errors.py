"""Describes wrong words of a command in one sentence, instead of the option parser's own.

`cli/main.py` calls each command within `one_sentence`. The parser's own exceptions have no public names, so
they are known by their attributes.
"""

import contextlib
import re
import sys
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from typing import Any

import typer

from fenka.cli.error_report import UserError
from fenka.core.errors import INVALID_INPUT

_USAGE_ERROR: Any = typer.BadParameter.__base__
_MOST = 80
"""Characters of a mistyped word that are repeated."""

_NOT_A_NUMBER = re.compile(r"(.*) is not a valid (int|integer|float)(?: range)?\.", re.DOTALL)
_RANGE = re.compile(r"(.*) is not in the range (.*)\.", re.DOTALL)
_LEAST, _MOST_OF = re.compile(r"(.+)<=x|x>=(.+)"), re.compile(r"x<=(.+)")
_NO_COMMAND = re.compile(r"No such command '(.*?)'\.", re.DOTALL)


def unknown(kind: str, word: str, known: Collection[str], otherwise: str) -> UserError:
    """Return the failure for a word that is no option or command.

    Args:
        kind: option or command.
        word: As typed.
        known: All options or commands.
        otherwise: Advice if no known word is similar.
    """
    near = get_close_matches(word[:_MOST], known)
    hint = f"did you mean {' or '.join(near)}?" if near else otherwise
    return UserError(f"there is no {kind} {word[:_MOST]}: {hint}", INVALID_INPUT)


@contextlib.contextmanager
def one_sentence(command: str) -> Iterator[None]:
    """Say in one sentence what is wrong with a command's words. Raises UserError.

    Args:
        command: The words that lead to the command, for its help.
    """
    try:
        yield
    except _USAGE_ERROR as why:
        if why.ctx is not None:
            command = why.ctx.command_path
        if why.ctx is not None and why.message == why.ctx.get_help():
            # The help of a group, as the answer to its name alone.
            sys.stderr.write(f"{why.message}\n")
            sys.exit(INVALID_INPUT)
        raise _failure(why, f"`{command} --help`", command) from None


def _failure(why: Any, help_command: str, command: str) -> UserError:
    if isinstance(why, typer.BadParameter):
        return UserError(_bad_value(why, help_command, command), INVALID_INPUT)
    commands = getattr(getattr(why, "cmd", None), "commands", {})
    if found := _NO_COMMAND.match(why.message):
        shown = [name for name, inner in commands.items() if not inner.hidden]
        return unknown("command", found[1], shown, f"{help_command} lists all")
    name = getattr(why, "option_name", "")
    if hasattr(why, "possibilities"):
        known = [option for param in why.cmd.params for option in param.opts] if why.cmd else []
        return unknown("option", name, known, f"{help_command} lists all")
    if name and "not take a value" in why.message:
        return UserError(f"{name} takes no value: write it without one", INVALID_INPUT)
    if name:
        return UserError(f"{name} needs a value: {help_command} explains it", INVALID_INPUT)
    sentence = why.message.rstrip(".")
    if found := re.match(
        r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", sentence, re.DOTALL
    ):
        sentence = f"{found[1][:_MOST]} is more than `{command}` takes"
    return UserError(f"{sentence}: {help_command} shows its words", INVALID_INPUT)


def _bad_value(why: Any, help_command: str, command: str) -> str:
    if why.param is None:
        return str(why.message.rstrip("."))
    name = _name(why.param, why.ctx)
    if hasattr(why, "param_type"):
        # The parser's exception for a missing option or argument.
        return f"`{command}` needs {name}: {help_command} explains it"
    message = why.message.rstrip(".")
    if found := _NOT_A_NUMBER.fullmatch(why.message):
        message = f"{found[1]} is no {'number' if found[2] == 'float' else 'whole number'}"
    elif found := _RANGE.fullmatch(why.message):
        message = f"{found[1]} is {_bounds(found[2])}"
    return f"{name}: {message}"


def _bounds(text: str) -> str:
    """Return what is wrong with a number outside of the parser's `1<=x<=9`, `x>=1` or `x<=9`."""
    least, most = _LEAST.match(text), _MOST_OF.search(text)
    if least and most:
        return f"not from {least[1]} to {most[1]}"
    return f"less than {least[1] or least[2]}" if least else f"more than {most[1] if most else ''}"


def _name(param: Any, context: Any) -> str:
    """Return an option's long name, or an argument's name as the help shows it."""
    if param.param_type_name == "option":
        return str(max(param.opts, key=lambda name: name.startswith("--")))
    name = str(param.make_metavar(context)) if context else str(param.human_readable_name)
    return name.strip("[]").removesuffix("...")
