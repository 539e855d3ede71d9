"""The device files by which the kernel lets a process use a MIG instance.

A process needs the files of its GPU instance and its compute instance beside those of the card. Everybody may
open all of them, so a lease hides those that are not its own (`isolation/sandbox.py`).

The driver has nvidia-modprobe make the files when NVML needs them. In the container of a node program there
is no nvidia-modprobe, so missing files are made here, by the same rule.
"""

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from fenka.hardware.mig_instances import MigError

DEVICES = Path("dev/nvidia-caps")
"""Below the root of the file system."""

_CAPABILITIES = Path("proc/driver/nvidia/capabilities")


class NoCapability(MigError):
    """The driver has no device file for an instance."""


def administration_files(root: Path = Path("/")) -> list[Path]:
    """Return the device files by which a program may divide cards; make those that are missing.

    Raises:
        NoCapability: The driver has none, since no card here has MIG.
        OSError: They cannot be made.
    """
    mig = root / _CAPABILITIES / "mig"
    return [_device(mig / name, root) for name in ("config", "monitor")]


def device_files(card: int, gpu: int, compute: Iterable[int], root: Path = Path("/")) -> list[Path]:
    """Return the device files of a GPU instance and its compute instances; make those that are missing.

    Args:
        card: N of the card's /dev/nvidiaN.
        gpu: The GPU instance's id.
        compute: Ids of compute instances.
        root: Of the file system.

    Raises:
        NoCapability: The driver has none for it, or says so in another way.
        OSError: They cannot be made.
    """
    instance = root / _CAPABILITIES / f"gpu{card}" / "mig" / f"gi{gpu}"
    files = [instance / "access", *(instance / f"ci{number}" / "access" for number in compute)]
    return [_device(file, root) for file in files]


def _device(file: Path, root: Path) -> Path:
    """Return the device file of a capability. Raises NoCapability, OSError."""
    minor, mode = _read(file)
    device = root / DEVICES / f"nvidia-cap{minor}"
    if not device.exists():
        device.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mknod(device, stat.S_IFCHR, os.makedev(_major(root), minor))
            device.chmod(mode)  # whatever the umask is
    return device


def _major(root: Path) -> int:
    for line in (root / "proc/devices").read_text().splitlines():
        number, _, name = line.strip().partition(" ")
        if name == "nvidia-caps":
            return int(number)
    raise NoCapability(
        f"{root / 'proc/devices'} has no nvidia-caps: see whether the driver is loaded"
    )


def _read(file: Path) -> tuple[int, int]:
    """Return the minor number and the mode that a capability's file states."""
    try:
        fields = dict(line.split(":", 1) for line in file.read_text().splitlines())
        return int(fields["DeviceFileMinor"]), int(fields["DeviceFileMode"]) & 0o777
    except (OSError, ValueError, KeyError) as why:
        raise NoCapability(
            f"{file} does not say which device file an instance has ({why}): see whether the driver is "
            "loaded completely, and nvidia-modprobe is installed"
        ) from None
