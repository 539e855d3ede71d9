"""What only Docker has: restart policies that an engine of its own serves, and users mapped by that engine.

Services always have the slices that are free, whatever was killed and however the machine starts again.
"""

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.container_engines import DOCKER, Engine
from e2e.container_machine import IMAGE, NODES, TREE, ContainerMachine, eventually, serving
from e2e.docker_machine import DockerMachine
from tests.control_groups import unused_major

DEVICE = ("--device", "fenka.io/slice=4")
SERVICES = ("one", "two", "three")
UNITS, MIB = 5, 15079 * 5 // 14
"""Two services of three fit into the 14 units of a T4."""

HOOK = "fenka-hook"

DEVICES = f"""
set -e
mkdir /run/dev
mount -t tmpfs -o mode=755 none /run/dev
cd /dev
cp -a null zero full random urandom tty /run/dev
mkdir /run/dev/pts /run/dev/shm
mount --bind pts /run/dev/pts
ln -s pts/ptmx /run/dev/ptmx
ln -s /proc/self/fd /run/dev/fd
for node in nvidia0 nvidia1; do
    touch /run/dev/$node
    mount --bind {TREE}/$node /run/dev/$node
done
mount --move /run/dev /dev
"""
"""Gives the machine a /dev with the nodes: runc mounts them from there."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the daemon of all users is root's")


@pytest.fixture(params=[DOCKER])
def docker(request: pytest.FixtureRequest, slice_image: Path) -> Iterator[DockerMachine]:
    """A machine with one T4: 15079 MiB, 14 units."""
    chosen: Engine = request.param
    with serving(chosen.create(), slice_image) as made:
        assert isinstance(made, DockerMachine)
        yield made


def _start_services(engine: ContainerMachine) -> None:
    for name in SERVICES:
        words = ("-d", "-i", "--restart", "always", "--name", name, "-e", f"FENKA_NAME={name}")
        device = ("--device", f"fenka.io/slice={UNITS}")
        engine.command("run", *words, *device, IMAGE, "slice_client", str(MIB), "1")
    eventually(lambda: _served(engine))


def _served(engine: ContainerMachine) -> bool:
    """Return whether all services are jobs, of which two run.

    Their slices are never more than the card has, and a program that has one has just that.
    """
    jobs = engine.jobs()
    assert sum(piece["memory_mib"] for job in jobs.values() for piece in job["slices"]) <= 15079
    running = [name for name, job in jobs.items() if job["state"] == "running"]
    states = Counter(job["state"] for job in jobs.values())
    if jobs.keys() != set(SERVICES) or states != {"running": 2, "waiting": 1}:
        return False
    results = {
        line for name in running for line in engine.logs(name).splitlines() if line[0] == "1"
    }
    assert results <= {f"1 {MIB} 0 2"}
    return bool(results) and all(_inits(engine).values())


def _inits(engine: ContainerMachine) -> dict[str, int]:
    lines = engine.command("inspect", "-f", "{{.Name}} {{.State.Pid}}", *SERVICES).splitlines()
    return {name[1:]: int(pid) for name, pid in map(str.split, lines)}


ENGINE, ENGINES_OWN, SHIM = "dockerd", "containerd", "containerd-shim-runc-v2"
INIT, DAEMON = "init", "fenka"


@pytest.mark.parametrize(
    ("victims", "stay"),
    [
        ([ENGINE], False),
        ([ENGINES_OWN], True),
        ([SHIM], False),
        ([INIT], False),
        ([DAEMON], True),
        ([ENGINE, DAEMON, ENGINES_OWN, SHIM, INIT], False),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_services_come_again_when_any_program_is_killed(
    docker: DockerMachine, victims: list[str], stay: bool
) -> None:
    """Engine, its containerd, the shims, the first processes, fenka's daemon, or all of them."""
    _start_services(docker)
    inits = _inits(docker)
    for victim in victims:
        if victim == ENGINE:
            docker.stop_engine(signal.SIGKILL)
        elif victim == INIT:
            for pid in inits.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif victim == DAEMON:
            docker.kill_daemon()
        else:
            docker.kill(victim)
    if DAEMON in victims:
        docker.start_daemon()
    if ENGINE in victims:
        docker.start_engine()
        docker.wait_for_engine()
    eventually(lambda: _served(docker) and (_inits(docker) == inits) == stay)


def test_services_come_again_at_a_boot(docker: DockerMachine) -> None:
    """Nothing is left in /run, and the engine starts first: its hooks wait for fenka's daemon."""
    _start_services(docker)
    inits = _inits(docker)
    docker.stop_engine(signal.SIGKILL)
    docker.kill()
    for pid in inits.values():
        os.kill(pid, signal.SIGKILL)
    docker.run("sh", "-c", "umount -R /run/fenka /run/docker*; rm -rf /run/fenka /run/docker*")
    docker.start_engine()
    eventually(lambda: docker.processes(HOOK))
    docker.start_daemon()
    docker.wait_for_engine()
    eventually(lambda: _served(docker))
    docker.remove_containers()
    left = docker.run("cat", "/proc/self/mountinfo").stdout
    assert "/run/fenka/leases" not in left


def test_slice_is_the_same_where_the_engine_maps_users(docker: DockerMachine) -> None:
    """Root in a container is then an ordinary user outside. 4 units of a T4 are 4308 MiB.

    Closed cards open, too: the engine mounts the machine's nodes, which are root's, and fenka its own over
    them.
    """
    docker.stop_engine()
    docker.start_engine("--userns-remap", "alice")
    docker.wait_for_engine()
    docker.load()
    for options in ((), ("--user=1000",), ("--read-only",), ("--userns=host", "--privileged")):
        for mib, result in ((4308, 0), (4309, 2)):
            words = (*options, *DEVICE, IMAGE, "slice_client", str(mib))
            done = docker.container(*words)
            assert done.stdout == f"1 4308 {result}\n", done.stderr
    docker.make_nodes(unused_major())
    docker.give_nodes()
    done = docker.run("sh", "-c", DEVICES)
    assert done.returncode == 0, done.stderr
    docker.kill_daemon()
    docker.start_daemon("--closed")
    words = (*NODES, "--device", "fenka.io/slice=14", IMAGE, "cat", "/dev/nvidia0", "/dev/nvidia1")
    done = docker.container(*words)
    assert "nvidia0': No such device or address" in done.stderr
    assert "nvidia1': Permission denied" in done.stderr
