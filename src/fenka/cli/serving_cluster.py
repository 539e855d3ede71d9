"""`fenka scheduler`."""

import asyncio
import logging
import socket
import uuid
from pathlib import Path

from fenka.cli.errors import Problem
from fenka.core.backfill import Fairness
from fenka.core.evaluate import POLICIES
from fenka.kubernetes.client import NoCluster
from fenka.scheduler.main import Place, serve, url
from fenka.scheduler.replica import Settings


def scheduler(  # noqa: PLR0913
    place: tuple[str, int, Path | None],
    policy: str,
    lease: tuple[str, str],
    name: str,
    advertise: str,
    *,
    hami: bool = False,
    fairness: tuple[float, float] = (60, 3600),
) -> None:
    """Serve kube-scheduler until told to stop.

    place: address, port, kubeconfig; lease: namespace, name; fairness: turn and starvation, in seconds.
    """
    if policy not in POLICIES:
        raise Problem(f"--policy is {' or '.join(POLICIES)}, not {policy}", 2)
    if min(fairness) < 0:
        raise Problem("--turn and --starvation are seconds, 0 or more", 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # Never the same twice: a new process must not take its predecessor's lease for its own.
    identity = f"{name or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    try:
        told = url(advertise, place[1]) if advertise else ""
        settings = Settings(identity, policy, *lease, told, hami, Fairness(*fairness))
        asyncio.run(serve(Place(*place), settings))
    except (NoCluster, OSError) as why:
        raise Problem(str(why)) from None
