"""The CDI specification: complete, and with only the allocated cards."""

import os
from pathlib import Path

import pytest

from fenka.core.request import Slice
from fenka.hardware import driver_edits
from fenka.isolation import lease_files as isolation_files
from fenka.node.lease import files
from fenka.node.lease.store import Lease
from tests.hardware.trees import ELF
from tests.node.harness import card, lease_files

VERSION = "550.163.01"
SELINUX = "security.selinux"


def driver(root: Path) -> None:
    """The files of a driver, and of two cards."""
    libraries = root / driver_edits.LIBRARY_DIRECTORIES[0].relative_to("/")
    libraries.mkdir(parents=True)
    names = ("cuda", "nvidia-ml", "nvidia-ptxjitcompiler", "nvcuvid", "nvidia-opencl", "GLX_nvidia")
    for name in names:
        (libraries / f"lib{name}.so.{VERSION}").write_bytes(ELF)
    for name in ("cuda", "nvidia-ml"):
        (libraries / f"lib{name}.so.1").symlink_to(f"lib{name}.so.{VERSION}")
    (root / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (root / "dev" / name).touch()
    (root / "usr" / "bin").mkdir()
    (root / "usr" / "bin" / "nvidia-smi").touch()


def test_driver_edits_have_only_the_allocated_cards(tmp_path: Path) -> None:
    """The driver's two main libraries stand behind the proxy, the others in place."""
    driver(tmp_path)
    made = driver_edits.driver_edits([1], VERSION, tmp_path)
    assert [str(device) for device in made.devices] == [
        "/dev/nvidia1",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
    ]
    place = driver_edits.LIBRARY_DIRECTORIES[0]
    assert made.libraries == {
        "libcuda.so.1": place / f"libcuda.so.{VERSION}",
        "libnvidia-ml.so.1": place / f"libnvidia-ml.so.{VERSION}",
    }
    targets = {str(mount.target) for mount in made.mounts}
    assert f"{place}/libnvidia-ptxjitcompiler.so.1" in targets
    assert "/usr/bin/nvidia-smi" in targets
    assert not any(
        "libcuda.so" in target or "libnvidia-ml" in target or "GLX" in target for target in targets
    )
    nvml = tmp_path / place.relative_to("/") / f"libnvidia-ml.so.{VERSION}"
    assert files.nvml_file(tmp_path) == nvml


@pytest.mark.parametrize("unlimited", [False, True])
def test_driver_edits_have_opencl_only_when_it_is_allowed(tmp_path: Path, unlimited: bool) -> None:
    """It opens the card without libcuda, so no limit holds for it."""
    driver(tmp_path)
    made = driver_edits.driver_edits([1], VERSION, tmp_path, unlimited=unlimited)
    assert any("opencl" in mount.target.name for mount in made.mounts) is unlimited


def test_driver_edits_fail_with_a_sentence_when_the_driver_is_missing(tmp_path: Path) -> None:
    """The program logs it."""
    with pytest.raises(driver_edits.NoDriverFiles, match=r"no libcuda\.so\.550\.163\.01 is in"):
        driver_edits.driver_edits([0], VERSION, tmp_path)


def test_specification_has_every_part_of_a_lease(library: Path, tmp_path: Path) -> None:
    """Shim, limits, account, driver and proxy: every source exists, and every target occurs once."""
    spec = files.specification(
        "t", tmp_path, library, files.simulated_edits(library, tmp_path), {"A": "b=c"}
    )
    (device,) = spec["devices"]
    assert (spec["kind"], device["name"]) == ("fenka.io/lease", "t")
    edits = device["containerEdits"]
    assert edits["env"] == ["A=b=c"]
    assert "deviceNodes" not in edits
    targets = [mount["containerPath"] for mount in edits["mounts"]]
    assert len(set(targets)) == len(targets)
    assert {
        "/run/fenka/lease",
        "/run/fenka/lease/libfenka.so",
        "/run/fenka/account",
        "/run/fenka/driver/libcuda.so.1",
        "/run/fenka/simulated",
        "/etc/ld.so.preload",
        "/etc/ld-nix.so.preload",
        "/usr/lib64/libcuda.so.1",
        f"{driver_edits.LIBRARY_DIRECTORIES[0]}/libnvidia-ml.so.1",
    } <= set(targets)
    written = [mount["containerPath"] for mount in edits["mounts"] if "rw" in mount["options"]]
    assert written == ["/run/fenka/account", "/run/fenka/simulated"]
    made_later = ("/lease", "/account")
    for mount in edits["mounts"]:
        assert Path(mount["hostPath"]).exists() or mount["hostPath"].endswith(made_later), mount


def test_files_of_a_lease_are_for_containers_where_selinux_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the specification is written, by which a container could start."""
    try:
        os.setxattr(tmp_path, SELINUX, b"system_u:object_r:var_t:s0")
    except OSError as error:
        pytest.skip(f"this file system has no labels, or this user may not write them: {error}")
    monkeypatch.setattr(isolation_files, "has_selinux", lambda _: True)
    made = lease_files(tmp_path)
    made.prepare()
    piece = Slice(0, card(0).uuid, 1024, 0)
    made.make("t", Lease("u", "default", "p", "c", [piece], [piece], {}, library="/nowhere"))
    lease = tmp_path / "leases" / "t"
    for path in (lease, *lease.rglob("*")):
        label = os.getxattr(path, SELINUX).decode().rstrip("\0")
        assert label == isolation_files.CONTAINER_LABEL, path
    assert os.getxattr(tmp_path, SELINUX) == b"system_u:object_r:var_t:s0"
