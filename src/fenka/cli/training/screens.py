"""Training jobs as the articles show them: the layout of arena before 0.2, and fenka's default."""

from collections.abc import Callable, Sequence

from fenka.cli import tables
from fenka.cli.durations import short_duration
from fenka.cli.training.blocks import (
    UNKNOWN,
    JobColumns,
    blocked,
    card_total,
    cards,
    chief_address,
    duration,
    jobs_table,
    trainer,
)
from fenka.cluster.pod_status import EVICTED
from fenka.views.jobs import Instance, TrainingJob


def list_screen(jobs: Sequence[TrainingJob], now: float, *, all_namespaces: bool) -> list[str]:
    """Return a line for each job."""
    columns: JobColumns = {
        "NAME": lambda job: job.name,
        "STATUS": lambda job: job.status,
        "TRAINER": trainer,
        "AGE": lambda job: short_duration(job.age(now)),
        "NODE": chief_address,
    }
    table = jobs_table(jobs, columns, all_namespaces=all_namespaces)
    notes = [f"{job.name}: {blocked(job)}" for job in jobs if job.blocked]
    return [*table, "", *notes] if notes else table


def get_screen(job: TrainingJob, now: float) -> list[str]:
    """Return a line for each instance. AGE is the job's; STATUS is the phase of the instance."""
    columns: dict[str, Callable[[Instance], str]] = {
        "NAME": lambda _: job.name,
        "STATUS": lambda instance: (
            instance.status if instance.status == EVICTED else instance.phase
        ).upper(),
        "TRAINER": lambda _: trainer(job),
        "AGE": lambda _: short_duration(job.age(now)),
        "INSTANCE": lambda instance: instance.name,
        "NODE": lambda instance: instance.node_address or UNKNOWN,
    }
    return [
        f"STATUS: {job.status}",
        f"NAMESPACE: {job.namespace}",
        f"TRAINING DURATION: {duration(job, now)}",
        "",
        *tables.align(tables.tabulate(job.instances, columns)),
    ]


def tensorboard_lines(job: TrainingJob) -> list[str]:
    """Return where the job's TensorBoard is; nothing without one."""
    if not job.tensorboard:
        return []
    # arena ends this line with blanks.
    return ["", "Your tensorboard will be available on:", f"{job.tensorboard}   "]


def top_screen(jobs: Sequence[TrainingJob], now: float, *, all_namespaces: bool) -> list[str]:
    """Return a line for each job, and the cards of all of them."""
    columns: JobColumns = {
        "NAME": lambda job: job.name,
        "GPU(Requests)": lambda job: cards(job.requested),
        "GPU(Allocated)": lambda job: cards(job.allocated),
        "STATUS": lambda job: job.status,
        "TRAINER": lambda job: job.trainer,
        "AGE": lambda job: short_duration(job.age(now)),
        "NODE": chief_address,
    }
    return [
        *jobs_table(jobs, columns, all_namespaces=all_namespaces),
        "",
        "",
        "Total Allocated GPUs of Training Job:",
        f"{card_total(job.allocated for job in jobs)}   ",
        "",
        "Total Requested GPUs of Training Job:",
        f"{card_total(job.requested for job in jobs)}   ",
    ]
