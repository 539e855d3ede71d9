"""The engines with which tests of containers run: Podman everywhere, Docker in the second tier."""

import shutil
from dataclasses import dataclass

import pytest

from e2e.container_machine import ContainerMachine, PodmanMachine
from e2e.docker_machine import DockerMachine


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine and its runtime."""

    machine: type[ContainerMachine]
    runtime: str

    def create(self, *, only_cgroup2: bool = False) -> ContainerMachine:
        """Return a new machine with it. only_cgroup2: hide control groups of version 1."""
        return self.machine(self.runtime, only_cgroup2=only_cgroup2)


def podman(runtime: str) -> object:
    """Return a parameter of tests: Podman, where it is installed."""
    here = shutil.which("podman") and shutil.which(runtime)
    missing = pytest.mark.skipif(not here, reason=f"apt-get install podman {runtime}")
    return pytest.param(Engine(PodmanMachine, runtime), id=f"podman-{runtime}", marks=missing)


# Docker's newest engine needs a newer crun than Debian 12 has.
DOCKER = pytest.param(
    Engine(DockerMachine, "runc"),
    id="docker-runc",
    # It is built at the first test.
    marks=[pytest.mark.full, pytest.mark.timeout(1800)],
)
ENGINES = [podman("runc"), podman("crun"), DOCKER]
