"""Jobs and services as lines: the layout of arena before 0.2, which is fenka's default.

Jobs in the layout of today's arena are in `compat/arena.py`, which uses the parts here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TypeVar

from fenka.cli import tables
from fenka.cli.common_options import short_duration
from fenka.cluster.service_objects import TYPES
from fenka.cluster.training_objects import EVICTED
from fenka.views.workloads import (
    CardUse,
    JobEvent,
    JobProcess,
    ServiceVersion,
    TrainingJob,
    Workload,
    total_cards,
)

UNKNOWN = "N/A"

T = TypeVar("T")
W = TypeVar("W", TrainingJob, ServiceVersion)

Columns = dict[str, Callable[[T], str]]


def table(workloads: Sequence[W], columns: Columns[W], *, all_namespaces: bool) -> list[str]:
    """Return a line for each workload; its namespace comes first if there may be several."""
    namespace: Columns[W] = {"NAMESPACE": lambda workload: workload.namespace}
    shown = {**(namespace if all_namespaces else {}), **columns}
    return tables.align(tables.tabulate(workloads, shown))


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


def notes(workload: Workload) -> list[str]:
    """Return what the user should know of a workload; nothing for most jobs."""
    if isinstance(workload, ServiceVersion):
        return ["", *(f"Note: {note}" for note in (workload.note, workload.why) if note)]
    text = workload.note or blocked(workload) or _waiting(workload)
    return ["", f"Note: {text}"] if text else []


def _waiting(job: TrainingJob) -> str:
    """Return a sentence about a job in the queue; empty for other jobs."""
    if job.status != "PENDING" or not job.position:
        return ""
    place = f"it waits at position {job.position} of the queue"
    return f"{place}: {job.why}" if job.why else place


def blocked(job: TrainingJob) -> str:
    """Return a sentence about a job whose pods cannot be created; empty if they can."""
    return f"its pods cannot be created: {job.blocked}" if job.blocked else ""


def list_screen(jobs: Sequence[TrainingJob], now: float, *, all_namespaces: bool) -> list[str]:
    """Return a line for each job."""
    columns: Columns[TrainingJob] = {
        "NAME": lambda job: job.name,
        "STATUS": lambda job: job.status,
        "TRAINER": trainer,
        "AGE": lambda job: short_duration(job.age(now)),
        "NODE": chief_address,
    }
    lines = table(jobs, columns, all_namespaces=all_namespaces)
    notes = [f"{job.name}: {blocked(job)}" for job in jobs if job.blocked]
    return [*lines, "", *notes] if notes else lines


def get_screen(job: TrainingJob, now: float) -> list[str]:
    """Return a line for each instance. AGE is the job's; STATUS is the phase of the instance."""
    columns: Columns[JobProcess] = {
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
    columns: Columns[TrainingJob] = {
        "NAME": lambda job: job.name,
        "GPU(Requests)": lambda job: cards(job.requested),
        "GPU(Allocated)": lambda job: cards(job.allocated),
        "STATUS": lambda job: job.status,
        "TRAINER": lambda job: job.trainer,
        "AGE": lambda job: short_duration(job.age(now)),
        "NODE": chief_address,
    }
    return [
        *table(jobs, columns, all_namespaces=all_namespaces),
        "",
        "",
        "Total Allocated GPUs of Training Job:",
        f"{card_total(job.allocated for job in jobs)}   ",
        "",
        "Total Requested GPUs of Training Job:",
        f"{card_total(job.requested for job in jobs)}   ",
    ]


def services_screen(versions: Sequence[ServiceVersion], *, all_namespaces: bool) -> list[str]:
    """Return a line for each version."""
    columns: Columns[ServiceVersion] = {
        "NAME": lambda version: version.name,
        "TYPE": server,
        "VERSION": lambda version: version.version,
        "DESIRED": lambda version: str(version.desired),
        "AVAILABLE": lambda version: str(version.available),
        "ADDRESS": _address,
        "PORTS": _ports,
    }
    if any(map(_gpu, versions)):
        columns["GPU"] = lambda version: cards(version.requested)
    return table(versions, columns, all_namespaces=all_namespaces)


def service_screen(version: ServiceVersion, now: float) -> list[str]:
    """Return a version, and a line for each replica."""
    fields = {
        "Name": version.name,
        "Namespace": version.namespace,
        "Type": server(version),
        "Version": version.version,
        "Desired": str(version.desired),
        "Available": str(version.available),
        "Age": short_duration(now - version.created),
        "Address": _address(version),
        "Port": _ports(version),
    }
    if _gpu(version):
        fields["GPU"] = cards(version.requested)
    columns: Columns[JobProcess] = {
        "NAME": lambda replica: replica.name,
        "STATUS": lambda replica: replica.status,
        "AGE": lambda replica: short_duration(now - replica.created),
        "READY": lambda replica: f"{replica.ready}/{replica.containers}",
        "RESTARTS": lambda replica: str(replica.restarts),
        **({"GPU": lambda replica: cards(replica.requested)} if _gpu(version) else {}),
        "NODE": lambda replica: replica.node or UNKNOWN,
        **({"SOCKET": _sockets} if any(replica.sockets for replica in version.instances) else {}),
    }
    rows = [[cell(replica) for cell in columns.values()] for replica in version.instances]
    return [
        *(f"{label + ':':<12}{value}" for label, value in fields.items()),
        *block("Instances:", [*columns], rows),
    ]


def server(version: ServiceVersion) -> str:
    """Return what serves the model, in arena's words."""
    return TYPES[version.kind][1]


def _address(version: ServiceVersion) -> str:
    share = "" if version.share is None or not version.address else f"({version.share}%)"
    return (version.address or UNKNOWN) + share


def _ports(version: ServiceVersion) -> str:
    return ",".join(map(str, version.ports)) or UNKNOWN


def _sockets(replica: JobProcess) -> str:
    return ",".join(replica.sockets) or UNKNOWN


def _gpu(version: ServiceVersion) -> bool:
    """Return whether a version requests cards, or may."""
    return version.requested != 0
