"""Submits a training to this machine: checks it, brings its code, and leaves it to its supervisor."""

import secrets
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

from fenka.core.request import InvalidRequest
from fenka.jobs.collection import without_secrets
from fenka.jobs.processes import ErrorReporter, Notify, start_in_background
from fenka.jobs.training import TrainingSpec
from fenka.workstation import records, workload
from fenka.workstation.client import connect
from fenka.workstation.paths import Runtime
from fenka.workstation.records import OWN, InstanceRecord, TrainingRecord
from fenka.workstation.snapshot import address
from fenka.workstation.training import code, plan, supervise, tensorboard


def submit(
    runtime: Runtime,
    spec: TrainingSpec,
    announce: Callable[[str], None],
    report_errors: ErrorReporter,
) -> None:
    """Start a training in the background; return when its processes run or are queued.

    If that fails, nothing is left of it.

    Args:
        runtime: The daemon's runtime directory.
        spec: The training.
        announce: Receives sentences for the user.
        report_errors: The command's reporter of errors.

    Raises:
        InvalidRequest: This machine cannot run it as requested.
        CodeNotFetched: Its code could not be brought.
        JobNotStarted: Its name is taken, or it could not be started.
    """
    spec.validate()
    plan.refuse_cluster_options(spec)
    spec, credentials = without_secrets(spec)
    record = _record(spec)
    if ignored := workload.ignored_options(spec):
        have = "have" if len(ignored) > 1 else "has"
        announce(f"{', '.join(ignored)} {have} no effect on a workstation")
    directory = records.create_training_directory(runtime, record)
    try:
        code.bring(spec, credentials, directory, records.log_of(directory, code.LOG))
        record.binds = workload.provide_files(spec, directory / OWN)
        records.save(directory, record)
        if plan.lease_request(spec, plan.processes(spec), record.directory):
            # Not by the supervisor, or its end would be that of the daemon's parent.
            connect(runtime, announce).close()
        _start(runtime, directory, announce, report_errors)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _record(spec: TrainingSpec) -> TrainingRecord:
    """Return the record of a new training, after all checks. Raises InvalidRequest."""
    planned = plan.processes(spec)
    directory = _working_directory(spec)
    plan.lease_request(spec, planned, directory)
    workload.check_mounts(spec)
    if spec.tensorboard:
        tensorboard.check()
    record = TrainingRecord(
        uid=secrets.token_hex(8),
        spec=spec,
        directory=directory,
        created_at=time.time(),
        node=socket.gethostname(),
        address=address(),
        instances=[
            InstanceRecord(
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
        return str(records.place_of(spec.name))
    return workload.working_directory(spec)


def _start(
    runtime: Runtime,
    directory: Path,
    announce: Callable[[str], None],
    report_errors: ErrorReporter,
) -> None:
    def body(notify: Notify, _started: Callable[[], None]) -> None:
        supervise.run(runtime, directory, notify, report_errors)

    log = directory / OWN / "log"
    with start_in_background(body, log, report_errors) as process:
        for line in process.status_lines():
            if line != supervise.STARTED:
                announce(line)
            if line == supervise.STARTED or line.startswith("waiting"):
                return
