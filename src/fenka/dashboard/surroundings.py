"""Reads what the page shows beside the daemon's snapshot: the user's own records on this machine."""

import socket
from dataclasses import replace

from fenka.dashboard.loss_curves import LossReaders, log_folder
from fenka.jobs import notebook
from fenka.jobs.notebook import LOOPBACK
from fenka.local import lease_jobs, runs, service_commands, training_commands
from fenka.local.machine_board import Surroundings
from fenka.local.records import TRAININGS
from fenka.server.loopback_name import hold_other_address, new_name, release
from fenka.views.board_sums import without_token
from fenka.views.workloads import ServiceVersion, Workload
from fenka.workstation.client import own_jobs
from fenka.workstation.protocol import MachineSnapshot


class ServiceNames:
    """Names by which this dashboard calls services, so that a browser keeps nothing for 127.0.0.1.

    A service listens there alone, so the dashboard holds its ports at the other loopback address. Where
    another program has one of them, the service keeps its address.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._held: dict[str, list[socket.socket]] = {}

    def rename(self, versions: list[ServiceVersion]) -> list[ServiceVersion]:
        """Return services of the loopback address with names that nobody can guess."""
        local = {version.uid: version for version in versions if version.address == LOOPBACK}
        for uid in self._held.keys() - local:
            release(self._held.pop(uid))
        self._names = {uid: self._names.get(uid) or new_name() for uid in local}
        return [
            replace(version, address=self._names[version.uid])
            if version.uid in local and self._hold(version)
            else version
            for version in versions
        ]

    def _hold(self, version: ServiceVersion) -> bool:
        """Return whether nobody else can listen under the service's name."""
        if version.uid in self._held:
            return True
        held = list[socket.socket]()
        for port in version.ports:
            try:
                held += hold_other_address(LOOPBACK, port.port)
            except OSError:
                release(held)
                return False
        self._held[version.uid] = held
        return True


def look_around(
    snapshot: MachineSnapshot, losses: LossReaders, names: ServiceNames
) -> Surroundings:
    """Return this user's trainings, notebooks and services. Raises FenkaError, OSError.

    losses, names: continue where they were at the last look.
    """
    jobs = [*training_commands.jobs(None), *lease_jobs.jobs()]
    workloads: list[Workload] = [
        job
        for job in jobs
        if job.trainer != "run" and not (job.finished and job.trainer != "notebook")
    ]
    addresses = {
        job.id: without_token(url)
        for job in own_jobs(snapshot)
        if job.kind == "notebook" and (url := notebook.url(runs.place_of(job.name)))
    }
    trainings, _ = TRAININGS.load_all(None)
    curves = losses.read(
        [
            (training.spec.name, log_folder(training))
            for training in trainings
            if not training.finished
        ]
    )
    services = names.rename(list(service_commands.versions(None)))
    return Surroundings([*workloads, *services], addresses, curves)
