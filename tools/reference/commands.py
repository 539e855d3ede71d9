"""The page of all commands, made of what `fenka COMMAND --help` knows."""

from collections.abc import Iterator
from typing import Any

import typer

from fenka.cli import main as table_of_commands
from tools.reference.markdown import MissingEntry, code, page, sentence, table

GENERIC = {"--help"}
HEAD = ("option", "meaning", "default")


def commands_page() -> str:
    """Return the page. Raises MissingEntry if a command, an argument or an option has no help."""
    parts = []
    for title, rows in (
        *table_of_commands.COMMANDS.items(),
        ("More", table_of_commands.MORE),
        *((f"Operate: {name}", rows) for name, rows in table_of_commands.ADMIN.items()),
    ):
        parts.append(f"## {title}")
        for row in rows:
            if row.function:
                command = typer.main.get_command(table_of_commands._load(row))
                parts += _command(command, f"fenka {row.name}", row.summary, row.aliases)
    first = "Each command of `fenka`, with its options. `fenka COMMAND --help` prints the same."
    return page("Commands", first, "src/fenka/cli", *parts)


def _command(command: Any, name: str, summary: str, aliases: tuple[str, ...]) -> Iterator[str]:
    """Yield a command's section, or those of a group's commands."""
    if hasattr(command, "commands"):
        yield f"### {name}"
        yield sentence(summary)
        rows = _rows(name, command)
        if rows:
            yield f"```text\n{name} [OPTIONS]\n```"
            yield table(HEAD, rows)
        for word, part in command.commands.items():
            if not part.hidden:
                yield from _command(part, f"{name} {word}", part.help or "", ())
        return
    text = sentence(command.help or summary)
    if not text:
        raise MissingEntry(f"{name} has no help")
    yield f"### {name}"
    yield text + (f" Also: {', '.join(map(code, aliases))}." if aliases else "")
    yield f"```text\n{name} {_usage(command.params)}\n```"
    rows = _rows(name, command)
    if rows:
        yield table(HEAD, rows)


def _rows(name: str, command: Any) -> list[tuple[str, str, str]]:
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    return [_row(name, parameter) for parameter in shown if not GENERIC & {*parameter.opts}]


def _usage(parameters: list[Any]) -> str:
    words = [_metavar(p) for p in parameters if p.param_type_name == "argument"]
    return " ".join(["[OPTIONS]", *words])


def _metavar(parameter: Any) -> str:
    name = str(parameter.metavar or parameter.name.upper())
    many = " …" if parameter.nargs == -1 else ""
    return f"{name}{many}" if parameter.required else f"[{name}{many}]"


def _row(name: str, parameter: Any) -> tuple[str, str, str]:
    text = getattr(parameter, "help", "") or ARGUMENTS.get((name, parameter.name), "")
    if not text:
        raise MissingEntry(f"{name}: {parameter.opts[0]} has no help")
    if parameter.param_type_name == "argument":
        return code(_metavar(parameter)), sentence(text), ""
    words = ", ".join([*parameter.opts, *parameter.secondary_opts])
    kind = "" if parameter.is_flag else f" {parameter.metavar or _kind(parameter)}"
    return code(f"{words}{kind}"), sentence(text), _default(parameter)


def _kind(parameter: Any) -> str:
    choices = getattr(parameter.type, "choices", None)
    return "|".join(map(str, choices)) if choices else str(parameter.type.name).upper()


def _default(parameter: Any) -> str:
    value = parameter.default
    if callable(value) or value in (None, "", [], (), False) or parameter.is_flag:
        return ""
    return code(str(getattr(value, "value", value)))


ARGUMENTS = {
    ("fenka stop", "names"): "names of jobs, notebooks and services",
    ("fenka delete", "names"): "names of workloads",
    ("fenka serve delete", "names"): "names of services",
}
"""Meanings of arguments whose names say enough in `--help`."""
