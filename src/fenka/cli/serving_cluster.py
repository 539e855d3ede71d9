"""`fenka scheduler`."""

import asyncio
import logging
import socket
import uuid
from pathlib import Path

from fenka.cli.errors import Problem
from fenka.core.evaluate import POLICIES
from fenka.kubernetes.client import NoCluster
from fenka.scheduler.main import Place, serve, url
from fenka.scheduler.replica import Settings


def scheduler(
    place: tuple[str, int, Path | None],
    policy: str,
    lease: tuple[str, str],
    name: str,
    advertise: str,
    *,
    hami: bool = False,
) -> None:
    """Serve kube-scheduler until told to stop. place: address, port, kubeconfig; lease: namespace, name."""
    if policy not in POLICIES:
        raise Problem(f"--policy is {' or '.join(POLICIES)}, not {policy}", 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # Never the same twice: a new process must not take its predecessor's lease for its own.
    identity = f"{name or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    try:
        told = url(advertise, place[1]) if advertise else ""
        asyncio.run(serve(Place(*place), Settings(identity, policy, *lease, told, hami)))
    except (NoCluster, OSError) as why:
        raise Problem(str(why)) from None
