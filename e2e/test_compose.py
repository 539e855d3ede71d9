"""Services of a Compose file in slices: podman-compose with Debian's Podman, and Docker's Compose."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.container_engines import DOCKER, Engine, podman
from e2e.container_machine import IMAGE, ROOT, ContainerMachine, eventually, serving

FILE = Path("/run/project/compose.yaml")
SERVICES = f"""
services:
  model:
    image: {IMAGE}
    network_mode: none
    command: [sh, -c, "slice_client 4308; slice_client 4309; exec sleep 1000"]
    devices: ["fenka.io/slice=4"]
    environment: [FENKA_NAME=model]
  worker:
    image: {IMAGE}
    network_mode: none
    command: [sleep, "1000"]
    devices: ["fenka.io/slice=any"]
    environment: {{FENKA_GPU_MEM: 2}}
    scale: 2
  web:
    image: {IMAGE}
    network_mode: none
    command: [sleep, "1000"]
"""
"""8 of the 14 units of a T4 in three containers, and one container without a slice."""
RESERVED = """deploy: {resources: {reservations: {devices: [
      {driver: cdi, capabilities: [gpu], device_ids: [fenka.io/slice=any]}]}}}"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the daemon of all users is root's")


@pytest.fixture(scope="module", params=[podman("crun"), DOCKER])
def engine(request: pytest.FixtureRequest, slice_image: Path) -> Iterator[ContainerMachine]:
    """A machine with one T4: 15079 MiB, 14 units. Who names nobody that pays gets no slice."""
    chosen: Engine = request.param
    with serving(chosen.create(), slice_image, "--charge", "refuse") as made:
        yield made


@pytest.fixture(autouse=True)
def _remove_containers(engine: ContainerMachine) -> Iterator[None]:
    yield
    engine.remove_containers()


def write(engine: ContainerMachine, text: str, file: Path = FILE) -> None:
    """Write a Compose file."""
    engine.run("mkdir", "-p", FILE.parent)
    engine.run("tee", file, input=text, stdin=None)


def compose(engine: ContainerMachine, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `fenka compose` to its end in the project's directory."""
    command = (sys.executable, "-m", "fenka", "compose", "--program", engine.compose, *words)
    return engine.run("env", "-C", FILE.parent, *command)


def container(engine: ContainerMachine, service: str) -> str:
    """Return the name of a service's container."""
    return engine.compose_separator.join(("project", service, "1"))


def containers(engine: ContainerMachine) -> dict[str, str]:
    """Return the ids of the running containers by name."""
    lines = engine.command("ps", "--format", "{{.Names}} {{.ID}}").splitlines()
    return dict(line.split() for line in lines)


def test_services_have_the_slices_that_the_users_ticket_pays_for(engine: ContainerMachine) -> None:
    """4 units are 15079 * 4 // 14 = 4308 MiB. Without fenka's command nobody pays, so none starts."""
    write(engine, SERVICES)
    engine.run("env", "-C", FILE.parent, engine.compose, "up", "-d")
    assert containers(engine).keys() <= {container(engine, "web")}
    engine.run("env", "-C", FILE.parent, engine.compose, "down", "-t", "0")
    done = compose(engine, "up", "-d")
    assert done.returncode == 0, done.stderr
    assert len(containers(engine)) == 4
    units = sorted(piece["memory_mib"] for job in engine.jobs().values() for piece in job["slices"])
    assert units == [15079 * 2 // 14, 15079 * 2 // 14, 15079 * 4 // 14]
    assert {job["user"] for job in engine.jobs().values()} == {"root"}
    eventually(lambda: "1 4308 2" in engine.logs(container(engine, "model")))
    assert "1 4308 0" in engine.logs(container(engine, "model"))
    assert "FENKA" not in engine.command("exec", container(engine, "web"), "busybox", "env")


def test_unchanged_services_go_on_when_it_is_called_again(engine: ContainerMachine) -> None:
    """Their environment is the same. One that was changed is replaced, and the project's ticket takes it."""
    write(engine, SERVICES)
    assert compose(engine, "up", "-d").returncode == 0
    before = containers(engine)
    assert compose(engine, "up", "-d").returncode == 0
    assert containers(engine) == before
    write(engine, SERVICES.replace("FENKA_NAME=model", "FENKA_NAME=changed"))
    done = compose(engine, "up", "-d")
    after = containers(engine)
    assert after.keys() == before.keys(), done.stderr
    model = container(engine, "model")
    assert after[model] != before[model]
    eventually(lambda: "changed" in engine.jobs())


@pytest.mark.parametrize(
    ("services", "words", "sentence"),
    [
        ("services: {web: {image: x}}", ["up"], "no service of this Compose file has a slice"),
        (SERVICES, ["down"], "fenka compose knows up, create, run, scale, not down"),
        (SERVICES, ["-f", "missing.yaml", "up"], "missing.yaml"),
    ],
)
def test_what_cannot_start_gets_a_sentence(
    engine: ContainerMachine, services: str, words: list[str], sentence: str
) -> None:
    """And starts nothing."""
    write(engine, services)
    done = compose(engine, *words)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert not containers(engine)


def test_reserved_devices_are_slices_or_refused(engine: ContainerMachine) -> None:
    """podman-compose does not read them, and would start containers without a slice."""
    write(engine, SERVICES.replace('devices: ["fenka.io/slice=any"]', RESERVED))
    done = compose(engine, "up", "-d")
    if engine.engine == "podman":
        assert "podman-compose starts worker without its slice" in done.stderr
        assert not containers(engine)
        return
    assert done.returncode == 0, done.stderr
    units = sorted(piece["memory_mib"] for job in engine.jobs().values() for piece in job["slices"])
    assert units == [15079 * 2 // 14, 15079 * 2 // 14, 15079 * 4 // 14]


PAGE = ROOT / "docs" / "start" / "one-card.md"
STAND_INS = Path("/run/project/stand-ins.json")
TRAIN = """
trap "echo checkpoint; exit 1" TERM
slice_client 8192
while true; do sleep 1000 & wait $!; done
"""


def test_services_at_home_share_one_card(engine: ContainerMachine) -> None:
    """The page's own file, with stand-ins for the images.

    A T4 has 15079 MiB. 6144 + 8192 fit, and 6144 + 2 * 8192 do not.
    """
    write(engine, re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)[0])
    programs = {
        "ollama": "slice_client 6144; exec sleep 1000",
        "comfyui": "slice_client 8192; exec sleep 1000",
        "training": TRAIN,
    }
    common = {"image": IMAGE, "network_mode": "none"}
    services = {
        name: common | {"command": ["sh", "-c", program]} for name, program in programs.items()
    }
    write(engine, json.dumps({"services": services}), STAND_INS)

    def up(name: str) -> None:
        done = compose(engine, "-f", FILE, "-f", STAND_INS, "up", "-d", name)
        assert done.returncode == 0, done.stderr

    def states() -> dict[str, str]:
        return {name: job["state"] for name, job in engine.jobs().items()}

    def said(name: str) -> str:
        return engine.logs(container(engine, name))

    full = {"ollama": "running", "comfyui": "running", "training": "waiting"}
    up("ollama")
    up("training")
    eventually(lambda: states() == {"ollama": "running", "training": "running"})
    eventually(lambda: "1 8192 0" in said("training"))
    up("comfyui")
    eventually(lambda: states() == full)
    eventually(lambda: "1 6144 0" in said("ollama") and "1 8192 0" in said("comfyui"))
    assert said("training").count("checkpoint") == 1
    engine.command("stop", "-t", "0", container(engine, "comfyui"))
    eventually(lambda: said("training").count("1 8192 0") == 2)
    engine.command("start", container(engine, "comfyui"))
    eventually(lambda: states() == full)
    assert said("training").count("checkpoint") == 2
