"""`fenka daemon`."""

import os
import select
from dataclasses import dataclass

from fenka.cli.errors import Problem
from fenka.workstation import files, main, paths, protocol
from fenka.workstation.client import Connection, start_daemon
from fenka.workstation.daemon import Daemon
from fenka.workstation.files import Config

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


def daemon(given: Given, *, background: bool, resume: bool) -> None:
    """Serve in the foreground, or start behind and say so."""
    runtime = paths.own()
    if background:
        if runtime.answers():
            raise Problem("a fenka daemon is already running here: `fenka doctor` shows it")
        start_daemon(runtime, given.options())
        print("the fenka daemon is running; `fenka daemon --stop` ends it")
        return
    config = Config(given.simulate, given.policy, given.unit, list(given.only))
    if resume:
        config = files.load_config(runtime) or config
    left = main.run(runtime, config, _announce)
    if left:
        print(f"fenka daemon: ended; {', '.join(left)} go on, and the next daemon knows them")


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
            raise Problem(answer.reason)
    ended, _, _ = select.select([ending], [], [], ENDS_WITHIN_S)
    if not ended:
        raise Problem(f"the daemon has not ended within {ENDS_WITHIN_S:.0f} s: see `fenka doctor`")
    print("the fenka daemon has ended")
