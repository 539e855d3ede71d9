"""The commands about trainings of this machine: submit, look, follow, attach, stop, delete.

Screens show a training's record, with the daemon's view of its leases.
"""

import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from fenka.core.errors import FAILURE
from fenka.core.request import InvalidRequest
from fenka.hardware.peer_credentials import user_name
from fenka.jobs.collection import without_secrets
from fenka.jobs.processes import ErrorReporter
from fenka.jobs.training import TrainingSpec
from fenka.local import records, runs, training_code, training_plan, training_supervisor, workload
from fenka.local.launch import NotRunning, become
from fenka.local.records import TRAININGS, RecordNotFound, TrainingRecord
from fenka.local.views import card_uses, requested_cards
from fenka.local.workload import end_leases, end_process, end_writers
from fenka.views.workloads import TRAINERS, JobEvent, JobProcess, Phase, TrainingJob, shown_place
from fenka.workstation import client
from fenka.workstation.paths import Runtime, machine_address
from fenka.workstation.protocol import JobView, MachineSnapshot


def submit(
    runtime: Runtime,
    spec: TrainingSpec,
    announce: Callable[[str], None],
    progress: Callable[[str], None],
    report_errors: ErrorReporter,
) -> None:
    """Start a training in the background; return when its processes run or are queued.

    If that fails, nothing is left of it.

    Args:
        runtime: The daemon's runtime directory.
        spec: The training.
        announce: Receives sentences for the user.
        progress: Receives what a user waits for.
        report_errors: The command's reporter of errors.

    Raises:
        InvalidRequest: This machine cannot run it as requested.
        CodeNotFetched: Its code could not be brought.
        JobNotStarted: Its name is taken, or it could not be started.
    """
    spec.validate()
    training_plan.refuse_cluster_options(spec)
    spec, credentials = without_secrets(spec)
    record = _record(spec)
    workload.announce_ignored(spec, announce)
    directory = runs.create_training_directory(runtime, record)
    try:
        if spec.sync_source:
            progress(f"fetching the code of {spec.name} …")
        training_code.bring(
            spec, credentials, directory, records.log_of(directory, training_code.LOG)
        )
        record.binds = workload.provide_files(spec, directory / records.OWN)
        TRAININGS.save(directory, record)
        if training_plan.lease_request(spec, training_plan.processes(spec), record.directory):
            # Not by the supervisor, or its end would be that of the daemon's parent.
            client.connect(runtime, announce).close()
        workload.start_supervisor(
            spec.name,
            lambda notify, _: training_supervisor.run(runtime, directory, notify, report_errors),
            directory / records.OWN / "log",
            announce,
            report_errors,
        )
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _record(spec: TrainingSpec) -> TrainingRecord:
    """Return the record of a new training, after all checks. Raises InvalidRequest."""
    planned = training_plan.processes(spec)
    directory = _working_directory(spec)
    training_plan.lease_request(spec, planned, directory)
    workload.check_mounts(spec)
    if spec.tensorboard:
        training_supervisor.check_tensorboard()
    record = TrainingRecord(
        uid=secrets.token_hex(8),
        spec=spec,
        directory=directory,
        created_at=time.time(),
        node=socket.gethostname(),
        address=machine_address(),
        instances=[
            records.ProcessRecord(
                process.name, process.role.name, process.index, process.chief, process.lease
            )
            for process in planned
        ],
    )
    return records.supervised_by_me(record)


def _working_directory(spec: TrainingSpec) -> str:
    """Return the working directory: that of the code, else the one that is named, else the current one."""
    if spec.sync_source or spec.code:
        if spec.code and not Path(spec.code).is_dir():
            raise InvalidRequest(f"--code {spec.code} is not a directory")
        return str(TRAININGS.place_of(spec.name))
    return workload.working_directory(spec)


def training_job(
    record: TrainingRecord, snapshot: MachineSnapshot | None, user: str
) -> TrainingJob:
    """Return a training as screens show it.

    Args:
        record: Its record.
        snapshot: What the daemon knows; None if none answers.
        user: The user whose training it is.
    """
    leases = _leases(record, snapshot)
    waiting = leases.get(None)
    lease = next(iter(leases.values()), None)
    return TrainingJob(
        name=record.spec.name,
        namespace=user,
        uid=record.uid,
        status=record.status,
        trainer=TRAINERS[record.spec.kind],
        created=record.created_at,
        ended=record.ended_at if record.finished else None,
        instances=tuple(
            _instance(record, instance, leases, snapshot)
            for instance in record.instances
            if not (record.finished and instance.ended_with_job)
        ),
        priority=str(lease.priority or "") if lease else record.spec.priority,
        position=waiting.position if waiting else None,
        why=(waiting.reason if waiting else record.reason) if not record.finished else "",
        tensorboard=record.tensorboard,
        note=record.reason if record.finished else "",
    )


def unreadable_job(error: records.UnreadableRecord, user: str) -> TrainingJob:
    """Return a training whose record cannot be read."""
    return TrainingJob(
        error.name,
        user,
        uid="",
        status="FAILED",
        trainer="trainjob",
        created=error.created_at,
        note=str(error),
    )


def _leases(
    record: TrainingRecord, snapshot: MachineSnapshot | None
) -> Mapping[int | None, JobView]:
    """Return the training's leases by their rank; the pending gang's rank is None."""
    if record.finished:
        return {}
    return {job.rank: job for job in client.own_jobs(snapshot) if job.gang == record.spec.name}


def _instance(
    record: TrainingRecord,
    instance: records.ProcessRecord,
    leases: Mapping[int | None, JobView],
    snapshot: MachineSnapshot | None,
) -> JobProcess:
    trainer = TRAINERS[record.spec.kind]
    role, index = shown_place(trainer, instance.role, instance.index)
    started = instance.started_at is not None
    lease = leases.get(instance.lease) if instance.lease is not None else None
    requested = _requested(record, instance, snapshot)
    holds = lease is not None and bool(lease.slices)
    return JobProcess(
        name=instance.name,
        pod=f"{record.spec.name}/{instance.lease}" if instance.lease is not None else instance.name,
        role=role,
        index=index,
        chief=instance.chief,
        status=_status(instance),
        phase=_phase(instance),
        created=instance.started_at or record.created_at,
        node=record.node if started else "",
        node_address=record.address if started else "",
        address="127.0.0.1" if started else "",
        requested=requested,
        allocated=(requested or 0) if holds else 0,
        cards=card_uses(lease, snapshot) if lease and snapshot else (),
        exit_code=instance.exit_code,
    )


def _requested(
    record: TrainingRecord, instance: records.ProcessRecord, snapshot: MachineSnapshot | None
) -> float | None:
    if instance.lease is None:
        return 0
    if instance.requested is None and snapshot is not None:
        gpu = training_plan.processes(record.spec)[record.instances.index(instance)].gpu
        return requested_cards(gpu, snapshot) if gpu else 0
    return instance.requested


def _status(instance: records.ProcessRecord) -> str:
    """Return the state in kubectl's words."""
    if instance.exit_code is None:
        return "Running" if instance.started_at else "Pending"
    if instance.exit_code < 0:
        return f"Signal:{-instance.exit_code}"
    return "Error" if instance.exit_code else "Completed"


def _phase(instance: records.ProcessRecord) -> Phase:
    if instance.exit_code is None:
        return "Running" if instance.started_at else "Pending"
    return "Failed" if instance.exit_code else "Succeeded"


def jobs(name: str | None = None) -> list[TrainingJob]:
    """Return all trainings, or the one with this name, the newest first.

    A training whose record cannot be read is shown as failed, so that it can be deleted.
    """
    snapshot, user = client.known_snapshot(), user_name(os.geteuid())
    trainings, unreadable = TRAININGS.load_all(name)
    return [
        *(
            training_job(training, snapshot, user)
            for training in sorted(trainings, key=lambda training: -training.created_at)
        ),
        *(unreadable_job(error, user) for error in unreadable),
    ]


def record(name: str) -> TrainingRecord:
    """Return a training's record. Raises RecordNotFound, records.UnreadableRecord."""
    return TRAININGS.load(name)


# --- logs -----------------------------------------------------------------------------------------------


def log_file(name: str, instance: str = "", container: str = "") -> Path:
    """Return the log of a process: of the chief if none is named. It may not exist yet.

    Args:
        name: The training.
        instance: The process's name, or that of its lease.
        container: `init-code` for what git printed.

    Raises:
        RecordNotFound: There is no such training or process.
        UnreadableRecord: Its record cannot be read.
    """
    directory, training = TRAININGS.directory_of(name), record(name)
    process = training.instance(instance)
    if process is None:
        names = ", ".join(instance.name for instance in training.instances)
        raise RecordNotFound(
            f"job {name} has no instance {instance[:80]}: its instances are {names}"
        )
    cloning = not training.started_at and records.log_of(directory, training_code.LOG).exists()
    if container == training_code.LOG or (cloning and not container):
        return records.log_of(directory, training_code.LOG)
    if container:
        raise RecordNotFound(
            f"{process.name} has no container {container[:80]}: only {training_code.LOG} has a log of its own"
        )
    return records.log_of(directory, process.name)


def attach_to(name: str, instance: str, command: Sequence[str]) -> NoReturn:
    """Become this command in the lease of an instance: the chief's if none is named.

    It is ended when the training ends or starts again.

    Raises RecordNotFound, records.UnreadableRecord, NotRunning, IsolationError, JobNotStarted.
    """
    training = record(name)
    process = training.instance(instance)
    if process is None:
        raise RecordNotFound(
            f"job {name} has no instance {instance[:80]}: fenka get {name} lists them"
        )
    if process.ended_at is not None:
        raise NotRunning(f"{process.name} is not running")
    become(process.name, (process.pid, process.start_ticks), training.directory, command)


def events(name: str) -> list[JobEvent]:
    """Return what the record tells of a training's past, the oldest first. Raises UnreadableRecord."""
    training = record(name)
    source = f"job/{name}"
    told = [JobEvent(source, "Normal", training.created_at, "Submitted", "waits for its leases")]
    waits = [job for job in jobs(name) if job.status == "PENDING" and job.why]
    told += [JobEvent(source, "Warning", time.time(), "Waiting", job.why) for job in waits]
    if training.started_at:
        told.append(JobEvent(source, "Normal", training.started_at, "Started", "all processes run"))
    for instance in training.instances:
        if instance.exit_code is not None and instance.ended_at and not instance.ended_with_job:
            kind = "Warning" if instance.exit_code else "Normal"
            text = f"ended with {records.outcome(instance.exit_code)}"
            told.append(
                JobEvent(f"instance/{instance.name}", kind, instance.ended_at, "Ended", text)
            )
    if training.restarts:
        count = f"{training.restarts} of {training.spec.retry} restarts are used"
        at = max(instance.started_at or training.created_at for instance in training.instances)
        told.append(JobEvent(source, "Warning", at, "Restarted", count))
    if training.evictions:
        text = f"evicted {training.evictions} times for requests of higher priority"
        at = max(instance.started_at or training.created_at for instance in training.instances)
        told.append(JobEvent(source, "Normal", at, "Evicted", text))
    at = training.ended_at or training.created_at
    if training.status == "FAILED":
        told.append(JobEvent(source, "Warning", at, "Failed", training.reason))
    if training.status == "STOPPED":
        told.append(JobEvent(source, "Normal", at, "Stopped", training.reason))
    return sorted(told, key=lambda event: event.at)


def exit_code(name: str) -> int:
    """Return the exit code of a training that has ended. Raises RecordNotFound, records.UnreadableRecord."""
    code = record(name).exit_code
    return FAILURE if code is None else code


# --- the end --------------------------------------------------------------------------------------------


def is_running(name: str) -> bool:
    """Return whether a training's processes run now, or its record cannot be read."""
    try:
        return record(name).status == "RUNNING"
    except records.UnreadableRecord:
        return True


def stop(name: str) -> None:
    """End a training; its records stay. Raises RecordNotFound, records.UnreadableRecord, JobNotEnded."""
    training = record(name)
    if not training.finished:
        end_process(training.pid, lambda: training.supervised, name, training.spec.grace_s)


def delete(name: str) -> None:
    """End a training, if it runs, and remove all that is left of it.

    Raises RecordNotFound, JobNotEnded, RequestFailed, OSError.
    """
    directory = TRAININGS.directory_of(name)
    try:
        stop(name)
    except records.UnreadableRecord:
        end_writers(directory / records.OWN / "log", name, TrainingSpec().grace_s)
    end_leases(name)
    TRAININGS.remove(name)
