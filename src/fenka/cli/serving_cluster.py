"""`fenka scheduler`."""

import asyncio
import logging
import socket
import uuid
from dataclasses import dataclass
from math import inf
from pathlib import Path

from fenka.cli.errors import UserError
from fenka.core.errors import INVALID_INPUT
from fenka.core.evaluate import SCORES
from fenka.core.fairness import Fairness
from fenka.scheduler.credentials import Credentials
from fenka.scheduler.main import ServerOptions, serve, url
from fenka.scheduler.replica import Settings
from fenka.scheduler.request_bodies import MIB, BodyLimits
from fenka.scheduler.server import Access


@dataclass(frozen=True, slots=True)
class Given:
    """Who may do what, as typed. largest_body, bodies: MiB."""

    tls: Path | None
    inspect: bool
    metrics: bool
    largest_body: int
    bodies: int

    def access(self) -> Access:
        """Raises UserError."""
        if not 0 < self.largest_body <= self.bodies:
            raise UserError(
                "--largest-body is 1 or more MiB, and --bodies at least as much", INVALID_INPUT
            )
        credentials = Credentials(self.tls) if self.tls else None
        bounds = BodyLimits(self.largest_body * MIB, self.bodies * MIB)
        return Access(bounds, self.inspect, self.metrics, credentials)


def scheduler(  # noqa: PLR0913
    place: ServerOptions,
    policy: str,
    lease: tuple[str, str],
    name: str,
    advertise: str,
    *,
    hami: bool = False,
    fairness: tuple[float, float, float] = (60, 3600, 3600),
    schedulers: tuple[str, ...] = (),
    given: Given,
) -> None:
    """Serve kube-scheduler until told to stop.

    lease: namespace, name; fairness: turn, starvation and half-life, in seconds; schedulers: names whose pods
    are bound.
    """
    if policy not in SCORES:
        raise UserError(f"--policy is {' or '.join(SCORES)}, not {policy}", 2)
    if not all(0 <= it < inf for it in fairness):
        raise UserError(
            "--queue-penalty, --queue-max-penalty and --half-life are seconds, 0 or more", 2
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # Never the same twice: a new process must not take its predecessor's lease for its own.
    identity = f"{name or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    access = given.access()
    scheme = "https" if access.credentials else "http"
    told = url(advertise, place.port, scheme) if advertise else ""
    order = Fairness(*fairness)
    settings = Settings(identity, policy, *lease, told, hami, order, schedulers)
    asyncio.run(serve(place, settings, access))
