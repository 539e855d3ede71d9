"""Completion of commands, options and values in bash, zsh and fish. No Python runs when people press Tab."""

import shlex
from collections.abc import Iterator
from typing import Literal

from fenka.cli.command_tree import CommandHelp, OptionHelp

Shell = Literal["bash", "zsh", "fish"]

PATHS: dict[Shell, str] = {
    "bash": "bash-completion/completions/fenka",
    "zsh": "zsh/site-functions/_fenka",
    "fish": "fish/vendor_completions.d/fenka.fish",
}
"""Where shells look for the script, below `share`."""

_POSIX = """\
# Each function has a table of fenka's commands. A command's key is its words.
__fenka_step() {
  case "$1 $2" in
@STEPS@
    *) return 1 ;;
  esac
}
__fenka_value() {
  case "$1 $2" in
@VALUES@
    *) return 1 ;;
  esac
}
"""

_BASH = (
    "# Completion of fenka in bash.\n"
    + _POSIX
    + """\
__fenka_words() {
  case "$1" in
@WORDS@
  esac
}
_fenka() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} at=fenka next word
  COMPREPLY=()
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    # The words of another program follow.
    if [[ $word == -- ]]; then COMPREPLY=($(compgen -f -- "$current")); return; fi
    next=$(__fenka_step "$at" "$word") && at=$next
  done
  if word=$(__fenka_value "$at" "$previous"); then
    case $word in
      @file) COMPREPLY=($(compgen -f -- "$current")) ;;
      @word) ;;
      *) COMPREPLY=($(compgen -W "$word" -- "$current")) ;;
    esac
    return
  fi
  COMPREPLY=($(compgen -W "$(__fenka_words "$at")" -- "$current"))
}
complete -o bashdefault -o default -F _fenka fenka
"""
)

_ZSH = (
    "#compdef fenka\n"
    + _POSIX
    + """\
__fenka_described() {
  case "$1" in
@DESCRIBED@
  esac
}
_fenka() {
  local at=fenka next word previous=$words[CURRENT-1]
  local -a described
  for word in $words[2,CURRENT-1]; do
    if [[ $word == -- ]]; then _files; return; fi
    next=$(__fenka_step "$at" "$word") && at=$next
  done
  if word=$(__fenka_value "$at" "$previous"); then
    case $word in
      @file) _files ;;
      @word) _message value ;;
      *) compadd -- ${=word} ;;
    esac
    return
  fi
  described=(${(f)"$(__fenka_described "$at")"})
  _describe command described || _files
}
if [[ $funcstack[1] == _fenka ]]; then _fenka "$@"; else compdef _fenka fenka; fi
"""
)

_FISH = """\
# Completion of fenka in fish.
function __fenka_at
    set -l at fenka
    for word in (commandline -opc)[2..]
        switch "$at $word"
@STEPS@
        end
    end
    test "$at" = "$argv"
end
complete -c fenka -f
@OPTIONS@
"""


def completions(tree: CommandHelp) -> dict[str, str]:
    """Return the scripts by their paths below `share`, where shells look for them."""
    commands = list(tree.walk())
    steps = list(_steps(tree, commands))
    posix = {
        "STEPS": [
            f"    {shlex.quote(f'{key} {word}')}) echo {shlex.quote(to)} ;;"
            for key, word, to in steps
        ],
        "VALUES": [
            f"    {_patterns(command, option)}) echo {shlex.quote(_values(option))} ;;"
            for command in commands
            for option in command.options
            if option.takes_value
        ],
        "WORDS": [
            f"    {shlex.quote(_key(command))}) echo {shlex.quote(' '.join(_words(command)))} ;;"
            for command in commands
        ],
        "DESCRIBED": [
            f"    {shlex.quote(_key(command))}) print -rl -- {' '.join(_described(command))} ;;"
            for command in commands
        ],
    }
    fish = {
        "STEPS": [
            f"            case {shlex.quote(f'{key} {word}')}\n                set at {to}"
            for key, word, to in steps
        ],
        "OPTIONS": [line for command in commands for line in _fish_lines(command)],
    }
    return {
        PATHS["bash"]: _filled(_BASH, posix),
        PATHS["zsh"]: _filled(_ZSH, posix),
        PATHS["fish"]: _filled(_FISH, fish),
    }


def _filled(template: str, tables: dict[str, list[str]]) -> str:
    for name, lines in tables.items():
        template = template.replace(f"@{name}@", "\n".join(lines))
    return template


def _key(command: CommandHelp) -> str:
    return " ".join(command.words)


def _steps(tree: CommandHelp, commands: list[CommandHelp]) -> Iterator[tuple[str, str, str]]:
    """Yield a command's key, a word that may follow, and the key of the command that it leads to."""
    for command in commands:
        for inner in command.commands:
            for word in (inner.words[-1], *inner.aliases):
                yield _key(command), word, _key(inner)
    # Operators' words work without `admin`, too.
    admin = next(command for command in tree.commands if command.words[-1] == "admin")
    for inner in admin.commands:
        yield "fenka", inner.words[-1], _key(inner)


def _words(command: CommandHelp) -> Iterator[str]:
    for inner in command.commands:
        yield inner.words[-1]
    for option in command.options:
        yield from option.names


def _patterns(command: CommandHelp, option: OptionHelp) -> str:
    return "|".join(shlex.quote(f"{_key(command)} {name}") for name in option.names)


def _values(option: OptionHelp) -> str:
    """Return the values of an option, or a mark for a file or for another word."""
    return " ".join(option.choices) or ("@file" if option.is_path else "@word")


def _described(command: CommandHelp) -> Iterator[str]:
    """Yield `name:summary` for zsh, which ends the name at the first colon."""
    for inner in command.commands:
        yield shlex.quote(f"{inner.words[-1]}:{inner.summary}")
    for option in command.options:
        yield from (shlex.quote(f"{name}:{option.summary}") for name in option.names)


def _fish_lines(command: CommandHelp) -> Iterator[str]:
    start = f"complete -c fenka -n '__fenka_at {_key(command)}'"
    for inner in command.commands:
        yield f"{start} -a {inner.words[-1]} -d {_fish_quoted(inner.summary)}"
    for option in command.options:
        names = " ".join(
            f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names
        )
        value = ""
        if option.takes_value:
            choices = f" -a {_fish_quoted(' '.join(option.choices))}" if option.choices else ""
            value = " -r -F" if option.is_path else f" -x{choices}"
        yield f"{start} {names}{value} -d {_fish_quoted(option.summary)}"
    if command.arguments:
        yield f"{start} -F"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
