"""`fenka daemon`."""

import contextlib
import os
import select
import signal
from dataclasses import dataclass

from fenka.cli.errors import UserError
from fenka.workstation import files, main, paths, protocol
from fenka.workstation.client import EXIT_ALREADY_RUNNING, READY, Connection, open_log, start_daemon
from fenka.workstation.daemon import AlreadyRunning, Daemon
from fenka.workstation.files import Config
from fenka.workstation.shutdown import ShutdownSignals

ENDS_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Given:
    """The daemon's options as typed."""

    simulate: str
    policy: str
    unit: str
    only: tuple[str, ...]

    def options(self) -> list[str]:
        """The command line that says the same."""
        simulate = ["--simulate", self.simulate] if self.simulate else []
        only = [word for card in self.only for word in ("--only", card)]
        return [*simulate, "--policy", self.policy, "--unit", self.unit, *only]


def start(given: Given) -> None:
    """Start a daemon behind this command."""
    runtime = paths.own()
    if runtime.answers():
        raise UserError("a fenka daemon is already running here: `fenka doctor` shows it")
    start_daemon(runtime, given.options())
    print("the fenka daemon is running; `fenka daemon --stop` ends it")


def daemon(given: Given, *, resume: bool, background_child: bool, lifeline: bool) -> None:
    """Serve until told to stop.

    background_child: start_daemon has started this; stdout and stderr are its pipe until clients can connect.
    lifeline: end when standard input does.
    """
    ending = ShutdownSignals(0 if lifeline else None)
    runtime = paths.own()
    config = Config(given.simulate, given.policy, given.unit, list(given.only))
    if resume:
        config = files.load_config(runtime) or config
    # Now, when a reason to end can still be told.
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
    cards = ", ".join(f"{card.model} {card.memory_mib}MiB" for card in daemon.broker.node.cards)
    kind = "simulated cards" if daemon.hardware.driver.simulated else "cards"
    print(f"fenka daemon: leasing {kind} {cards} at {daemon.runtime.socket}", flush=True)


def stop(*, force: bool) -> None:
    """End the running daemon."""
    with Connection(paths.current()) as connection:
        ending = os.pidfd_open(connection.daemon_pid)
        answer = connection.call(protocol.Shutdown(force))
        if isinstance(answer, protocol.Failure):
            raise UserError(answer.reason)
    ended, _, _ = select.select([ending], [], [], ENDS_WITHIN_S)
    if not ended:
        raise UserError(
            f"the daemon has not ended within {ENDS_WITHIN_S:.0f} s: see `fenka doctor`"
        )
    print("the fenka daemon has ended")
