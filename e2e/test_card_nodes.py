"""Podman's containers cannot open the nodes of other cards, with either version of control groups.

The machine has a second card that is not the daemon's. No driver has the nodes: who may open one learns that
there is no device.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.podman import IMAGE, PodmanMachine, eventually, image_archive, machine
from tests.control_groups import hierarchies, unused_major

RUNTIMES = [name for name in ("runc", "crun") if shutil.which(name)]
TREE = "/run/fenka/simulated/host-tree/dev"
CAP_SYS_RESOURCE = 1 << 24
OWN, REFUSED = "No such device or address", "Operation not permitted"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(os.geteuid() != 0, reason="the daemon of all users is root's"),
    pytest.mark.skipif(not shutil.which("podman"), reason="apt-get install podman crun"),
]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image with a shell."""
    return image_archive(tmp_path_factory.mktemp("image"))


@pytest.fixture(
    scope="module",
    params=[(runtime, version) for runtime in RUNTIMES for version in sorted(hierarchies())],
    ids="-".join,
)
def podman(request: pytest.FixtureRequest, archive: Path) -> Iterator[PodmanMachine]:
    """A machine with a T4 and the nodes of two cards."""
    runtime, version = request.param
    if (runtime, version) == ("crun", "v2") and not _may_raise_limits():
        pytest.skip("crun needs CAP_SYS_RESOURCE with version 2")
    with machine(runtime, archive, only_cgroup2=version == "v2") as made:
        made.run("mkdir", "-p", TREE)
        for minor in ("0", "1"):
            made.run("mknod", f"{TREE}/nvidia{minor}", "c", str(unused_major()), minor)
        yield made


def _may_raise_limits() -> bool:
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) & CAP_SYS_RESOURCE)


@pytest.fixture(autouse=True)
def _remove_containers(podman: PodmanMachine) -> Iterator[None]:
    yield
    podman.podman("rm", "-fa", "-t", "0")
    eventually(lambda: not podman.jobs())


def _start(podman: PodmanMachine, name: str, device: str, *options: str) -> None:
    """Start a container that may make and open both nodes, as far as its engine is concerned."""
    rules = [f"--device-cgroup-rule=c {unused_major()}:{minor} rwm" for minor in range(2)]
    given = options or ("--cap-add=MKNOD", *rules)
    words = (*given, f"--device=fenka.io/{device}", IMAGE, "sleep", "1000")
    # Version 2 has no controller for such limits where those of version 1 are mounted.
    podman.podman("run", "-d", "--pids-limit=-1", "--name", name, *words)


def _attempts(podman: PodmanMachine, name: str) -> list[bool]:
    """Return whether a container may open node 0 and node 1."""
    return [_attempt(podman, name, minor) for minor in range(2)]


def _attempt(podman: PodmanMachine, name: str, minor: int) -> bool:
    node = f"/dev/n{minor}"
    script = f"rm -f {node}; busybox mknod {node} c {unused_major()} {minor} && cat {node}"
    said = podman.run("podman", "exec", name, "sh", "-c", script).stderr
    assert (OWN in said) != (REFUSED in said), said
    return OWN in said


@pytest.mark.parametrize("options", [(), ("--privileged",)], ids=["capable", "privileged"])
def test_container_opens_its_own_node_only(podman: PodmanMachine, options: tuple[str, ...]) -> None:
    """Whatever its engine allows, and nothing while it is held; over a kill of the daemon, too."""
    _start(podman, "first", "slice=14", *options)
    assert _attempts(podman, "first") == [True, False]
    _start(podman, "held", "slice=14", *options)
    assert _attempts(podman, "held") == [False, False]
    podman.kill_daemon()
    assert _attempts(podman, "first") == [True, False]
    assert _attempts(podman, "held") == [False, False]
    podman.start_daemon()
    podman.podman("rm", "-f", "-t", "0", "first")
    eventually(lambda: _attempts(podman, "held") == [True, False])


def test_containers_stay_as_they_are_when_their_engine_changes_them(podman: PodmanMachine) -> None:
    """The runtime sets the group's devices again, and fenka after it."""
    controllers = podman.run("cat", "/sys/fs/cgroup/cgroup.controllers").stdout
    if podman.only_cgroup2 and "memory" not in controllers:
        pytest.skip("this machine has its controllers on version 1")
    _start(podman, "a", "slice=14")
    podman.podman("update", "--memory", "512m", "a")
    eventually(lambda: _attempts(podman, "a") == [True, False])


def test_container_in_its_engines_group_is_refused(podman: PodmanMachine) -> None:
    """Nothing is closed around the engine."""
    if podman.runtime == "runc":
        pytest.skip("runc always makes a control group")
    done = podman.container("--cgroups=disabled", "--device=fenka.io/slice=4", IMAGE, "id")
    assert done.returncode
    log = podman.run("cat", "/run/fenka/daemon.log").stdout
    assert "device nodes: it has no control group of its own" in log
