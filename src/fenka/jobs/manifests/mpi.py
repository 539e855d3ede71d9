"""What MPI's pods need: the launch agent, its key and the list of hosts."""

import base64
from importlib import resources

from fenka.jobs import roles
from fenka.jobs.manifests import names
from fenka.jobs.manifests.contents import Contents
from fenka.jobs.manifests.names import Manifest
from fenka.jobs.manifests.volumes import Volume
from fenka.jobs.training import TrainingSpec

AGENT_PORT = 23457
"""The launch agents listen on it."""


def worker_command() -> list[str]:
    """Return the command of a worker: it waits for mpirun's daemons to be started."""
    return ["sh", str(names.AGENT), "serve"]


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
    variables = roles.mpi_environment(names.AGENT, names.HOSTS, names.HYDRA_HOSTS)
    return variables | {"HYDRA_IFACE": "eth0"}


def volume(spec: TrainingSpec) -> Volume:
    """Return the volume with the agent, the hosts and the key."""
    sources = [
        {
            "configMap": {
                "name": names.object_name(spec, "mpi"),
                "items": [
                    {"key": "agent", "path": "agent", "mode": 0o555},
                    {"key": "agent.py", "path": "agent.py", "mode": 0o444},
                    {"key": "hosts", "path": "hosts", "mode": 0o444},
                    {"key": "hydra-hosts", "path": "hydra-hosts", "mode": 0o444},
                ],
            }
        },
        {"secret": {"name": names.object_name(spec, "mpi")}},
    ]
    return Volume("mpi", {"projected": {"sources": sources}}, names.AGENT.parent)


def dependents(spec: TrainingSpec, contents: Contents, hosts: list[str]) -> list[Manifest]:
    """Return the ConfigMap and the Secret of the agents. hosts: the workers' addresses."""
    slots = roles.slots(spec)
    name, labels = names.object_name(spec, "mpi"), names.labels(spec)
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
        names.manifest("ConfigMap", "v1", name, labels, data=files),
        names.manifest("Secret", "v1", name, labels, type="Opaque", data=encoded(secrets)),
    ]


def encoded(secrets: dict[str, str]) -> dict[str, str]:
    """Return the data of a Secret."""
    return {name: base64.b64encode(text.encode()).decode() for name, text in secrets.items()}


def _file(name: str) -> str:
    return (resources.files("fenka.jobs") / "mpi_agent" / name).read_text()
