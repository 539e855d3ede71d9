"""All commands of fenka as data, read from their options, for man pages and shell completions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer
from typer.main import get_command

from fenka.cli.error_report import EXTRAS
from fenka.cli.main import ADMIN_ROWS, ADMIN_SUMMARY, SUMMARY, USERS_ROWS, Command, _load


@dataclass(frozen=True, slots=True)
class OptionHelp:
    """An option of a command.

    Attributes:
        names: All spellings, with those that negate it.
        synopsis: The spellings and the value as the help shows them.
        summary: The help's sentence.
        takes_value: Whether a word follows the option.
        choices: The values, if there are few.
        is_path: Whether the value is a file.
    """

    names: tuple[str, ...]
    synopsis: str
    summary: str
    takes_value: bool
    choices: tuple[str, ...]
    is_path: bool


@dataclass(frozen=True, slots=True)
class CommandHelp:
    """A command, or a group of commands.

    Attributes:
        words: All words of the command from `fenka` on.
        summary: One sentence.
        arguments: What follows the options: its name in the synopsis, and its help.
        options: In the help's order.
        commands: The group's commands.
        aliases: Other words for the last one.
    """

    words: tuple[str, ...]
    summary: str
    arguments: tuple[tuple[str, str], ...] = ()
    options: tuple[OptionHelp, ...] = ()
    commands: tuple["CommandHelp", ...] = ()
    aliases: tuple[str, ...] = ()

    def walk(self) -> Iterator["CommandHelp"]:
        """Yield this command and all below."""
        yield self
        for command in self.commands:
            yield from command.walk()


HELP = OptionHelp(("-h", "--help"), "-h, --help", "Show the help and exit.", False, (), False)
VERSION = OptionHelp(("--version",), "--version", "Show the version and exit.", False, (), False)


def command_tree() -> CommandHelp:
    """Return `fenka` with all commands. The programs of operators are below `fenka admin`."""
    users = (row for row in USERS_ROWS if row.name != "admin")
    commands = [_row(("fenka", row.name), row) for row in users]
    operators = tuple(_row(("fenka", "admin", row.name), row) for row in ADMIN_ROWS)
    commands.append(CommandHelp(("fenka", "admin"), ADMIN_SUMMARY, (), (HELP,), operators))
    return CommandHelp(("fenka",), SUMMARY, (), (VERSION, HELP), tuple(commands))


def _row(words: tuple[str, ...], row: Command) -> CommandHelp:
    try:
        app = _load(row)
    except ModuleNotFoundError as why:
        if (why.name or "").partition(".")[0] not in EXTRAS:
            raise
        # This installation lacks a package that the command needs.
        return CommandHelp(words, row.summary, options=(HELP,), aliases=row.aliases)
    return _command(words, get_command(app), row.summary, row.aliases)


def _command(
    words: tuple[str, ...], command: Any, summary: str = "", aliases: tuple[str, ...] = ()
) -> CommandHelp:
    names = command.context_settings["help_option_names"]
    context = typer.Context(command, info_name=words[-1], help_option_names=names)
    arguments, options = [], []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None:
            continue
        if parameter.param_type_name == "argument":
            arguments.append((parameter.make_metavar(context), record[1]))
        else:
            options.append(_option(parameter, record))
    commands = getattr(command, "commands", {}).items()
    return CommandHelp(
        words,
        summary or command.get_short_help_str(limit=200),
        tuple(arguments),
        tuple(options),
        tuple(_command((*words, name), inner) for name, inner in commands if not inner.hidden),
        aliases,
    )


def _option(parameter: Any, record: tuple[str, str]) -> OptionHelp:
    # Those of --help come from a set, whose order differs between runs.
    names = tuple(
        sorted(
            (*parameter.opts, *parameter.secondary_opts), key=lambda name: not name.startswith("--")
        )
    )
    return OptionHelp(
        names,
        record[0],
        record[1],
        takes_value=not (parameter.is_flag or parameter.count or parameter.name == "help"),
        choices=tuple(map(str, getattr(parameter.type, "choices", ()))),
        is_path=parameter.type.name in ("path", "file", "filename"),
    )
