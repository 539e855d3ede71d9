"""`fenka compose up`: says who pays for the services of a Compose file that have slices. Then Compose runs.

Compose gets one more file, which gives these services a ticket. The project keeps its ticket, so that Compose
finds unchanged services unchanged. No slice is taken here, as with `fenka docker run`.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import yaml

from fenka.cli.error_report import UserError
from fenka.core.errors import INVALID_INPUT, PROGRAM_NOT_FOUND
from fenka.isolation.lease_files import read_regular_file, write_atomically
from fenka.workstation import paths, protocol
from fenka.workstation.client import DaemonConnection

VERBS = ("up", "create", "run", "scale")
"""Commands of Compose that make containers."""

FILES = (
    *("compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml"),
    *("podman-compose.yml", "podman-compose.yaml"),
)
"""The names that Compose looks for, in its order."""

_DEVICE, _MAX_BYTES = "fenka.io/", 1 << 20


Words = Annotated[
    list[str], typer.Argument(metavar="up [ARGS]...", help=f"one of {', '.join(VERBS)}")
]


@dataclass(frozen=True, slots=True)
class ComposeOptions:
    """Options of Compose itself, which come before its command."""

    file: Annotated[
        list[str] | None, typer.Option("--file", "-f", help="a Compose file; repeatable")
    ] = None
    project_name: Annotated[
        str, typer.Option("--project-name", "-p", metavar="NAME", help="name of the project")
    ] = ""
    profile: Annotated[
        list[str] | None, typer.Option("--profile", help="a profile to start, too; repeatable")
    ] = None
    env_file: Annotated[
        list[str] | None,
        typer.Option("--env-file", metavar="FILE", help="values for the Compose file; repeatable"),
    ] = None
    project_directory: Annotated[
        str,
        typer.Option("--project-directory", metavar="DIR", help="where relative paths begin"),
    ] = ""

    def words(self, files: Iterable[str]) -> list[str]:
        """Return them as Compose reads them. files: the Compose files."""
        named: dict[str, Iterable[str]] = {
            "--file": files,
            "--project-name": [self.project_name],
            "--profile": self.profile or (),
            "--env-file": self.env_file or (),
            "--project-directory": [self.project_directory],
        }
        # Each program reads a value in a word of its own.
        return [
            word
            for name, given in named.items()
            for value in given
            if value
            for word in (name, value)
        ]


def compose(
    words: Words,
    options: ComposeOptions,
    program: Annotated[
        str,
        typer.Option(
            "--program",
            metavar="COMMAND",
            help="the Compose to use; without it docker compose, docker-compose or podman-compose",
        ),
    ] = "",
) -> None:
    """Become Compose."""
    command = program.split() or _find_program()
    if words[0] not in VERBS:
        raise UserError(
            f"fenka compose knows {', '.join(VERBS)}, not {words[0][:80]}: use "
            f"`{' '.join(command)} {words[0][:80]}` itself",
            INVALID_INPUT,
        )
    # A further file would be the only one.
    files = options.file or found_files(options.project_directory, os.environ)
    project = _resolved(command, options.words(files))
    services = [*with_slices(project)]
    if not services:
        raise UserError(
            "no service of this Compose file has a slice: give one `devices: [fenka.io/slice=4]`",
            INVALID_INPUT,
        )
    check_program(command, project, services)
    # Without root, the kernel says whose containers Podman's are.
    if "podman" not in command[0] or os.geteuid() == 0:
        directory = Path(files[0]).resolve().parent
        name = options.project_name or project.get("name", "")
        files = [*files, str(_ticket_file(f"{directory}\0{name}", services))]
    _become([*command, *options.words(files), *words])


def found_files(directory: str, environment: Mapping[str, str]) -> list[str]:
    """Return the files that Compose would read if none is named, in its order. Raises UserError.

    Args:
        directory: The project's; empty for the current one.
        environment: This process's.
    """
    separator = environment.get("COMPOSE_PATH_SEPARATOR") or os.pathsep
    named = filter(None, environment.get("COMPOSE_FILE", "").split(separator))
    return [*named] or _default_files(Path(directory))


def _default_files(directory: Path) -> list[str]:
    """Return the file that Compose finds, and its override. Raises UserError."""
    for folder in (directory, *directory.absolute().parents):
        found = next((folder / name for name in FILES if (folder / name).exists()), None)
        if found is None:
            continue
        if _sets_files(folder / ".env"):
            raise UserError(
                f"{folder / '.env'} sets COMPOSE_FILE: name its files with -f", INVALID_INPUT
            )
        overrides = (found.with_name(f"{found.stem}.override{end}") for end in (".yml", ".yaml"))
        return [*map(str, (found, *[path for path in overrides if path.exists()][:1]))]
    raise UserError(
        f"there is no {FILES[0]} in {directory} or above it: name the file with -f", INVALID_INPUT
    )


def _sets_files(path: Path) -> bool:
    try:
        text = read_regular_file(path, _MAX_BYTES, follow_link=True).decode(errors="replace")
    except OSError:
        return False
    return any(line.split("=")[0].strip() == "COMPOSE_FILE" for line in text.splitlines())


def _find_program() -> list[str]:
    """Return the command of the Compose that is here. Raises UserError."""
    docker = ["docker", "compose"]
    if shutil.which("docker"):
        plugin = subprocess.run([*docker, "version"], capture_output=True, check=False)
        if plugin.returncode == 0:
            return docker
    for name in ("docker-compose", "podman-compose"):
        if shutil.which(name):
            return [name]
    raise UserError(
        "there is no Compose: install Docker's plugin, docker-compose or podman-compose",
        PROGRAM_NOT_FOUND,
    )


def _resolved(command: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """Return the Compose file as Compose itself reads it. Raises UserError, SystemExit."""
    words = [*command, *options, "config"]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False
        )
    except FileNotFoundError:
        raise UserError(f"there is no program called {words[0]}", PROGRAM_NOT_FOUND) from None
    if done.returncode:
        sys.exit(done.returncode)
    try:
        project = yaml.load(done.stdout, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError):
        project = None
    if not isinstance(project, dict) or not isinstance(project.get("services"), dict):
        raise UserError(
            f"`{' '.join(words)}` shows no services: use a newer Compose", INVALID_INPUT
        )
    return project


def with_slices(project: Mapping[str, Any]) -> Iterator[str]:
    """Yield the services that have a device of fenka's."""
    for name, service in project["services"].items():
        if isinstance(service, dict) and any(
            text.startswith(_DEVICE)
            for key in ("devices", "deploy")
            for text in _texts(service.get(key))
        ):
            yield name


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def check_program(
    command: Sequence[str], project: Mapping[str, Any], services: Sequence[str]
) -> None:
    """Refuse what the program would leave out without a word. Raises UserError."""
    for name in services:
        if "podman-compose" in command[0] and not any(
            text.startswith(_DEVICE) for text in _texts(project["services"][name].get("devices"))
        ):
            raise UserError(
                f"podman-compose starts {name} without its slice, since it does not read "
                "deploy.resources.reservations.devices: use `devices: [fenka.io/slice=any]`",
                INVALID_INPUT,
            )


def _ticket_file(project: str, services: Sequence[str]) -> Path:
    """Write the file that gives services the project's ticket. Raises FenkaError, OSError."""
    path = paths.compose_file(project)
    try:
        former = json.loads(read_regular_file(path, _MAX_BYTES))["x-fenka-ticket"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        former = ""
    with DaemonConnection(paths.current()) as daemon:
        ticket = daemon.request(
            protocol.CreateTicket(project=True, former=str(former)), protocol.Done
        ).text
    environment = {"environment": {"FENKA_TICKET": ticket}}
    content = {"x-fenka-ticket": ticket, "services": dict.fromkeys(services, environment)}
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=1).encode())
    return path


def _become(command: list[str]) -> NoReturn:
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        raise UserError(f"there is no program called {command[0]}", PROGRAM_NOT_FOUND) from None
