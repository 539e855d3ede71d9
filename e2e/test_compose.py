"""Services of a Compose file in slices: podman-compose with Debian's Podman."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.podman import IMAGE, ROOT, PodmanMachine, eventually, image_archive, machine

COMPOSE = Path(sys.prefix) / "bin" / "podman-compose"
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
RESERVED = "deploy: {resources: {reservations: {devices: [{device_ids: [fenka.io/slice=any]}]}}}"

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the daemon of all users is root's"),
    pytest.mark.skipif(not shutil.which("podman"), reason="apt-get install podman crun"),
]


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodmanMachine]:
    """A machine with one T4: 15079 MiB, 14 units. Who names nobody that pays gets no slice."""
    archive = image_archive(tmp_path_factory.mktemp("image"))
    runtime = "crun" if shutil.which("crun") else "runc"
    with machine(runtime, archive, "--charge", "refuse") as made:
        yield made


@pytest.fixture(autouse=True)
def _remove_containers(podman: PodmanMachine) -> Iterator[None]:
    yield
    podman.remove_containers()


def write(podman: PodmanMachine, text: str, file: Path = FILE) -> None:
    """Write a Compose file."""
    podman.run("mkdir", "-p", FILE.parent)
    podman.run("tee", file, input=text, stdin=None)


def compose(podman: PodmanMachine, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `fenka compose` to its end in the project's directory."""
    command = (sys.executable, "-m", "fenka", "compose", "--program", COMPOSE, *words)
    return podman.run("env", "-C", FILE.parent, *command)


def containers(podman: PodmanMachine) -> dict[str, str]:
    """Return the ids of the running containers by name."""
    lines = podman.podman("ps", "--format", "{{.Names}} {{.ID}}").splitlines()
    return dict(line.split() for line in lines)


def test_services_have_the_slices_that_the_users_ticket_pays_for(podman: PodmanMachine) -> None:
    """4 units are 15079 * 4 // 14 = 4308 MiB. Without fenka's command nobody pays, so none starts."""
    write(podman, SERVICES)
    podman.run("env", "-C", FILE.parent, COMPOSE, "up", "-d")
    assert containers(podman).keys() == {"project_web_1"}
    podman.run("env", "-C", FILE.parent, COMPOSE, "down")
    done = compose(podman, "up", "-d")
    assert done.returncode == 0, done.stderr
    assert len(containers(podman)) == 4
    units = sorted(piece["memory_mib"] for job in podman.jobs().values() for piece in job["slices"])
    assert units == [15079 * 2 // 14, 15079 * 2 // 14, 15079 * 4 // 14]
    assert {job["user"] for job in podman.jobs().values()} == {"root"}
    eventually(lambda: "1 4308 2" in podman.run("podman", "logs", "project_model_1").stdout)
    assert "1 4308 0" in podman.podman("logs", "project_model_1")
    assert "FENKA" not in podman.podman("exec", "project_web_1", "busybox", "env")


def test_unchanged_services_go_on_when_it_is_called_again(podman: PodmanMachine) -> None:
    """Their environment is the same. One that was changed is replaced, and the project's ticket takes it."""
    write(podman, SERVICES)
    assert compose(podman, "up", "-d").returncode == 0
    before = containers(podman)
    assert compose(podman, "up", "-d").returncode == 0
    assert containers(podman) == before
    write(podman, SERVICES.replace("FENKA_NAME=model", "FENKA_NAME=changed"))
    done = compose(podman, "up", "-d")
    after = containers(podman)
    assert after.keys() == before.keys(), done.stderr
    assert after["project_model_1"] != before["project_model_1"]
    eventually(lambda: "changed" in podman.jobs())


@pytest.mark.parametrize(
    ("services", "words", "sentence"),
    [
        ("services: {web: {image: x}}", ["up"], "no service of this Compose file has a slice"),
        (SERVICES, ["down"], "fenka compose knows up, create, run, scale, not down"),
        (SERVICES, ["-f", "missing.yaml", "up"], "missing.yaml"),
        (
            SERVICES.replace('devices: ["fenka.io/slice=any"]', RESERVED),
            ["up"],
            "podman-compose starts worker without its slice",
        ),
    ],
)
def test_what_cannot_start_gets_a_sentence(
    podman: PodmanMachine, services: str, words: list[str], sentence: str
) -> None:
    """And starts nothing."""
    write(podman, services)
    done = compose(podman, *words)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert not containers(podman)


PAGE = ROOT / "docs" / "start" / "one-card.md"
STAND_INS = Path("/run/project/stand-ins.json")
TRAIN = """
trap "echo checkpoint; exit 1" TERM
slice_client 8192
while true; do sleep 1000 & wait $!; done
"""


def test_services_at_home_share_one_card(podman: PodmanMachine) -> None:
    """The page's own file, with stand-ins for the images.

    A T4 has 15079 MiB. 6144 + 8192 fit, and 6144 + 2 * 8192 do not.
    """
    write(podman, re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)[0])
    programs = {
        "ollama": "slice_client 6144; exec sleep 1000",
        "comfyui": "slice_client 8192; exec sleep 1000",
        "training": TRAIN,
    }
    common = {"image": IMAGE, "network_mode": "none"}
    services = {
        name: common | {"command": ["sh", "-c", program]} for name, program in programs.items()
    }
    write(podman, json.dumps({"services": services}), STAND_INS)

    def up(name: str) -> None:
        done = compose(podman, "-f", FILE, "-f", STAND_INS, "up", "-d", name)
        assert done.returncode == 0, done.stderr

    def states() -> dict[str, str]:
        return {name: job["state"] for name, job in podman.jobs().items()}

    def said(name: str) -> str:
        return podman.run("podman", "logs", f"project_{name}_1").stdout

    full = {"ollama": "running", "comfyui": "running", "training": "waiting"}
    up("ollama")
    up("training")
    eventually(lambda: states() == {"ollama": "running", "training": "running"})
    eventually(lambda: "1 8192 0" in said("training"))
    up("comfyui")
    eventually(lambda: states() == full)
    eventually(lambda: "1 6144 0" in said("ollama") and "1 8192 0" in said("comfyui"))
    assert said("training").count("checkpoint") == 1
    podman.podman("stop", "-t", "0", "project_comfyui_1")
    eventually(lambda: said("training").count("1 8192 0") == 2)
    podman.podman("start", "project_comfyui_1")
    eventually(lambda: states() == full)
    assert said("training").count("checkpoint") == 2
