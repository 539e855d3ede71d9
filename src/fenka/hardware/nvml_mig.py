"""GPU instances and compute instances of cards, through NVML, and the device files that give access to them.

Every function takes a card by its UUID while a `Driver` is open. It raises DriverLost once that is lost.
"""

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from fenka.core.errors import FenkaError
from fenka.core.mig.geometry import Geometry, Profile
from fenka.hardware.nvml import driver_lost, read_devices, suppress_vanished
from fenka.hardware.nvml_errors import optional

_ID_LIMIT = 16
"""More than a card has of either kind of instances."""

_COMPUTE_PROFILES = 0x9
"""One more than the highest number that NVML 12.9 has. Older drivers refuse what they do not know."""


class MigError(FenkaError):
    """The driver refused a change; nothing has changed."""


class InstanceInUse(MigError):
    """A process, or a compute instance, still uses the instance or the card."""


class NoRoomForInstance(MigError):
    """The place, the compute slices or the media engines are taken."""


class NoSuchInstance(MigError):
    """There is no such instance, or none is possible there."""


class MigNotPermitted(MigError):
    """The driver lets only root, with the capabilities `config` and `monitor`, change instances."""


class MigNotEnabled(MigError):
    """The card is not in MIG mode, or has none."""


class ResetRequired(MigError):
    """The mode changes with the next reset of the card."""


class CardLost(MigError):
    """The card has fallen off the bus; the driver answers for the others."""


_ERRORS: dict[int, tuple[type[MigError], str]] = {
    pynvml.NVML_ERROR_IN_USE: (InstanceInUse, "it is in use"),
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: (NoRoomForInstance, "its place is taken"),
    pynvml.NVML_ERROR_NOT_FOUND: (NoSuchInstance, "it does not exist"),
    pynvml.NVML_ERROR_INVALID_ARGUMENT: (NoSuchInstance, "there is no such place"),
    pynvml.NVML_ERROR_NO_PERMISSION: (MigNotPermitted, "only root may do that"),
    pynvml.NVML_ERROR_NOT_SUPPORTED: (MigNotEnabled, "the card is not in MIG mode"),
    pynvml.NVML_ERROR_GPU_IS_LOST: (CardLost, "the driver has lost the card"),
    pynvml.NVML_ERROR_TIMEOUT: (CardLost, "the card does not answer in time"),
}


@dataclass(frozen=True, slots=True)
class ComputeInstance:
    """A compute instance. uuid: of the device that it is for programs."""

    id: int
    uuid: str


@dataclass(frozen=True, slots=True)
class GpuInstance:
    """A GPU instance that exists. id: the driver's, which cannot be computed from profile and start."""

    id: int
    profile: Profile
    start: int
    compute: tuple[ComputeInstance, ...]


@dataclass(frozen=True, slots=True)
class MigMode:
    """Whether a card is in MIG mode now, and will be after what keeps it from switching has ended."""

    enabled: bool
    pending: bool


def mig_mode(card: str) -> MigMode | None:
    """Return the mode of a card; None if its model has no MIG. Raises CardLost."""
    try:
        with _translated(f"the mode of {card}"):
            modes = optional(pynvml.nvmlDeviceGetMigMode, _handle(card))
    except NoSuchInstance:
        return None
    if modes is None:
        return None
    current, pending = modes
    return MigMode(bool(current), bool(pending))


def set_mig_mode(card: str, *, enabled: bool) -> None:
    """Switch the mode of an idle card.

    Raises:
        InstanceInUse: It is in use. The driver switches by itself when that has ended.
        ResetRequired: The driver switches when the card is reset.
        MigError: It is refused.
    """
    with _translated(f"MIG of {card} cannot be switched"):
        activation = pynvml.nvmlDeviceSetMigMode(_handle(card), int(enabled))
        if activation == pynvml.NVML_ERROR_RESET_REQUIRED:
            raise ResetRequired(
                f"MIG of {card} is pending until the card is reset: end all programs that have it open, "
                "then `nvidia-smi -r`"
            )
        if activation != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError(activation)


def instances(card: str, geometry: Geometry) -> tuple[GpuInstance, ...]:
    """Return the GPU instances of a card by id; none if it is not in MIG mode. Raises CardLost."""
    with contextlib.suppress(MigNotEnabled), _translated(f"the instances of {card}"):
        handle = _handle(card)
        devices = read_devices(handle)
        listed = []
        for profile in geometry.profiles:
            for gpu in _listed(pynvml.nvmlDeviceGetGpuInstances, handle, profile.profile_id):
                with suppress_vanished():
                    info = pynvml.nvmlGpuInstanceGetInfo(gpu)
                    compute = tuple(
                        ComputeInstance(id_, uuid)
                        for (owner, id_), uuid in sorted(devices.items())
                        if owner == info.id
                    )
                    listed.append(GpuInstance(info.id, profile, info.placement.start, compute))
        return tuple(sorted(listed, key=lambda gpu: gpu.id))
    return ()


def create_gpu_instance(card: str, profile: Profile, start: int) -> int:
    """Create a GPU instance at this place, and return its id. Raises MigError."""
    with _translated(f"{profile.name} at {start} of {card} cannot be created"):
        place = pynvml.c_nvmlGpuInstancePlacement_t(start, profile.size)
        gpu = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(
            _handle(card), profile.profile_id, ctypes.byref(place)
        )
        return int(pynvml.nvmlGpuInstanceGetInfo(gpu).id)


def create_compute_instance(card: str, gpu_id: int) -> ComputeInstance:
    """Create the compute instance that has the most multiprocessors of those offered. Raises MigError."""
    with _translated(f"a compute instance in GPU instance {gpu_id} of {card} cannot be created"):
        gpu = _gpu(card, gpu_id)
        offers = [
            info
            for number in range(_COMPUTE_PROFILES)
            if (
                info := optional(
                    pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo, gpu, number, 0, 1
                )
            )
        ]
        widest = max(offers, key=lambda info: info.multiprocessorCount)
        compute = pynvml.nvmlGpuInstanceCreateComputeInstance(gpu, widest.id)
        compute_id = int(pynvml.nvmlComputeInstanceGetInfo_v2(compute).id)
        return ComputeInstance(compute_id, read_devices(_handle(card))[gpu_id, compute_id])


def destroy_compute_instance(card: str, gpu_id: int, compute_id: int) -> None:
    """Destroy a compute instance. Raises MigError: InstanceInUse while a process has it open."""
    with _translated(f"compute instance {compute_id} of {gpu_id} of {card} cannot be destroyed"):
        gpu, compute = _gpu(card, gpu_id), pynvml.c_nvmlComputeInstance_t()
        _call("nvmlGpuInstanceGetComputeInstanceById", gpu, compute_id, ctypes.byref(compute))
        pynvml.nvmlComputeInstanceDestroy(compute)


def destroy_gpu_instance(card: str, gpu_id: int) -> None:
    """Destroy a GPU instance without compute instances. Raises MigError."""
    with _translated(f"GPU instance {gpu_id} of {card} cannot be destroyed"):
        pynvml.nvmlGpuInstanceDestroy(_gpu(card, gpu_id))


@contextlib.contextmanager
def _translated(failure: str) -> Iterator[None]:
    try:
        yield
    except pynvml.NVMLError as error:
        if error.value not in _ERRORS:
            raise driver_lost(error) from error
        kind, why = _ERRORS[error.value]
        raise kind(f"{failure}: {why}") from None


def _handle(card: str) -> Any:
    return pynvml.nvmlDeviceGetHandleByUUID(card)


def _gpu(card: str, gpu_id: int) -> Any:
    gpu = pynvml.c_nvmlGpuInstance_t()
    _call("nvmlDeviceGetGpuInstanceById", _handle(card), gpu_id, ctypes.byref(gpu))
    return gpu


def _call(name: str, *arguments: object) -> None:
    pynvml._nvmlCheckReturn(pynvml._nvmlGetFunctionPointer(name)(*arguments))


def _listed(query: Any, owner: Any, profile_id: int) -> list[Any]:
    array, count = (pynvml.c_nvmlGpuInstance_t * _ID_LIMIT)(), ctypes.c_uint()
    query(owner, profile_id, array, ctypes.byref(count))
    return list(array[: count.value])


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

    A process needs them beside those of the card. Everybody may open all of them, so a lease hides the others
    (`isolation/sandbox.py`). In a container there is no nvidia-modprobe to make them.

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
