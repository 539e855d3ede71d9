"""Builds the disk of a machine: a small Debian with systemd, sshd, Python and two ordinary users.

The unpacked packages are kept in the cache of the end-to-end tests, one folder for each release of Debian.
"""

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

USERS = ("alice", "bob")
PACKAGES = (
    *(
        "systemd",
        "systemd-sysv",
        "systemd-timesyncd",
        "libpam-systemd",
        "dbus",
        "dbus-user-session",
    ),
    *(
        "python3",
        "linux-image-cloud-amd64",
        "initramfs-tools",
        "zstd",
        "openssh-server",
        "iproute2",
    ),
    *("procps", "udev", "kmod", "login", "passwd", "util-linux"),
    *("iptables", "runc", "conmon"),
)
MODULES = ("virtio_pci", "virtio_blk", "virtio_net", "ext4", "crc32c_generic")
"""Of the initrd: the machine's only devices. A whole initrd takes long to unpack."""

MASKED = (
    *("systemd-networkd-wait-online.service", "apt-daily.timer", "apt-daily-upgrade.timer"),
    *("dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service", "fstrim.timer"),
    "systemd-timesyncd.service",
)
"""What costs time at boot and tests nothing."""

TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "debootstrap": "debootstrap",
    "mkfs.ext4": "e2fsprogs",
    "ssh": "openssh-client",
    "lintian": "lintian",
}
CACHE = Path(os.environ.get("FENKA_E2E_CACHE", Path.home() / ".cache" / "fenka-e2e"))
KEY = CACHE / "vm-key"
"""All users log in with it."""

LOGIN_MAC = "52:54:00:12:34:56"

NETWORK = f"""\
[Match]
MACAddress={LOGIN_MAC}
[Network]
Address=10.0.2.15/24
Gateway=10.0.2.2
"""

PATIENCE = """\
[Manager]
DefaultTimeoutStartSec=900
"""
"""The emulated machine is slow, and may be one of several on a busy one."""


@dataclass(frozen=True)
class GuestDisk:
    """What a machine is started from.

    Attributes:
        folder: Contains `disk.ext4`, `vmlinuz` and `initrd`.
        root: The same files as on the disk.
    """

    folder: Path
    root: Path


def missing_packages() -> list[str]:
    """Return Debian's packages that have to be installed before a machine can be built."""
    return sorted(package for tool, package in TOOLS.items() if shutil.which(tool) is None)


def build(suite: str = "bookworm") -> GuestDisk:
    """Return the disk of this release of Debian; build it if the cache has none. Needs root."""
    root = _debootstrap(suite)
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    disk = GuestDisk(CACHE / f"vm-{suite}-{key}", root)
    if (disk.folder / "disk.ext4").exists():
        return disk
    disk.folder.mkdir(parents=True, exist_ok=True)
    _configure(root)
    for name, file in (("vmlinuz", "vmlinuz-*"), ("initrd", "initrd.img-*")):
        shutil.copyfile(next((root / "boot").glob(file)), disk.folder / name)
    make_filesystem(root, disk.folder / "disk.ext4", "2500M")
    return disk


def make_filesystem(content: Path, image: Path, size: str) -> None:
    """Make an image with the files of a folder. It has its name only once it is complete."""
    part = image.with_suffix(".part")
    part.unlink(missing_ok=True)
    output("mkfs.ext4", "-q", "-F", "-d", content, part, size)
    part.rename(image)


def _debootstrap(suite: str) -> Path:
    """Return a folder with the packages unpacked and configured."""
    key = hashlib.sha256("\n".join(PACKAGES).encode()).hexdigest()[:12]
    root = CACHE / f"vm-root-{suite}-{key}"
    if not root.exists():
        part = root.with_suffix(".part")
        if part.exists():
            _unmount(part)
            shutil.rmtree(part)
        output("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", suite, part)
        _unmount(part)
        part.rename(root)
    return root


def _unmount(root: Path) -> None:
    """Unmount what debootstrap leaves, since mkfs.ext4 and rmtree would enter that."""
    for name in ("proc", "sys"):
        if (root / name).is_mount():
            output("umount", root / name)


def _configure(root: Path) -> None:
    _write(root / "etc/hostname", "lab\n")
    _write(root / "etc/hosts", "127.0.0.1 localhost\n127.0.1.1 lab\n")
    _write(root / "etc/fstab", "/dev/vda / ext4 defaults 0 1\n")
    _write(root / "etc/systemd/network/10-lab.network", NETWORK)
    _write(root / "etc/ssh/sshd_config.d/lab.conf", "UseDNS no\n")
    _write(root / "etc/apt/sources.list", "")
    for unit in ("system.conf.d/lab.conf", "system/user@.service.d/lab.conf"):
        (root / "etc/systemd" / unit).unlink(missing_ok=True)  # Of an earlier version of this file.
    _write(root / "etc/systemd/system.conf.d/patience.conf", PATIENCE)
    # An administrator's journal is on the disk, so that it is there after a power loss.
    (root / "var/log/journal").mkdir(exist_ok=True)
    for unit in MASKED:
        link = root / "etc/systemd/system" / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    output("chroot", root, "systemctl", "--quiet", "enable", "systemd-networkd", "ssh")
    if not KEY.exists():
        output("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", KEY)
    for user in ("root", *USERS):
        home = root / ("root" if user == "root" else f"home/{user}")
        if not home.exists():
            output("chroot", root, "useradd", "-m", "-s", "/bin/bash", user)
        (home / ".ssh").mkdir(mode=0o700, exist_ok=True)
        shutil.copyfile(KEY.with_suffix(".pub"), home / ".ssh/authorized_keys")
        output("chroot", root, "chown", "-R", f"{user}:", home.relative_to(root) / ".ssh")
    initramfs = root / "etc/initramfs-tools"
    lines = (initramfs / "initramfs.conf").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("MODULES=", "COMPRESS="))]
    _write(initramfs / "initramfs.conf", "\n".join([*kept, "MODULES=list", "COMPRESS=zstd"]) + "\n")
    _write(initramfs / "modules", "".join(f"{name}\n" for name in MODULES))
    output("chroot", root, "update-initramfs", "-u")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def output(*words: str | Path) -> str:
    """Run a program, and return what it prints. Raises RuntimeError with that if it fails."""
    command = [str(word) for word in words]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stdout[-2000:]}")
    return done.stdout
