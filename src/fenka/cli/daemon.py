"""`fenka daemon`."""

import contextlib
import os
import select
import signal
from typing import Annotated

import msgspec
import typer

from fenka.cli.errors import UserError
from fenka.workstation import files, main, paths, protocol
from fenka.workstation.client import EXIT_ALREADY_RUNNING, READY, Connection, open_log, start_daemon
from fenka.workstation.daemon import Daemon
from fenka.workstation.files import AlreadyRunning, Config
from fenka.workstation.shutdown import ShutdownSignals

ENDS_WITHIN_S = 10.0


def daemon(
    config: Config,
    background: Annotated[
        bool, typer.Option("--background", "-b", help="run in the background")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="end the running daemon")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="with --stop: even if programs run; they go on")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", hidden=True)] = False,
    background_child: Annotated[bool, typer.Option("--background-child", hidden=True)] = False,
    lifeline: Annotated[bool, typer.Option("--lifeline", hidden=True)] = False,
) -> None:
    """Start, run or end the daemon.

    Args:
        config: What to lease.
        background: Return once the daemon answers.
        stop: End the daemon that runs.
        force: End it even if programs hold slices.
        resume: Use the configuration of the previous daemon, if it left one.
        background_child: start_daemon started this; stdout and stderr are its pipe until clients can connect.
        lifeline: End when standard input reaches its end.
    """
    if stop:
        _stop(force=force)
    elif background:
        _start(config)
    else:
        _serve(config, resume=resume, background_child=background_child, lifeline=lifeline)


def _start(config: Config) -> None:
    runtime = paths.own()
    if runtime.answers():
        raise UserError("a fenka daemon already runs here: `fenka doctor` describes it")
    start_daemon(runtime, _words(config))
    print("the fenka daemon is running; `fenka daemon --stop` ends it")


def _words(config: Config) -> list[str]:
    """Return a configuration as words of a command line."""
    words: list[str] = []
    for name, value in msgspec.structs.asdict(config).items():
        for word in filter(None, value if isinstance(value, list) else [value]):
            words += [f"--{name}", word]
    return words


def _serve(config: Config, *, resume: bool, background_child: bool, lifeline: bool) -> None:
    ending = ShutdownSignals(0 if lifeline else None)
    runtime = paths.own()
    if resume:
        config = files.load_config(runtime) or config
    # Now, when a reason to end can still be reported.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log = open_log(str(runtime.log), flags) if background_child else None

    def ready(daemon: Daemon) -> None:
        if log is not None:
            _redirect_to_log(log)
        with contextlib.suppress(OSError):  # The disk is full: that is no reason to end.
            _announce(daemon)

    try:
        left = main.run(runtime, config, ready, ending)
    except AlreadyRunning as why:
        raise UserError(str(why), EXIT_ALREADY_RUNNING if background_child else 1) from None
    except Exception:
        # Ctrl-C may have ended a program that the start needs.
        if signal.SIGINT in ending.signals:
            raise KeyboardInterrupt from None
        raise
    if left:
        print(f"fenka daemon: ended; {', '.join(left)} go on, and the next daemon knows them")
    if signal.SIGINT in ending.signals:
        raise KeyboardInterrupt


def _redirect_to_log(log: int) -> None:
    """Tell who started us, and talk to the log from now on. Raises BrokenPipeError."""
    os.write(1, READY)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


def _announce(daemon: Daemon) -> None:
    cards = ", ".join(
        f"{card.model} {card.memory_mib}MiB"
        for card in daemon.broker.node.cards
        if card.parent is None
    )
    kind = "simulated cards" if daemon.hardware.driver.simulated else "cards"
    print(f"fenka daemon: leasing {kind} {cards} at {daemon.runtime.socket}", flush=True)


def _stop(*, force: bool) -> None:
    with Connection(paths.current()) as connection:
        ending = os.pidfd_open(connection.daemon_pid)
        connection.request(protocol.Shutdown(force), protocol.Done)
    ended, _, _ = select.select([ending], [], [], ENDS_WITHIN_S)
    if not ended:
        raise UserError(
            f"the daemon has not ended within {ENDS_WITHIN_S:.0f} s: see `fenka doctor`"
        )
    print("the fenka daemon has ended")
