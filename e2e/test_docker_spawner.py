"""JupyterHub's DockerSpawner, as docs/do/jupyterhub.md configures it: servers in containers with slices."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from e2e.container_engines import DOCKER, Engine
from e2e.container_machine import IMAGE, eventually, serving
from e2e.docker_machine import DockerMachine
from fire.machine import HERE, REPOSITORY
from tests.jupyterhub.hub import DIRECTORY, PAGE, PROXY, Hub
from tests.workstation.shared_machine import PYTHON, SharedMachine

BRIDGE, ADDRESS = "hub0", "172.30.0.1"
DOCUMENTED = next(block.text for block in PAGE.blocks if "dockerspawner" in block.text)
SITE = """
c.DockerSpawner.image = "{image}"
c.DockerSpawner.use_internal_ip = True
c.DockerSpawner.read_only_volumes = {volumes}
c.DockerSpawner.cmd = ["{python}", "-m", "jupyterhub.singleuser", "--allow-root"]
c.DockerSpawner.environment = {{"HOME": "/tmp"}}
c.JupyterHub.hub_ip = "0.0.0.0"
c.JupyterHub.hub_connect_ip = "{address}"
c.JupyterHub.bind_url = "http://127.0.0.1:8000"
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.ConfigurableHTTPProxy.command = ["{proxy_python}", "-c", "{proxy}"]
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the daemon of all users is root's")


def _python_files() -> list[str]:
    """Return what containers need to run the tests' Python: it, its environment, its libraries."""
    standard = Path(sysconfig.get_path("stdlib"))
    program = Path(sys.executable).resolve()
    modules = [*standard.glob("lib-dynload/*.so"), *Path(zmq.__file__).parent.rglob("*.so")]
    words = subprocess.check_output(["ldd", program, *modules], text=True).split()
    paths = {word for word in words if word.startswith("/") and not word.endswith(":")}
    libraries = {path for path in paths if not path.startswith(sys.prefix)}
    return [str(program.parent), str(standard), sys.prefix, *sorted(libraries)]


@pytest.fixture(params=[DOCKER])
def docker(request: pytest.FixtureRequest, slice_image: Path) -> Iterator[DockerMachine]:
    """A machine with one T4, 15079 MiB in 14 units, and a bridge for its containers."""
    chosen: Engine = request.param
    with serving(chosen.create(), slice_image) as made:
        assert isinstance(made, DockerMachine)
        made.stop_engine()
        made.run("ip", "link", "add", BRIDGE, "type", "bridge")
        made.run("ip", "address", "add", f"{ADDRESS}/24", "dev", BRIDGE)
        made.run("ip", "link", "set", BRIDGE, "up")
        made.start_engine("--bridge", BRIDGE)
        made.wait_for_engine()
        made.run("sh", "-c", "echo ben:x:61002:61002::/:/bin/sh >> /etc/passwd")
        yield made


@pytest.fixture
def hub(docker: DockerMachine, tmp_path: Path) -> Iterator[Hub]:
    """A hub on this machine."""
    docker.run("mount", "--bind", REPOSITORY, HERE)
    site = SITE.format(
        image=IMAGE,
        volumes={path: path for path in _python_files()},
        python=sys.executable,
        address=ADDRESS,
        proxy_python=PYTHON,
        proxy=PROXY,
    )
    made = Hub(SharedMachine(docker.pid), tmp_path / "log", DOCUMENTED + site)
    made.machine.run(f"mkdir {DIRECTORY}")
    made.open_browser()
    try:
        made.start()
        yield made
    finally:
        made.close()
        made.end()


def test_users_choice_is_their_containers_slice_and_the_next_one_waits(
    docker: DockerMachine, hub: Hub
) -> None:
    """4 units of a T4 are 4308 MiB. 4 + 12 units do not fit into 14. Each user pays."""

    def ready(user: str) -> bool:
        return any(server["ready"] for server in hub.servers(user).values())

    def states() -> dict[str, tuple[str, str]]:
        return {name: (job["user"], job["state"]) for name, job in docker.jobs().items()}

    hub.choose("alice", "4 GiB of a card")
    eventually(lambda: ready("alice"))
    alice, ben = {"jupyter-alice": ("alice", "running")}, {"jupyter-ben": ("ben", "waiting")}
    assert states() == alice
    for mib, result in ((4308, 0), (4309, 2)):
        said = docker.command("exec", "jupyter-alice", "slice_client", str(mib))
        assert said == f"1 4308 {result}"

    hub.choose("ben", "12 GiB")
    eventually(lambda: states() == alice | ben)
    hub.stop("ben")  # He gives up waiting.
    eventually(lambda: states() == alice)

    hub.choose("ben", "12 GiB")
    eventually(lambda: states() == alice | ben)
    assert not ready("ben")
    hub.stop("alice")
    eventually(lambda: ready("ben"))
    assert states() == {"jupyter-ben": ("ben", "running")}
    hub.stop("ben")
    eventually(lambda: states() == {})
