"""The static devices by which containers request slices."""

import json
from pathlib import Path
from typing import Any

import pytest

from fenka.hardware.driver_edits import ContainerEdits, Mount
from fenka.workstation import files
from fenka.workstation.containers import cdi_devices
from fenka.workstation.containers.cdi_devices import CARDS, SLICES, CdiMachine, specification
from fenka.workstation.paths import Runtime

GOLDEN = Path(__file__).parent / "fenka.json"
NATIVE = Path("/var/lib/fenka/workstation/1")
RUNTIME = Runtime(Path("/run/fenka"))
SMALL = CdiMachine([3000, 2000], 1024)
"""Cards of 2 and 1 GiB and a half: the larger one has two units."""


def names(kind: str, machine: CdiMachine) -> list[str]:
    """Return the names of a kind's devices."""
    return [device["name"] for device in specification(kind, machine, NATIVE, RUNTIME)["devices"]]


def test_file_is_as_engines_were_seen_to_read_it() -> None:
    """Podman 4.3 and Docker 28 read this; a change is tried with both."""
    assert json.loads(GOLDEN.read_text()) == specification(SLICES, SMALL, NATIVE, RUNTIME)


def test_only_whole_cards_have_drivers_that_are_not_limited() -> None:
    """OpenCL opens the card without libcuda, so no limit of a slice holds for it."""
    names = ("libnvidia-opencl.so.1", "libnvidia-ptxjitcompiler.so.1")
    mounts = tuple(Mount(Path("/usr/lib") / name, Path("/usr/lib64") / name) for name in names)
    machine = CdiMachine([15079], 1024, ContainerEdits({}, mounts))

    def targets(kind: str) -> set[str]:
        edits = specification(kind, machine, NATIVE, RUNTIME)["containerEdits"]
        return {Path(mount["containerPath"]).name for mount in edits["mounts"]}

    assert targets(CARDS) - targets(SLICES) == {"libnvidia-opencl.so.1"}
    assert "libnvidia-ptxjitcompiler.so.1" in targets(SLICES)


def test_sizes_go_up_to_the_largest_card() -> None:
    """A T4 of 15079 MiB has 14 units and 14 whole GiB; 256-MiB units are 58 of them."""
    t4 = CdiMachine([15079], 1024)
    assert names(SLICES, t4) == [
        *("any", *(f"{gib}GiB" for gib in range(1, 15)), *map(str, range(1, 15)))
    ]
    assert names(SLICES, CdiMachine([15079], 256))[-1] == "58"
    assert names(CARDS, CdiMachine([15079, 81920], 1024)) == ["1", "2"]


def test_units_without_number_have_no_names() -> None:
    """15079 devices of a MiB would be a file of megabytes, which engines read at each start."""
    assert names(SLICES, CdiMachine([15079], 1))[-1] == "14GiB"


def test_real_driver_adds_all_cards_and_its_files() -> None:
    """The lease decides which card; the shim shows no other."""
    driver = ContainerEdits(
        {}, (Mount(Path("/d/nvidia-smi"), Path("/usr/bin/nvidia-smi")),), (Path("/dev/nvidia0"),)
    )
    edits = specification(SLICES, CdiMachine([3000], 1024, driver), NATIVE, RUNTIME)[
        "containerEdits"
    ]
    assert edits["deviceNodes"] == [{"path": "/dev/nvidia0"}]
    assert edits["mounts"][-1]["containerPath"] == "/usr/bin/nvidia-smi"


def test_nothing_below_run_is_named_but_the_place() -> None:
    """/run is empty at a boot, before the daemon starts, and a missing source fails a start for good."""
    content = specification(SLICES, SMALL, NATIVE, RUNTIME)
    sources = [mount["hostPath"] for mount in content["containerEdits"]["mounts"]]
    assert not [source for source in sources if source.startswith("/run")]


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directories of this test's own in place of /etc and /var."""
    monkeypatch.setattr(cdi_devices, "DIRECTORY", tmp_path / "cdi")
    monkeypatch.setattr(cdi_devices, "DOCKER_OPTIONS", tmp_path / "daemon.json")
    monkeypatch.setattr(files, "SYSTEM_NATIVE", tmp_path / "native")
    return tmp_path


def test_files_are_written_only_if_they_change(etc: Path) -> None:
    """Engines watch the directory."""
    assert not cdi_devices.exist()
    assert cdi_devices.write(SMALL, RUNTIME)
    before = {path: path.stat().st_ino for path in (etc / "cdi").iterdir()}
    assert not cdi_devices.write(SMALL, RUNTIME)
    assert before == {path: path.stat().st_ino for path in (etc / "cdi").iterdir()}
    assert cdi_devices.write(CdiMachine([4000], 1024), RUNTIME)
    assert cdi_devices.exist()
    assert cdi_devices.problem() == ""


def test_hook_and_preload_are_there_when_the_file_is(etc: Path) -> None:
    """A container starts with all of it or not at all."""
    cdi_devices.write(SMALL, RUNTIME)
    content: Any = json.loads((etc / "cdi" / "fenka.json").read_text())
    mounts = content["containerEdits"]["mounts"]
    assert all(Path(mount["hostPath"]).is_file() for mount in mounts if mount["options"][0] == "ro")
    hook = Path(content["devices"][0]["containerEdits"]["hooks"][0]["path"])
    assert hook.stat().st_mode & 0o111
    assert hook.stat().st_size <= 64 << 10


def test_problem_names_what_is_wrong(etc: Path) -> None:
    """`fenka doctor` prints it."""
    assert cdi_devices.problem() == ""
    cdi_devices.write(SMALL, RUNTIME)
    (etc / "daemon.json").write_text('{"features": {"cdi": false}}')
    assert "turns CDI off" in cdi_devices.problem()
    for hook in (etc / "native").glob("*/fenka-hook"):
        hook.unlink()
    assert "is missing: `sudo fenka containers on`" in cdi_devices.problem()
    (etc / "cdi" / "fenka.json").write_text("[]")
    assert "is not understood" in cdi_devices.problem()
    assert cdi_devices.remove()
    assert not cdi_devices.remove()
