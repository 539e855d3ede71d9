"""A host tree of a simulated node: what NVIDIA's programs read of /proc, /sys and /dev beside NVML.

The card server keeps the capability files of instances in it. Nothing serves the device nodes. A user who may
not make any gets plain files.
"""

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from fenka.hardware.card_spec import NodeError, SimulatedCard

LINK = "host-tree"
"""In the node's directory, to the tree."""

CARDS, GPU_INSTANCES, COMPUTE_INSTANCES = 32, 15, 8
"""The driver's own device numbers, on any machine."""

_MODULES = (
    "nvidia_uvm 1540096 0 - Live 0x0000000000000000 (POE)\n"
    "nvidia 56713216 1 nvidia_uvm, Live 0x0000000000000000 (POE)\n"
)
_DEVICES = (
    "Character devices:\n195 nvidia\n195 nvidiactl\n195 nvidia-caps\n195 nvidia-uvm\n\n"
    "Block devices:\n"
)
_NVIDIA_MAJOR = 195
"""On every machine. The real driver has further ones, which the kernel chooses."""
_MODES = {"config": 256, "monitor": 292}


def minors() -> Iterator[tuple[str, int]]:
    """Return all capabilities and their minor numbers, in the driver's order."""
    yield "config", 1
    yield "monitor", 2
    minor = 3
    for card in range(CARDS):
        for gpu in range(GPU_INSTANCES):
            yield f"gpu{card}/gi{gpu}/access", minor
            for compute in range(COMPUTE_INSTANCES):
                yield f"gpu{card}/gi{gpu}/ci{compute}/access", minor + 1 + compute
            minor += 1 + COMPUTE_INSTANCES


def write(tree: Path, node: Path, cards: tuple[SimulatedCard, ...]) -> None:
    """Write the tree, and link the node to it. Raises NodeError.

    Args:
        tree: a directory that is made; an earlier tree in it is replaced.
        node: the node's directory, before its card server starts.
        cards: the node's.
    """
    try:
        for part in ("proc", "sys", "dev"):
            shutil.rmtree(tree / part, ignore_errors=True)
        for path, text in _files(cards):
            target = tree / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        for path, minor in _devices(len(cards)):
            target = tree / path
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.mknod(target, stat.S_IFCHR | 0o444, os.makedev(_NVIDIA_MAJOR, minor))
            except PermissionError:
                target.touch()
        for index, card in enumerate(cards):
            if card.model.mig:
                capabilities = tree / f"proc/driver/nvidia/capabilities/gpu{index}/mig"
                capabilities.mkdir(parents=True)
        node.mkdir(parents=True, exist_ok=True)
        (node / LINK).unlink(missing_ok=True)
        (node / LINK).symlink_to(tree.absolute())
    except OSError as error:
        raise NodeError(f"cannot write a host tree in {tree}: {error.strerror}") from None


def _files(cards: tuple[SimulatedCard, ...]) -> Iterator[tuple[str, str]]:
    yield "proc/modules", _MODULES
    yield "proc/devices", _DEVICES
    yield (
        "proc/driver/nvidia-caps/mig-minors",
        "".join(f"{name} {minor}\n" for name, minor in minors()),
    )
    for minor, (name, mode) in enumerate(_MODES.items(), 1):
        text = f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n"
        yield f"proc/driver/nvidia/capabilities/mig/{name}", text
    for index, card in enumerate(cards):
        yield from _pci_files(f"sys/bus/pci/devices/0000:{index + 1:02x}:00.0", card)


def _devices(cards: int) -> Iterator[tuple[str, int]]:
    for minor in range(cards):
        yield f"dev/nvidia{minor}", minor
    for minor, name in enumerate(("nvidia-uvm-tools", "nvidia-uvm", "nvidiactl"), 253):
        yield f"dev/{name}", minor
    for minor in range(1, 1 + len(_MODES)):
        yield f"dev/nvidia-caps/nvidia-cap{minor}", minor


def _pci_files(directory: str, card: SimulatedCard) -> Iterator[tuple[str, str]]:
    yield f"{directory}/vendor", "0x10de\n"
    yield f"{directory}/device", f"0x{card.model.pci_device:04x}\n"
    yield f"{directory}/class", "0x030200\n"
    yield f"{directory}/numa_node", "0\n"
    yield f"{directory}/resource", "0x0000000000000000 0x0000000000000000 0x0000000000000000\n"
    yield f"{directory}/config", ""
