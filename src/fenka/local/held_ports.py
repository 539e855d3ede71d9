"""Keeps the ports of a service's replicas from other programs while the gateway sends requests there.

When a replica's program closes its port, any program could listen there before the gateway has a new table,
and would get requests with their tokens. So the supervisor has a copy of each listening socket. It closes the
copy when the gateway uses a table without that replica.
"""

import contextlib

from fenka.hardware.peer_credentials import ListenerCopy, copy_listener
from fenka.jobs.local_ports import LOOPBACK


class HeldPorts:
    """The copies of one service."""

    def __init__(self) -> None:
        self._held = dict[int, ListenerCopy]()
        self._given_up = list[tuple[int, ListenerCopy]]()
        self._unrouted = list[tuple[int, int, ListenerCopy]]()

    def hold(self, port: int, pid: int) -> None:
        """Hold a port on which a process or a descendant listens.

        Where the kernel does not allow it, the port is only checked from time to time.
        """
        if port in self._held:
            return
        with contextlib.suppress(OSError):
            copy = copy_listener((LOOPBACK, port), pid)
            if copy is not None:
                self._held[port] = copy

    def is_left(self, port: int) -> bool:
        """Return whether the program has closed a port that is held.

        Then the copy is all that listens there, and the kernel names this user as its owner.
        """
        copies = [*self._held.items(), *self._given_up]
        copies += [(number, copy) for _, number, copy in self._unrouted]
        return any(number == port and not copy.is_served() for number, copy in copies)

    def give_up(self, port: int) -> None:
        """Hold a port only until the gateway has its next table."""
        copy = self._held.pop(port, None)
        if copy is not None:
            self._given_up.append((port, copy))

    def settle(self, routed: int, used: int) -> None:
        """Close what the gateway knows to have been given up.

        Args:
            routed: The number of the newest table, in which ports that were given up get no requests.
            used: The number of the table that the gateway uses.
        """
        self._unrouted += [(routed, port, copy) for port, copy in self._given_up]
        self._given_up = []
        for table, _, copy in self._unrouted:
            if table <= used:
                copy.close()
        self._unrouted = [entry for entry in self._unrouted if entry[0] > used]

    def close_inherited(self) -> None:
        """Close, in a replica's process, what belongs to the supervisor."""
        given_up = [copy for _, copy in self._given_up]
        unrouted = [copy for *_, copy in self._unrouted]
        for copy in (*self._held.values(), *given_up, *unrouted):
            copy.close()
