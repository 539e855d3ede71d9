"""Where a driver is found, on file trees as distributions make them, and what is not taken for one."""

import os
import shutil
from pathlib import Path

import pytest

from fenka.hardware import driver_edits, driver_places
from fenka.hardware.driver_places import LIBRARIES, InvalidDriverRoot, Search, search
from fenka.node.lease import files
from tests.hardware.trees import elf, install_driver

MACHINE = os.uname().machine
DEBIAN = f"/usr/lib/{MACHINE}-linux-gnu"
VERSION = "580.65.06"


def look(host: Path, configured: str = "", kernel: str = "") -> Search:
    """Search a tree; a kernel module of this version is loaded, or none."""
    module = host / "module-version"
    module.write_text(f"{kernel}\n")
    return search(host, configured, module)


def directory(found: Search) -> str:
    """Return the directory of the driver that is used, by the node's paths."""
    assert found.driver, found.problem
    return str(found.driver.directory)


@pytest.mark.parametrize(
    "place",
    [
        DEBIAN,
        f"{DEBIAN}/nvidia/current",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/glibc/usr/lib",
        "/usr/local/nvidia/lib64",
        "/home/kubernetes/bin/nvidia/lib64",
        f"/run/nvidia/driver{DEBIAN}",
        "/run/nvidia/driver/usr/lib64",
    ],
)
def test_driver_is_found_where_people_have_it(tmp_path: Path, place: str) -> None:
    """Debian, Red Hat, SUSE, Arch, Talos, GKE, driver containers of two kinds; the report says where."""
    install_driver(tmp_path, place, VERSION)
    found = look(tmp_path, kernel=VERSION)
    assert directory(found) == place
    assert not found.problem
    assert [looked.directory for looked in found.looked if looked.result] == [place]
    edits = driver_edits.driver_edits([0], VERSION, tmp_path)
    assert edits.libraries["libcuda.so.1"] == Path(place) / f"libcuda.so.{VERSION}"
    assert files.nvml_file(tmp_path) == tmp_path / place[1:] / f"libnvidia-ml.so.{VERSION}"


def test_nixos_links_lead_into_the_store(tmp_path: Path) -> None:
    """The links are absolute on the node, and are followed below the root as this process sees it."""
    store = install_driver(tmp_path, "/nix/store/abc-nvidia-x11/lib", VERSION)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/opengl-driver").symlink_to("/nix/store/def-graphics-drivers")
    merged = tmp_path / "nix/store/def-graphics-drivers/lib"
    merged.mkdir(parents=True)
    for name in LIBRARIES:
        (merged / name).symlink_to(f"/nix/store/abc-nvidia-x11/lib/{name}")
    found = look(tmp_path)
    assert directory(found) == "/nix/store/abc-nvidia-x11/lib"
    assert found.driver
    assert found.here(found.driver.libraries[LIBRARIES[0]]) == store / f"libcuda.so.{VERSION}"


def test_debian_links_only_the_main_libraries(tmp_path: Path) -> None:
    """By alternatives. A container needs the files beside the real ones, too."""
    real = install_driver(tmp_path, f"{DEBIAN}/nvidia/current", VERSION)
    (real / f"libnvidia-ptxjitcompiler.so.{VERSION}").write_bytes(elf())
    alternatives = tmp_path / "etc/alternatives"
    alternatives.mkdir(parents=True)
    for name in LIBRARIES:
        (alternatives / f"nvidia--{name}").symlink_to(f"{DEBIAN}/nvidia/current/{name}")
        (tmp_path / DEBIAN[1:] / name).symlink_to(f"/etc/alternatives/nvidia--{name}")
    found = look(tmp_path)
    assert directory(found) == f"{DEBIAN}/nvidia/current"
    assert len(found.found) == 1
    sources = {
        str(mount.source) for mount in driver_edits.driver_edits([0], VERSION, tmp_path).mounts
    }
    assert sources == {f"{DEBIAN}/nvidia/current/libnvidia-ptxjitcompiler.so.{VERSION}"}


def test_windows_subsystem_has_no_version_in_names(tmp_path: Path) -> None:
    """Its libraries are files with the plain names."""
    place = tmp_path / "usr/lib/wsl/lib"
    place.mkdir(parents=True)
    for name in LIBRARIES:
        (place / name).write_bytes(elf())
    assert directory(look(tmp_path)) == "/usr/lib/wsl/lib"


def test_a_container_s_absolute_links_stay_inside_it(tmp_path: Path) -> None:
    """They name paths of the driver container. On the node there is another file with that path."""
    root = tmp_path / "run/nvidia/driver"
    real = install_driver(root, "/opt/driver", VERSION)
    place = root / "usr/lib64"
    place.mkdir(parents=True)
    for name in LIBRARIES:
        (place / name).symlink_to(f"/opt/driver/{name}")
    install_driver(tmp_path, "/opt/driver", "470.1")
    found = look(tmp_path)
    assert found.driver
    assert found.driver.version == VERSION
    assert found.here(found.driver.libraries[LIBRARIES[0]]) == real / f"libcuda.so.{VERSION}"
    (place / LIBRARIES[0]).unlink()
    (place / LIBRARIES[0]).symlink_to("../../../../../../../opt/none/libcuda.so.1")
    assert look(tmp_path).driver is None, "a link above the root must stay in it"


def test_configured_directory_is_the_only_one(tmp_path: Path) -> None:
    """A root, or the directory of the libraries itself; a relative one is refused in a sentence."""
    install_driver(tmp_path, "/usr/lib64", "550.1")
    install_driver(tmp_path, "/data/driver/usr/lib64", VERSION)
    for configured in ("/data/driver", "/data/driver/", "/data/driver/usr/lib64"):
        found = look(tmp_path, configured)
        assert directory(found) == "/data/driver/usr/lib64"
        assert [driver.version for driver in found.found] == [VERSION]
    missing = look(tmp_path, "/data/none")
    assert missing.problem.startswith("no driver is in /data/none and")
    with pytest.raises(InvalidDriverRoot, match=r"data/driver is no absolute path: name"):
        look(tmp_path, "data/driver")


def test_tenants_cannot_offer_a_driver(tmp_path: Path) -> None:
    """A directory that others may write, one that a user owns, and a link of a user's: all are named."""
    place = install_driver(tmp_path, "/usr/lib64", VERSION)
    place.chmod(0o777)
    found = look(tmp_path)
    assert "others can replace /usr/lib64" in found.problem
    assert found.driver is None
    place.chmod(0o755)
    assert look(tmp_path).driver
    if os.geteuid() == 0:
        os.chown(place, 64001, 64001)
        assert "user 64001 or others can replace /usr/lib64" in look(tmp_path).problem
        os.chown(place, 0, 0)
        os.chown(place / LIBRARIES[0], 64001, 64001, follow_symlinks=False)
        assert "user 64001" in look(tmp_path).problem


def test_driver_of_the_kernel_s_version_is_used(tmp_path: Path) -> None:
    """Of two. Without a kernel module it is the first; of neither, the sentence says what to do."""
    install_driver(tmp_path, "/usr/lib64", "550.1")
    install_driver(tmp_path, "/run/nvidia/driver/usr/lib64", VERSION)
    assert directory(look(tmp_path, kernel=VERSION)) == "/run/nvidia/driver/usr/lib64"
    assert directory(look(tmp_path)) == "/usr/lib64"
    neither = look(tmp_path, kernel="610.1")
    assert "are 550.1 and the kernel's module is 610.1: restart" in neither.problem


def test_two_versions_in_one_directory_are_no_driver(tmp_path: Path) -> None:
    """An upgrade was interrupted."""
    place = install_driver(tmp_path, "/usr/lib64", VERSION)
    (place / "libcuda.so.570.1").write_bytes(elf())
    (place / LIBRARIES[0]).unlink()
    (place / LIBRARIES[0]).symlink_to("libcuda.so.570.1")
    assert f"two versions: 570.1 and {VERSION}" in look(tmp_path).problem


@pytest.mark.parametrize("content", [elf("", bits=32), elf("other"), b"", b"a text"])
def test_other_machines_libraries_are_not_taken(tmp_path: Path, content: bytes) -> None:
    """On Red Hat /usr/lib has those of 32 bits; the driver is in /usr/lib64."""
    install_driver(tmp_path, "/usr/lib", VERSION, content)
    assert f"is no library of {MACHINE} machines" in look(tmp_path).problem
    install_driver(tmp_path, "/run/nvidia/driver/usr/lib64", VERSION)
    assert directory(look(tmp_path)) == "/run/nvidia/driver/usr/lib64"


def test_a_toolkit_s_stub_is_no_driver(tmp_path: Path) -> None:
    """It exports the same functions, and is found by its directory or by the missing version."""
    stubs = tmp_path / "usr/local/cuda/lib64/stubs"
    stubs.mkdir(parents=True)
    place = tmp_path / "usr/lib64"
    place.mkdir(parents=True)
    for name in LIBRARIES:
        (stubs / name).write_bytes(elf())
        (place / name).symlink_to(f"/usr/local/cuda/lib64/stubs/{name}")
    assert "a stub for linking" in look(tmp_path).problem
    for name in LIBRARIES:
        (place / name).unlink()
        (place / name).write_bytes(elf())
    assert "has no version in its name" in look(tmp_path).problem


def test_restarted_driver_container_is_looked_up_again(tmp_path: Path) -> None:
    """Each lease is made with what is there then: nothing, and the next version."""
    root = tmp_path / "run/nvidia/driver"
    install_driver(root, "/usr/lib64", "570.1")
    assert driver_edits.driver_edits([0], "570.1", tmp_path).libraries
    shutil.rmtree(root)
    root.mkdir()
    with pytest.raises(
        driver_edits.NoDriverFiles, match=r"no libcuda\.so\.570\.1 is in the \d+ places"
    ):
        driver_edits.driver_edits([0], "570.1", tmp_path)
    install_driver(root, "/usr/lib64", VERSION)
    with pytest.raises(driver_edits.NoDriverFiles, match=f"driver {VERSION}"):
        driver_edits.driver_edits([0], "570.1", tmp_path)
    libraries = driver_edits.driver_edits([0], VERSION, tmp_path).libraries
    assert libraries[LIBRARIES[0]] == Path(f"/run/nvidia/driver/usr/lib64/libcuda.so.{VERSION}")


def test_programs_are_the_driver_container_s_own(tmp_path: Path) -> None:
    """nvidia-smi is taken from the root of the driver, before that of the node."""
    root = tmp_path / "run/nvidia/driver"
    install_driver(root, "/usr/lib64", VERSION)
    (root / "usr/bin").mkdir()
    (root / "usr/bin/nvidia-smi").write_bytes(elf())
    (mount,) = driver_edits.driver_edits([0], VERSION, tmp_path).mounts
    assert (str(mount.source), str(mount.target)) == (
        "/run/nvidia/driver/usr/bin/nvidia-smi",
        "/usr/bin/nvidia-smi",
    )


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    """The directory is refused, and others are searched."""
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr/lib64").symlink_to("/usr/lib64")
    install_driver(tmp_path, "/usr/lib", VERSION)
    found = look(tmp_path)
    assert directory(found) == "/usr/lib"
    assert any("link in a circle" in looked.result for looked in found.looked)


def test_stubs_of_the_linker_are_replaced_but_are_not_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs would load the stub, so the proxy must stand there, too; calls go on to the driver."""
    stubs = install_driver(tmp_path, "/cuda/lib64/stubs", VERSION)
    real = install_driver(tmp_path, "/opt/driver", VERSION)
    listed = "".join(
        f"\t{LIBRARIES[0]} (libc6,{driver_places._LINKER_KIND}) => {place}/{LIBRARIES[0]}\n"
        for place in (stubs, real)
    )
    monkeypatch.setattr(driver_places, "_linker_listing", lambda: listed)
    found = driver_places.libraries()[LIBRARIES[0]]
    assert found == (real / f"libcuda.so.{VERSION}", stubs / f"libcuda.so.{VERSION}")
