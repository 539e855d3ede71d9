"""MPI's pods have the launch agent, its key and the list of hosts."""

import base64
from importlib import resources

from fenka.jobs import roles
from fenka.jobs.collection import Contents
from fenka.jobs.manifests import object_names
from fenka.jobs.manifests.object_names import Manifest
from fenka.jobs.manifests.volumes import (
    MountedVolume,
)
from fenka.jobs.training import TrainingSpec

AGENT_PORT = 23457
"""The launch agents listen on it."""


def worker_command() -> list[str]:
    """Return the command of a worker: it waits for mpirun's daemons to be started."""
    return ["sh", str(object_names.AGENT), "serve"]


def worker_fields() -> Manifest:
    """Return what else a worker's container has. It is ready when its agent listens."""
    return {
        "ports": [{"name": "agent", "containerPort": AGENT_PORT}],
        "readinessProbe": {"tcpSocket": {"port": AGENT_PORT}, "periodSeconds": 2},
    }


def launcher_environment() -> dict[str, str]:
    """Return what makes mpirun use the agents.

    Without the interface, MPICH's daemons are told a host name of the launcher that nothing resolves.
    """
    variables = roles.mpi_environment(
        object_names.AGENT, object_names.HOSTS, object_names.HYDRA_HOSTS
    )
    return variables | {"HYDRA_IFACE": "eth0"}


def mpi_volume(spec: TrainingSpec) -> MountedVolume:
    """Return the volume with the agent, the hosts and the key."""
    sources = [
        {
            "configMap": {
                "name": object_names.object_name(spec, "mpi"),
                "items": [
                    {"key": "agent", "path": "agent", "mode": 0o555},
                    {"key": "agent.py", "path": "agent.py", "mode": 0o444},
                    {"key": "hosts", "path": "hosts", "mode": 0o444},
                    {"key": "hydra-hosts", "path": "hydra-hosts", "mode": 0o444},
                ],
            }
        },
        {"secret": {"name": object_names.object_name(spec, "mpi")}},
    ]
    return MountedVolume("mpi", {"projected": {"sources": sources}}, object_names.AGENT.parent)


def dependents(spec: TrainingSpec, contents: Contents, hosts: list[str]) -> list[Manifest]:
    """Return the ConfigMap and the Secret of the agents. hosts: the workers' addresses."""
    slots = roles.slots(spec)
    name, labels = object_names.object_name(spec, "mpi"), object_names.labels(spec)
    files = {
        "agent": _file("mpi_agent.sh"),
        "agent.py": _file("mpi_agent.py"),
        "hosts": roles.hostfile(hosts, slots, hydra=False),
        "hydra-hosts": roles.hostfile(hosts, slots, hydra=True),
    }
    secrets = {"key": contents.key}
    if contents.ssh_keys:
        private, public = contents.ssh_keys
        secrets |= {"ssh-key": private, "ssh-key.pub": public}
    return [
        object_names.manifest("ConfigMap", "v1", name, labels, data=files),
        object_names.manifest("Secret", "v1", name, labels, type="Opaque", data=encoded(secrets)),
    ]


def encoded(secrets: dict[str, str]) -> dict[str, str]:
    """Return the data of a Secret."""
    return {name: base64.b64encode(text.encode()).decode() for name, text in secrets.items()}


def _file(name: str) -> str:
    return (resources.files("fenka.jobs.in_pod") / name).read_text()
