"""One machine for all tests of a session. fenka's package is installed there, where each test begins."""

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.release.deb import build_deb
from deploy.release.recipe import ROOT, Release
from tools.docs.shell import timed
from vm import guest_disk
from vm.guest import Guest, QemuGuest
from vm.namespaces import NamespaceGuest

SECONDS = 5400
NEXT = "99.0-1"
"""The version of a package whose code differs from this checkout's."""

MACHINE = os.environ.get("FENKA_VM", "qemu")
"""Or `namespaces`: systemd on this machine's kernel."""

SUITE = os.environ.get("FENKA_VM_SUITE", "bookworm")

FOLDER = os.environ.get("FENKA_VM_FOLDER", "")
"""Keeps the packages, and the machine in which they are installed. Later runs of this version start there."""

PREPARE = """\
mountpoint -q /mnt || mount -o ro /dev/vdb /mnt
find / -xdev -not -path '/mnt/*' | sort > /root/before
"""
INSTALL = "apt-get install -y /mnt/current/*.deb 2>&1"
SIMULATE = """\
sed -i 's/^#simulate/simulate/' /etc/fenka/daemon.toml
systemctl restart fenka
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the emulated machine time."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(SECONDS))


@dataclass(frozen=True)
class Lab:
    """The machine, and what was seen when the package was installed in it.

    Attributes:
        guest: The machine.
        output: Output of apt.
        status: The unit's status before the machine had cards.
        failed: Failed units then.
    """

    guest: Guest
    output: str
    status: str
    failed: str


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the session."""
    return Path(FOLDER) if FOLDER else tmp_path_factory.mktemp("vm")


@pytest.fixture(scope="session")
def packages(work: Path) -> Path:
    """Return a folder with the package of this checkout and with a repository of the next version."""
    folder = work / "packages"
    if (folder / "next" / "Packages").exists():
        return folder
    release = Release(folder / "current", ("x86_64",))
    for name in ("current", "next"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    release.uv("build", "--quiet", "--wheel", "--out-dir", folder, ROOT)
    wheel = next(folder.glob("*.whl"))
    build_deb(release, wheel, "x86_64", preset=0)
    after = Release(folder / "next", ("x86_64",))
    _package_list(build_deb(after, _changed(wheel), "x86_64", NEXT, preset=0))
    return folder


def _changed(wheel: Path) -> Path:
    """Return a wheel with the same names and other code, as that of the next version."""
    changed = wheel.parent / "changed" / wheel.name
    changed.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(changed, "w") as after:
        for entry in before.infolist():
            content = before.read(entry)
            if entry.filename == "fenka/procfs.py":
                content += b"\n# The next version.\n"
            after.writestr(entry, content)
    return changed


def _package_list(package: Path) -> None:
    """Make the folder of a package a repository for apt."""
    control = guest_disk.output("dpkg-deb", "--field", package)
    content = package.read_bytes()
    listed = (
        f"{control.rstrip()}\nFilename: ./{package.name}\nSize: {len(content)}\n"
        f"SHA256: {hashlib.sha256(content).hexdigest()}\n"
    )
    (package.parent / "Packages").write_text(listed)


@pytest.fixture(scope="session")
def installed(packages: Path, work: Path) -> Iterator[Lab]:
    """Boot a machine, install the package, and save the machine once it has a simulated card."""
    missing = guest_disk.missing_packages()
    if missing:
        pytest.exit(f"the virtual machine needs packages: apt install {' '.join(missing)}", 1)
    folder = work / MACHINE
    folder.mkdir(exist_ok=True)
    guest = _guest(folder, packages)
    seen = folder / "installed.json"
    try:
        if not seen.exists():
            guest.start()
            seen.write_text(json.dumps(_install(guest)))
        yield Lab(guest, **json.loads(seen.read_text()))
    finally:
        guest.close()


def _install(guest: Guest) -> dict[str, str]:
    """Install the package, save the machine once it has a simulated card, and return what was seen."""
    guest.run(PREPARE)
    with timed("apt install ./fenka_0.2.0-1_amd64.deb"):
        seen = {"output": guest.run(INSTALL)}
    # A unit's status is also an exit code, and this one is that of a unit that does not run.
    seen["status"] = guest.until("systemctl status fenka", _settled)
    seen["failed"] = guest.run("systemctl list-units --failed --no-legend --plain")
    guest.run(SIMULATE)
    guest.save("installed")
    return seen


def _guest(folder: Path, packages: Path) -> Guest:
    disk = guest_disk.build(SUITE)
    if MACHINE == "namespaces":
        return NamespaceGuest(disk.root, folder, packages)
    image = folder / "packages.ext4"
    if not image.exists():
        guest_disk.make_filesystem(packages, image, "200M")
    return QemuGuest(disk, folder, image)


def _settled(status: str) -> str:
    return "" if re.search(r"Active: (de)?activating", status) else status


@pytest.fixture
def guest(installed: Lab) -> Guest:
    """Return the machine with fenka, a simulated T4, and no program on it."""
    installed.guest.restore("installed")
    return installed.guest
