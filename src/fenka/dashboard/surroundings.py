"""Reads what the page shows beside the daemon's snapshot: the user's own records on this machine."""

from fenka.dashboard.loss_curves import LossReaders, log_folder
from fenka.jobs import notebook
from fenka.local import lease_jobs, runs, service_commands, training_commands
from fenka.local.machine_board import Surroundings
from fenka.local.records import TRAININGS
from fenka.views.board_sums import without_token
from fenka.views.workloads import Workload
from fenka.workstation.client import own_jobs
from fenka.workstation.protocol import MachineSnapshot


def look_around(snapshot: MachineSnapshot, losses: LossReaders) -> Surroundings:
    """Return this user's trainings, notebooks and services. Raises FenkaError, OSError.

    losses: continue where they were at the last look.
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
    return Surroundings([*workloads, *service_commands.versions(None)], addresses, curves)
