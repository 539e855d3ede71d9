"""Training jobs as the articles show them: the layout of arena before 0.2, and fenka's default.

Parts that the screens of training jobs have in common.

Training jobs as data: arena's keys, and fenka's own after them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime

from fenka.cli import tables
from fenka.cli.options import short_duration
from fenka.cluster.training_objects import EVICTED
from fenka.core.units import MIB
from fenka.views.workloads import CardUse, JobEvent, JobProcess, TrainingJob, total_cards

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
        for instance in job.instances
        for row in card_rows(
            instance, (instance.name, instance.node_address or UNKNOWN, cards(instance.requested))
        )
    ]
    return [*block("GPUs:", header, rows), "", totals(job)]


def card_rows(instance: JobProcess, first: tuple[str, ...]) -> list[tuple[str, ...]]:
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
    columns: dict[str, Callable[[JobProcess], str]] = {
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


def is_document(output: str) -> bool:
    """Return whether this output is data and no table."""
    return output in ("json", "yaml")


def print_document(data: object, output: str) -> bool:
    """Print data as JSON or YAML; return False if the output is a table."""
    if output == "json":
        # As arena: four blanks, no newline at the end.
        print(tables.json_text(data, 4), end="")
        return True
    return output == "yaml" and tables.print_data(data, output)


def documents(jobs: Sequence[TrainingJob], now: float) -> list[dict[str, object]]:
    """Return the data of several jobs."""
    return [document(job, now) for job in jobs]


def document(job: TrainingJob, now: float) -> dict[str, object]:
    """Return the data of one job. Times are Unix seconds."""
    return {
        "uuid": job.uid,
        "name": job.name,
        "namespace": job.namespace,
        "duration": _seconds(job.duration(now)),
        "status": job.status,
        "trainer": job.trainer,
        "tensorboard": job.tensorboard,
        "chiefName": job.chief.name if job.chief else "",
        "instances": [_instance(instance, now) for instance in job.instances],
        "priority": job.priority or UNKNOWN,
        "requestGPUs": _number(job.requested),
        "allocatedGPUs": _number(job.allocated),
        "creationTimestamp": int(job.created),
        "modelName": "",
        "modelVersion": "",
        "modelSource": "",
        "endTimestamp": None if job.ended is None else int(job.ended),
        "queuePosition": job.position,
        "why": job.why,
        "address": job.address,
        "note": job.note,
        "foreign": job.foreign,
    }


def _instance(instance: JobProcess, now: float) -> dict[str, object]:
    return {
        "ip": instance.address,
        "status": instance.status,
        "name": instance.name,
        "age": _seconds(now - instance.created),
        "node": instance.node or UNKNOWN,
        "nodeIP": instance.node_address or UNKNOWN,
        "chief": instance.chief,
        "requestGPUs": _number(instance.requested),
        "gpuMetrics": {str(card.index): _metrics(card) for card in instance.cards},
        "creationTimestamp": int(instance.created),
        "pod": instance.pod,
        "role": instance.role,
        "index": instance.index,
        "phase": instance.phase,
        "allocatedGPUs": _number(instance.allocated),
        "exitCode": instance.exit_code,
    }


def _metrics(card: CardUse) -> dict[str, object]:
    return {
        "gpuDutyCycle": card.duty_percent,
        "usedGPUMemory": None if card.used_mib is None else card.used_mib * MIB,
        "totalGPUMemory": card.total_mib * MIB,
    }


def _number(cards: float | None) -> float | None:
    """Return whole numbers as integers, as arena's readers expect them."""
    return int(cards) if cards is not None and cards == int(cards) else cards


def _seconds(duration: float | None) -> str:
    return UNKNOWN if duration is None else f"{max(int(duration), 0)}s"
