"""Training jobs as data: arena's keys, and fenka's own after them."""

from collections.abc import Sequence

from fenka.cli import tables
from fenka.cli.training.blocks import UNKNOWN
from fenka.views.jobs import CardUse, Instance, TrainingJob

MIB = 1024 * 1024


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


def _instance(instance: Instance, now: float) -> dict[str, object]:
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
