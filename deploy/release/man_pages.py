"""Man pages of all commands, one for each word after `fenka` and after `fenka admin`."""

import re
import time
from collections.abc import Iterator

from fenka.cli.command_tree import CommandHelp

PLUGINS = {"kubectl-fenka": "fenka", "kubectl-inspect-gpushare": "fenka-inspect"}
"""Plugins of kubectl, by the pages that describe them."""


def man_pages(tree: CommandHelp, version: str, epoch: int) -> dict[str, str]:
    """Return the pages by their file names, in roff's macros `man`.

    Args:
        tree: fenka's commands.
        version: fenka's.
        epoch: the time of the pages, in seconds since 1970.
    """
    date = time.strftime("%Y-%m-%d", time.gmtime(epoch))
    families = [tree]
    for command in tree.commands:
        operators = command.words == ("fenka", "admin")
        families += [command, *command.commands] if operators else [command]
    pages = {f"{plugin}.1": f".so man1/{page}.1\n" for plugin, page in PLUGINS.items()}
    for command in families:
        title = "-".join(command.words)
        overview = command.words in (("fenka",), ("fenka", "admin"))
        lines = [f'.TH {title.upper()} 1 {date} "fenka {version}" "fenka"']
        lines += [".SH NAME", f"{_text(title)} \\- {_text(command.summary.rstrip('.'))}"]
        lines += [".SH SYNOPSIS", *_synopsis(command)]
        lines += [".SH DESCRIPTION", _text(command.summary)]
        lines += _options(command)
        if command.commands:
            lines += [".SH COMMANDS", *_commands(command, overview=overview)]
        lines += [".SH SEE ALSO", _see_also(tree, command, overview=overview)]
        pages[f"{title}.1"] = "\n".join([*lines, ""])
    return pages


def _commands(command: CommandHelp, *, overview: bool) -> Iterator[str]:
    """Yield a line for each command of an overview, or a section for each command of a group."""
    for inner in command.commands:
        if overview:
            yield from (".TP", _bold(" ".join(inner.words)), _text(inner.summary))
        else:
            yield from (f'.SS "{_text(" ".join(inner.words))}"', _text(inner.summary))
            yield from (".PP", *_synopsis(inner), *_options(inner, section=False))


def _synopsis(command: CommandHelp) -> list[str]:
    words = [_bold(" ".join(command.words)), "[\\fIoptions\\fP]" if command.options else ""]
    words += ["\\fIcommand\\fP ..."] if command.commands else []
    words += [f"\\fI{_text(metavar)}\\fP" for metavar, _ in command.arguments]
    names = [" ".join((*command.words[:-1], alias)) for alias in command.aliases]
    lines = [" ".join(filter(None, words))]
    return lines + [f".br\n{_bold(name)} ..." for name in names]


def _options(command: CommandHelp, *, section: bool = True) -> Iterator[str]:
    if command.arguments:
        yield from [".SH ARGUMENTS"] if section else []
        for metavar, summary in command.arguments:
            yield from (".TP", f"\\fI{_text(metavar)}\\fP", _text(summary) or "\\&")
    if section:
        yield ".SH OPTIONS"
    for option in command.options:
        yield from (".TP", _bold(option.synopsis), _text(option.summary) or "\\&")


def _see_also(tree: CommandHelp, command: CommandHelp, *, overview: bool) -> str:
    names = ["-".join(command.words[:-1])] if len(command.words) > 1 else []
    if overview:
        names += ["-".join(inner.words) for inner in command.commands]
    elif command.words[1] != "admin":
        names += ["-".join(other.words) for other in tree.commands if other is not command]
    return "\n".join(f".BR {_text(name)} (1)," for name in names).removesuffix(",")


def _bold(text: str) -> str:
    return f"\\fB{_text(text)}\\fP"


def _text(text: str) -> str:
    """Return one line that roff prints as it is."""
    escaped = re.sub(r"\s+", " ", text).strip().replace("\\", "\\e").replace("-", "\\-")
    escaped = "".join(
        letter if letter.isascii() else f"\\[u{ord(letter):04X}]" for letter in escaped
    )
    # A line that begins with one of these would be a request.
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped
