"""Trainings of this machine as values of the screens: records, and what the daemon knows of their leases."""

from collections.abc import Mapping

from fenka.views.jobs import TRAINERS, Instance, Phase, TrainingJob, shown_place
from fenka.workstation.client import own_jobs
from fenka.workstation.protocol import JobView, Snapshot
from fenka.workstation.records import InstanceRecord, InvalidRecord, TrainingRecord
from fenka.workstation.training import plan
from fenka.workstation.views import card_uses, requested_cards


def training_job(record: TrainingRecord, snapshot: Snapshot | None, user: str) -> TrainingJob:
    """Return a training as screens show it.

    Args:
        record: Its record.
        snapshot: What the daemon knows; None if none answers.
        user: The user whose training it is.
    """
    leases = _leases(record, snapshot)
    waiting = leases.get(None)
    return TrainingJob(
        name=record.spec.name,
        namespace=user,
        uid=record.uid,
        status=record.status,
        trainer=TRAINERS[record.spec.kind],
        created=record.created_at,
        ended=record.ended_at if record.finished else None,
        instances=tuple(
            _instance(record, each, leases, snapshot)
            for each in record.instances
            if not (record.finished and each.ended_with_job)
        ),
        priority=record.spec.priority,
        position=waiting.position if waiting else None,
        why=(waiting.reason if waiting else record.reason) if not record.finished else "",
        tensorboard=record.tensorboard,
        note=record.reason if record.finished else "",
    )


def unreadable_job(error: InvalidRecord, user: str) -> TrainingJob:
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


def _leases(record: TrainingRecord, snapshot: Snapshot | None) -> Mapping[int | None, JobView]:
    """Return the training's leases by their rank; the pending gang's rank is None."""
    if record.finished:
        return {}
    return {job.rank: job for job in own_jobs(snapshot) if job.gang == record.spec.name}


def _instance(
    record: TrainingRecord,
    instance: InstanceRecord,
    leases: Mapping[int | None, JobView],
    snapshot: Snapshot | None,
) -> Instance:
    trainer = TRAINERS[record.spec.kind]
    role, index = shown_place(trainer, instance.role, instance.index)
    started = instance.started_at is not None
    lease = leases.get(instance.lease) if instance.lease is not None else None
    requested = _requested(record, instance, snapshot)
    holds = lease is not None and bool(lease.slices)
    return Instance(
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
    record: TrainingRecord, instance: InstanceRecord, snapshot: Snapshot | None
) -> float | None:
    if instance.lease is None:
        return 0
    if instance.requested is None and snapshot is not None:
        gpu = plan.processes(record.spec)[record.instances.index(instance)].gpu
        return requested_cards(gpu, snapshot) if gpu else 0
    return instance.requested


def _status(instance: InstanceRecord) -> str:
    """Return the state in kubectl's words."""
    if instance.exit_code is None:
        return "Running" if instance.started_at else "Pending"
    if instance.exit_code < 0:
        return f"Signal:{-instance.exit_code}"
    return "Error" if instance.exit_code else "Completed"


def _phase(instance: InstanceRecord) -> Phase:
    if instance.exit_code is None:
        return "Running" if instance.started_at else "Pending"
    return "Failed" if instance.exit_code else "Succeeded"
