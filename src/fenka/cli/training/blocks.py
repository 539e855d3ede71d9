"""Parts that the screens of training jobs have in common."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime

from fenka.cli import tables
from fenka.cli.durations import short_duration
from fenka.views.jobs import CardUse, Instance, JobEvent, TrainingJob, total_cards

UNKNOWN = "N/A"

JobColumns = Mapping[str, Callable[[TrainingJob], str]]


def jobs_table(
    jobs: Sequence[TrainingJob], columns: JobColumns, *, all_namespaces: bool
) -> list[str]:
    """Return a line for each job; its namespace comes first if there may be several."""
    namespace: JobColumns = {"NAMESPACE": lambda job: job.namespace} if all_namespaces else {}
    return tables.align(tables.tabulate(jobs, {**namespace, **columns}))


def cards(number: float | None) -> str:
    """Return a number of cards: `2`, `0.6`, or `N/A`."""
    return UNKNOWN if number is None else f"{number:g}"


def duration(job: TrainingJob, now: float) -> str:
    """Return how long a job ran, or has run."""
    seconds = job.duration(now)
    return UNKNOWN if seconds is None else short_duration(seconds)


def card_total(amounts: Iterable[float | None]) -> str:
    """Return the sum of several jobs' cards."""
    return cards(total_cards(amounts))


def trainer(job: TrainingJob) -> str:
    """Return the job's trainer as the tables show it."""
    return job.trainer.upper()


def chief_address(job: TrainingJob) -> str:
    """Return the address of the chief's node."""
    return (job.chief and job.chief.node_address) or UNKNOWN


def moment(seconds: float | None) -> str:
    """Return a time of this machine's zone; empty for None."""
    if seconds is None:
        return ""
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError):
        # Tenants write the times of other operators' jobs.
        return UNKNOWN


def head(job: TrainingJob, now: float) -> list[str]:
    """Return the lines above the tables of one job, as arena has them."""
    fields = {
        "Name": job.name,
        "Status": job.status,
        "Namespace": job.namespace,
        "Priority": job.priority or UNKNOWN,
        "Trainer": trainer(job),
        "Duration": duration(job, now),
        "CreateTime": moment(job.created),
        "EndTime": moment(job.ended),
    }
    return [f"{label + ':':<13}{value}" for label, value in fields.items()]


def block(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    rules: Mapping[str, int] | None = None,
) -> list[str]:
    """Return an empty line, a title and an indented table. rules: lengths that differ from the titles'."""
    lengths = rules or {}
    rule = ["-" * lengths.get(cell, len(cell)) for cell in header]
    return ["", title, *(f"  {line}" for line in tables.align([header, rule, *rows]))]


def gpus_block(job: TrainingJob) -> list[str]:
    """Return what each instance holds of which cards."""
    header = (
        "INSTANCE",
        "NODE(IP)",
        "GPU(Requested)",
        "GPU(IndexId)",
        "GPU(DutyCycle)",
        "GPU Memory(Used/Total)",
    )
    rows = [
        row
        for each in job.instances
        for row in card_rows(each, (each.name, each.node_address or UNKNOWN, cards(each.requested)))
    ]
    return [*block("GPUs:", header, rows), "", totals(job)]


def card_rows(instance: Instance, first: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return a row for each card of an instance. first: the cells that stand in the first row only."""
    blank = ("",) * len(first)
    held = instance.cards or (None,)
    return [(*(blank if number else first), *_card_cells(card)) for number, card in enumerate(held)]


def _card_cells(card: CardUse | None) -> tuple[str, str, str]:
    if card is None:
        return UNKNOWN, UNKNOWN, UNKNOWN
    duty = UNKNOWN if card.duty_percent is None else f"{card.duty_percent:.1f}%"
    used = UNKNOWN if card.used_mib is None else f"{card.used_mib:.1f}/{card.total_mib:.1f}(MiB)"
    return str(card.index), duty, used


def totals(job: TrainingJob) -> str:
    """Return the line with the sums of a job's cards."""
    return f"  Allocated/Requested GPUs of Job: {cards(job.allocated)}/{cards(job.requested)}"


def events_block(events: Sequence[JobEvent], now: float) -> list[str]:
    """Return the events of a job."""
    if not events:
        return ["", "Events:", "  No events for resources"]
    rows = [
        (
            event.source,
            event.kind,
            short_duration(now - event.at),
            f"[{event.reason}] {event.message}",
        )
        for event in events
    ]
    return block("Events:", ("SOURCE", "TYPE", "AGE", "MESSAGE"), rows)


def notebook(job: TrainingJob) -> list[str]:
    """Return where the job's notebook answers; nothing if it does not."""
    return ["", "Notebook:", f"  {job.address}"] if job.address else []


def note(job: TrainingJob) -> list[str]:
    """Return what the user should know of a job; nothing for most jobs."""
    text = job.note or blocked(job)
    return ["", f"Note: {text}"] if text else []


def blocked(job: TrainingJob) -> str:
    """Return a sentence about a job whose pods cannot be created; empty if they can."""
    return f"its pods cannot be created: {job.blocked}" if job.blocked else ""
