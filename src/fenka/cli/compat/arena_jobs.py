"""Training jobs in the layout of arena 0.7 and later.

Errors of arena are not copied: slices count as shares of a card, the age of an instance is its own, and only
cards that an instance holds are allocated.
"""

from collections.abc import Sequence

from fenka.cli.durations import short_duration
from fenka.cli.training.blocks import (
    UNKNOWN,
    JobColumns,
    block,
    card_total,
    cards,
    chief_address,
    duration,
    head,
    jobs_table,
    trainer,
)
from fenka.views.jobs import TrainingJob


def list_screen(jobs: Sequence[TrainingJob], now: float, *, all_namespaces: bool) -> list[str]:
    """Return a line for each job."""
    columns: JobColumns = {
        "NAME": lambda job: job.name,
        "STATUS": lambda job: job.status,
        "TRAINER": trainer,
        "DURATION": lambda job: duration(job, now),
        "GPU(Requested)": lambda job: cards(job.requested),
        "GPU(Allocated)": lambda job: (
            cards(job.allocated) if job.status in ("PENDING", "RUNNING") else UNKNOWN
        ),
        "NODE": chief_address,
    }
    return jobs_table(jobs, columns, all_namespaces=all_namespaces)


def get_screen(job: TrainingJob, now: float) -> list[str]:
    """Return the job, and a line for each instance."""
    rows = [
        (
            instance.name,
            instance.status,
            short_duration(now - instance.created),
            str(instance.chief).lower(),
            cards(instance.requested),
            instance.node or UNKNOWN,
        )
        for instance in job.instances
    ]
    header = ("NAME", "STATUS", "AGE", "IS_CHIEF", "GPU(Requested)", "NODE")
    return [*head(job, now), *block("Instances:", header, rows)]


def tensorboard_lines(job: TrainingJob) -> list[str]:
    """Return where the job's TensorBoard is; nothing without one."""
    if not job.tensorboard:
        return []
    # arena ends the second line with a blank.
    return ["", "Tensorboard:", "  Your tensorboard will be available on: ", f"  {job.tensorboard}"]


def top_screen(jobs: Sequence[TrainingJob], now: float, *, all_namespaces: bool) -> list[str]:
    """Return a line for each job, and the cards of those that run."""
    columns: JobColumns = {
        "NAME": lambda job: job.name,
        "STATUS": lambda job: job.status,
        "TRAINER": trainer,
        "AGE": lambda job: duration(job, now),
        "GPU(Requested)": lambda job: cards(job.requested),
        "GPU(Allocated)": lambda job: cards(job.allocated),
        "NODE": chief_address,
    }
    running = [job for job in jobs if job.status == "RUNNING"]
    allocated = card_total(job.allocated for job in running)
    requested = card_total(job.requested for job in running)
    return [
        *jobs_table(jobs, columns, all_namespaces=all_namespaces),
        "",
        f"Total Allocated/Requested GPUs of Training Jobs: {allocated}/{requested}",
    ]
