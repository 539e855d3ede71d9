"""What a card can be divided into, and is, as NVML reports it: names and sizes differ between drivers."""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import pynvml

from fenka.core.mig.geometry import Geometry, Profile, profile_name

_NOT_OFFERED = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
)
_PROFILES = 0x11
"""One more than the highest number that NVML 12.9 has. Older drivers refuse what they do not know."""
_PREFIX = "MIG "


def read_geometry(handle: Any) -> Geometry | None:
    """Return what a card can be divided into, whether or not MIG is enabled; None if it cannot.

    handle: of pynvml. Raises pynvml.NVMLError if the driver no longer answers.
    """
    profiles = tuple(
        profile for number in range(_PROFILES) if (profile := _profile(handle, number)) is not None
    )
    if not profiles:
        return None
    # Cores of a multiprocessor; NVML does not report multiprocessors of a whole card.
    cores = 64 if pynvml.nvmlDeviceGetCudaComputeCapability(handle) == (8, 0) else 128
    return Geometry(
        pynvml.nvmlDeviceGetName(handle),
        max(profile.compute for profile in profiles),
        pynvml.nvmlDeviceGetNumGpuCores(handle) // cores,
        profiles,
    )


@contextlib.contextmanager
def suppress_vanished() -> Iterator[None]:
    """Ignore that an instance is not there any more: another program may destroy it at any time."""
    with contextlib.suppress(pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
        yield


def read_devices(handle: Any) -> dict[tuple[int, int], str]:
    """Return the UUIDs of a card's instances by the ids of GPU and compute instance; none without MIG mode.

    Indices shift when an instance vanishes meanwhile, so two readings must agree.

    handle: of pynvml. Raises pynvml.NVMLError if the driver no longer answers.
    """
    devices = _read_devices_once(handle)
    while (again := _read_devices_once(handle)) != devices:
        devices = again
    return devices


def _read_devices_once(handle: Any) -> dict[tuple[int, int], str]:
    devices = dict[tuple[int, int], str]()
    try:
        limit = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError as error:
        if error.value in _NOT_OFFERED:
            return devices
        raise
    for index in range(limit):
        with suppress_vanished():
            device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            ids = (
                int(pynvml.nvmlDeviceGetGpuInstanceId(device)),
                int(pynvml.nvmlDeviceGetComputeInstanceId(device)),
            )
            devices[ids] = str(pynvml.nvmlDeviceGetUUID(device))
    return devices


def _profile(handle: Any, number: int) -> Profile | None:
    try:
        info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number)
        starts, size = _places(handle, info.id)
    except pynvml.NVMLError as error:
        if error.value in _NOT_OFFERED:
            return None
        raise
    return Profile(
        _name(handle, number, info),
        *(info.id, number, info.sliceCount, size, starts),
        *(info.instanceCount, info.memorySizeMB, info.multiprocessorCount),
    )


def _name(handle: Any, number: int, info: Any) -> str:
    """Return the driver's own name; drivers before 520 have none."""
    try:
        named = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number, version=2)
    except pynvml.NVMLError as error:
        if error.value not in (*_NOT_OFFERED, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH):
            raise
        total = pynvml.nvmlDeviceGetMemoryInfo(handle).total
        media = number in (7, 8)
        return profile_name(info.sliceCount, info.memorySizeMB, total, "+me" if media else "")
    return str(named.name).removeprefix(_PREFIX)


def _places(handle: Any, profile_id: int) -> tuple[tuple[int, ...], int]:
    """Return the starts of a profile, ascending, and its size."""
    count = ctypes.c_uint()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, None, ctypes.byref(count))
    places = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(
        handle, profile_id, places, ctypes.byref(count)
    )
    return tuple(sorted(place.start for place in places)), max(place.size for place in places)
