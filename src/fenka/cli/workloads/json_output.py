"""Jobs and services as data: arena's keys, and fenka's own after them."""

from collections.abc import Iterable

from fenka.cli.workloads.screens import UNKNOWN, server
from fenka.core.units import MIB
from fenka.views.workloads import CardUse, JobProcess, ServiceVersion, TrainingJob, Workload


def document(workload: Workload, now: float) -> dict[str, object]:
    """Return the data of a job or a version of a service. Times are Unix seconds."""
    if isinstance(workload, ServiceVersion):
        return _service(workload, now)
    return _job(workload, now)


def _job(job: TrainingJob, now: float) -> dict[str, object]:
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


def _service(version: ServiceVersion, now: float) -> dict[str, object]:
    """Return the data of one version: arena's keys, and fenka's own after them."""
    return {
        "uuid": version.uid,
        "name": version.name,
        "namespace": version.namespace,
        "type": server(version),
        "version": version.version,
        "age": _seconds(now - version.created),
        "desiredInstances": version.desired,
        "availableInstances": version.available,
        "endpoints": [
            {"name": port.name, "port": port.port, "nodePort": port.node_port}
            for port in version.ports
        ],
        "ip": version.address or UNKNOWN,
        "instances": [_replica(replica, now) for replica in version.instances],
        "requestCPUs": _sum(replica.cpus for replica in version.instances),
        "requestGPUs": _number(version.requested),
        "requestGPUMemory": _sum(replica.memory_units for replica in version.instances),
        "requestGPUCore": _sum(replica.compute for replica in version.instances),
        "creationTimestamp": int(version.created),
        "traffic": version.share,
        "note": version.note,
        "why": version.why,
    }


def _replica(replica: JobProcess, now: float) -> dict[str, object]:
    return {
        "name": replica.name,
        "status": replica.status,
        "age": _seconds(now - replica.created),
        "readyContainers": replica.ready,
        "totalContainers": replica.containers,
        "restartCount": replica.restarts,
        "nodeIP": replica.node_address or UNKNOWN,
        "nodeName": replica.node or UNKNOWN,
        "ip": replica.address,
        "requestCPUs": _sum([replica.cpus]),
        "requestGPUs": _number(replica.requested),
        "requestGPUMemory": _sum([replica.memory_units]),
        "requestGPUCore": replica.compute,
        "creationTimestamp": int(replica.created),
        "why": replica.why,
        "sockets": list(replica.sockets),
    }


def _sum(amounts: Iterable[float]) -> float | None:
    return _number(round(sum(amounts), 3))
