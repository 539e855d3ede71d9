"""Tickets: who pays for a container that root's engine starts for a user.

A command requests a ticket of the daemon, and the kernel says whose command it is. The ticket reaches the
hook in the container's environment. The first container that has it keeps it, so that the same user pays for
its restarts. An engine shows a container's environment to others, whose containers cannot use the ticket.

A project's ticket is kept by all containers that first show it within the ten minutes. The command opens it
again, so that the containers have the same environment each time, and Compose does not replace them.
"""

import hashlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from fenka.isolation.lease_files import decode_json, read_regular_file, write_atomically
from fenka.workstation.containers.container_request import InvalidContainer
from fenka.workstation.protocol import CreateTicket

TTL_S = 600.0
"""For which a ticket is open to new containers."""

MAX_PER_USER = 512
"""Tickets that are kept of one user. The one that was used the longest ago goes first."""

MAX_CONTAINERS = 64
"""Containers that keep a project's ticket. The one that has started the longest ago goes first."""

_MAX_FILE_BYTES = 64 << 20
_TICKET_BYTES = 16


class Ticket(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A ticket. The file has digests only.

    Attributes:
        digest: SHA-256 of the ticket.
        uid: Who pays.
        at: When it was made, opened again or last used, in Unix seconds.
        open_until: When it takes no further container, in Unix seconds.
        project: Whether several containers may keep it.
        containers: Those that have used it.
    """

    digest: str
    uid: int
    at: float
    open_until: float
    project: bool = False
    containers: list[str] = []


class TicketFile(msgspec.Struct, forbid_unknown_fields=True):
    """All tickets on disk."""

    tickets: list[Ticket]
    version: int = 2


class Tickets:
    """The tickets of one daemon."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.time) -> None:
        """file: need not exist. One that cannot be read is replaced."""
        self._file, self._clock = file, clock
        self._tickets: dict[str, Ticket] | None = None

    def make(self, uid: int, *, project: bool = False) -> str:
        """Return a new ticket of a user. project: for several containers. Raises OSError."""
        tickets, word, now = self._load(), secrets.token_urlsafe(_TICKET_BYTES), self._clock()
        self._drop(uid)
        tickets[_digest(word)] = Ticket(_digest(word), uid, now, now + TTL_S, project)
        self._save()
        return word

    def answer(self, uid: int, request: CreateTicket) -> str:
        """Return a ticket of a user: the former one, open again, if it is a project's and the user's.

        Raises OSError.
        """
        former = self._load().get(_digest(request.former))
        if former is None or not former.project or former.uid != uid:
            return self.make(uid, project=request.project)
        former.at = self._clock()
        former.open_until = former.at + TTL_S
        self._save()
        return request.former

    def use(self, word: str, container: str) -> int:
        """Return the user of a ticket, which this container keeps. Raises InvalidContainer, OSError."""
        ticket, now = self._load().get(_digest(word)), self._clock()
        advice = "start a new container with `fenka docker run`, or run `fenka compose up` again"
        if ticket is None or (not ticket.containers and ticket.open_until < now):
            raise InvalidContainer(f"FENKA_TICKET is unknown or older than 10 minutes: {advice}")
        known = [other for other in ticket.containers if other != container]
        new = len(known) == len(ticket.containers)
        if new and known and not (ticket.project and now <= ticket.open_until):
            raise InvalidContainer(f"FENKA_TICKET is another container's: {advice}")
        ticket.containers, ticket.at = [*known, container][-MAX_CONTAINERS:], now
        self._save()
        return ticket.uid

    def _drop(self, uid: int) -> None:
        """Drop what has expired, and the oldest of a user who has too many."""
        tickets, now = self._load(), self._clock()
        own = sorted((ticket for ticket in tickets.values() if ticket.uid == uid), key=_at)
        spare = own[: max(len(own) - MAX_PER_USER + 1, 0)]
        expired = [
            ticket
            for ticket in tickets.values()
            if not ticket.containers and ticket.open_until < now
        ]
        for ticket in (*spare, *expired):
            tickets.pop(ticket.digest, None)

    def _load(self) -> dict[str, Ticket]:
        if self._tickets is None:
            try:
                content = read_regular_file(self._file, _MAX_FILE_BYTES)
                found = decode_json(msgspec.json.Decoder(TicketFile), content).tickets
            except (OSError, msgspec.MsgspecError):
                found = []
            self._tickets = {ticket.digest: ticket for ticket in found}
        return self._tickets

    def _save(self) -> None:
        content = msgspec.json.encode(TicketFile([*self._load().values()]))
        self._file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_atomically(self._file, content)


def _digest(word: str) -> str:
    return hashlib.sha256(word.encode(errors="replace")).hexdigest()


def _at(ticket: Ticket) -> float:
    return ticket.at
