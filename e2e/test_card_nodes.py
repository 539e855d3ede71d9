"""Containers of real engines cannot open the nodes of other cards, with either version of control groups.

The machine has a second card that is not the daemon's. No driver has the nodes: who may open one learns that
there is no device.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.container_engines import ENGINES, Engine
from e2e.container_machine import IMAGE, NODES, TREE, ContainerMachine, eventually, serving
from tests.control_groups import hierarchies, unused_major

CAP_SYS_RESOURCE = 1 << 24
OWN, REFUSED = "No such device or address", "Operation not permitted"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(os.geteuid() != 0, reason="the daemon of all users is root's"),
]


@pytest.fixture(scope="module", params=sorted(hierarchies()))
def version(request: pytest.FixtureRequest) -> str:
    """The version of the control groups."""
    return str(request.param)


@pytest.fixture(scope="module", params=ENGINES)
def engine(
    request: pytest.FixtureRequest, version: str, slice_image: Path
) -> Iterator[ContainerMachine]:
    """A machine with a T4 and the nodes of two cards."""
    chosen: Engine = request.param
    if (chosen.runtime, version) == ("crun", "v2") and not _may_raise_limits():
        pytest.skip("crun needs CAP_SYS_RESOURCE with version 2")
    with serving(chosen.create(only_cgroup2=version == "v2"), slice_image) as made:
        made.make_nodes(unused_major())
        made.give_nodes()
        yield made


def _may_raise_limits() -> bool:
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) & CAP_SYS_RESOURCE)


@pytest.fixture(autouse=True)
def _remove_containers(engine: ContainerMachine) -> Iterator[None]:
    yield
    engine.remove_containers()


def _start(engine: ContainerMachine, name: str, device: str, *options: str) -> None:
    """Start a container that may make and open both nodes, as far as its engine is concerned."""
    rules = [f"--device-cgroup-rule=c {unused_major()}:{minor} rwm" for minor in range(2)]
    given = options or ("--cap-add=MKNOD", *rules)
    words = (*given, f"--device=fenka.io/{device}", IMAGE, "sleep", "1000")
    # Version 2 has no controller for such limits where those of version 1 are mounted.
    engine.command("run", "-d", "--pids-limit=-1", "--name", name, *words)


def _attempts(engine: ContainerMachine, name: str) -> list[bool]:
    """Return whether a container may open node 0 and node 1."""
    return [_attempt(engine, name, minor) for minor in range(2)]


def _attempt(engine: ContainerMachine, name: str, minor: int) -> bool:
    node = f"/dev/n{minor}"
    script = f"rm -f {node}; busybox mknod {node} c {unused_major()} {minor} && cat {node}"
    said = engine.run(engine.engine, "exec", name, "sh", "-c", script).stderr
    assert (OWN in said) != (REFUSED in said), said
    return OWN in said


def test_doctor_names_the_version_that_keeps_containers_from_nodes(
    engine: ContainerMachine, version: str
) -> None:
    """And that nothing else is needed."""
    checks = json.loads(engine.run(sys.executable, "-m", "fenka", "doctor", "-o", "json").stdout)
    (check,) = (check for check in checks if check["subject"] == "device nodes")
    assert check["status"] == "ok"
    assert f"by its control group of version {version[1:]}" in check["detail"]


@pytest.mark.parametrize("options", [(), ("--privileged",)], ids=["capable", "privileged"])
def test_container_opens_its_own_node_only(
    engine: ContainerMachine, options: tuple[str, ...]
) -> None:
    """Whatever its engine allows, and nothing while it is held; over a kill of the daemon, too."""
    _start(engine, "first", "slice=14", *options)
    assert _attempts(engine, "first") == [True, False]
    _start(engine, "held", "slice=14", *options)
    assert _attempts(engine, "held") == [False, False]
    engine.kill_daemon()
    assert _attempts(engine, "first") == [True, False]
    assert _attempts(engine, "held") == [False, False]
    engine.start_daemon()
    engine.remove("first")
    eventually(lambda: _attempts(engine, "held") == [True, False])


def test_closed_card_is_open_to_any_user_of_its_container(engine: ContainerMachine) -> None:
    """Its node is root's on the machine. Containers without a slice have no other one that they may open."""
    engine.kill_daemon()
    engine.start_daemon("--closed")
    assert engine.run("stat", "-c", "%a %u", f"{TREE}/nvidia0").stdout == "600 0\n"
    words = (*NODES, "--user=1000", "--device=fenka.io/slice=14", IMAGE, "sleep", "1000")
    engine.command("run", "-d", "--pids-limit=-1", "--name", "closed", *words)
    said = [
        engine.run(engine.engine, "exec", "closed", "cat", f"/dev/nvidia{minor}").stderr
        for minor in range(2)
    ]
    assert OWN in said[0]
    assert REFUSED in said[1]
    engine.kill_daemon()
    engine.start_daemon()
    assert engine.run("stat", "-c", "%a %u", f"{TREE}/nvidia0").stdout == "666 0\n"


def test_containers_stay_as_they_are_when_their_engine_changes_them(
    engine: ContainerMachine,
) -> None:
    """The runtime sets the group's devices again, and fenka after it."""
    controllers = engine.run("cat", "/sys/fs/cgroup/cgroup.controllers").stdout
    if engine.only_cgroup2 and "memory" not in controllers:
        pytest.skip("this machine has its controllers on version 1")
    _start(engine, "changed", "slice=14")
    engine.command("update", "--cpu-shares", "512", "changed")
    eventually(lambda: _attempts(engine, "changed") == [True, False])


def test_container_in_its_engines_group_is_refused(engine: ContainerMachine) -> None:
    """Nothing is closed around the engine."""
    if engine.runtime == "runc":
        pytest.skip("runc always makes a control group")
    done = engine.container("--cgroups=disabled", "--device=fenka.io/slice=4", IMAGE, "id")
    assert done.returncode
    log = engine.run("cat", "/run/fenka/daemon.log").stdout
    assert "device nodes: it has no control group of its own" in log
