"""`fenka docker run` and `fenka podman run`: options translated, and who pays said. Then the engine runs.

No slice is taken here: the container's hook asks for one at each start, so that restarts need no command.
"""

import os
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from fenka.cli.error_report import UserError
from fenka.core.errors import INVALID_INPUT, PROGRAM_NOT_FOUND
from fenka.workstation import paths, protocol
from fenka.workstation.client import DaemonConnection
from fenka.workstation.containers.cdi_devices import CARDS, SLICES

VARIABLES = {
    "--gpu-mem": "FENKA_GPU_MEM",
    "--gpu-core": "FENKA_GPU_CORE",
    "--gpu-core-mode": "FENKA_GPU_CORE_MODE",
    "--cards": "FENKA_CARDS",
    "--time-limit": "FENKA_TIME_LIMIT",
    "--team": "FENKA_TEAM",
    "--keep": "FENKA_KEEP",
}
"""Options of fenka's, which come first, and what they are in a container's environment."""

_WHOLE, _NO_WAIT = "--whole-cards", "--no-wait"

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="run --gpu-mem 4 IMAGE",
        help=f"fenka's options come first: {', '.join([*VARIABLES, _WHOLE, _NO_WAIT])}; "
        "then the engine's",
    ),
]


def docker(words: Words) -> None:
    """Become `docker run`."""
    _become("docker", words, ticket=True)


def podman(words: Words) -> None:
    """Become `podman run`."""
    # Without root, the kernel says whose container it is.
    _become("podman", words, ticket=os.geteuid() == 0)


def _become(engine: str, words: Sequence[str], *, ticket: bool) -> NoReturn:
    command = translate(engine, words)
    if ticket:
        with DaemonConnection(paths.current()) as daemon:
            made = daemon.request(protocol.CreateTicket(), protocol.Done)
        command[2:2] = ["-e", f"FENKA_TICKET={made.text}"]
    try:
        os.execvp(engine, command)
    except FileNotFoundError:
        raise UserError(f"there is no program called {engine}", PROGRAM_NOT_FOUND) from None


def translate(engine: str, words: Sequence[str]) -> list[str]:
    """Return the engine's command. Raises UserError."""
    verb, *rest = words
    if verb not in ("run", "create"):
        raise UserError(
            f"fenka {engine} knows run and create, not {verb[:80]}: use `{engine} {verb[:80]}` itself",
            INVALID_INPUT,
        )
    given, device, flags = dict[str, str](), "", list[str]()
    while rest:
        name, equals, value = rest[0].partition("=")
        if name == _NO_WAIT and not equals:
            flags += ["-e", "FENKA_WAIT=refuse"]
            rest = rest[1:]
            continue
        if name not in VARIABLES and name != _WHOLE:
            break
        if not equals and len(rest) < 2:
            raise UserError(f"{name} needs a value", INVALID_INPUT)
        value, rest = (value, rest[1:]) if equals else (rest[1], rest[2:])
        if name == _WHOLE:
            device = f"{CARDS}={value}"
        else:
            given[name] = value
    if not device and "--gpu-mem" not in given:
        raise UserError(
            f"no amount given: use `fenka {engine} {verb} --gpu-mem 4` for a slice, or {_WHOLE} 1; fenka's "
            f"options come before {engine}'s",
            INVALID_INPUT,
        )
    for name, value in given.items():
        flags += ["-e", f"{VARIABLES[name]}={value}"]
    return [engine, verb, "--device", device or f"{SLICES}=any", *flags, *rest]
