"""The driver's cards, readings and processes, through NVML. The driver may be lost and return.

Simulated and real cards look alike. Only ``Driver.simulated`` distinguishes them, for screens to show it.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
from _ctypes import dlclose
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pynvml

from fenka.core.errors import FenkaError
from fenka.core.inventory import Card, DeviceId, Links
from fenka.core.mig.geometry import Geometry, Profile, profile_name
from fenka.core.units import MIB
from fenka.hardware import driver_places
from fenka.hardware.nvml_errors import is_lost, optional, skip_lost_card
from fenka.hardware.nvml_topology import read_cpus, read_links

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
    per_multiprocessor = (
        64 if optional(pynvml.nvmlDeviceGetCudaComputeCapability, handle) == (8, 0) else 128
    )
    cores = optional(pynvml.nvmlDeviceGetNumGpuCores, handle)
    return Geometry(
        pynvml.nvmlDeviceGetName(handle),
        max(profile.compute for profile in profiles),
        max(profile.sms for profile in profiles) if cores is None else cores // per_multiprocessor,
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
    for index in range(optional(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        # There are fewer than possible, and one may vanish meanwhile.
        if found := optional(_device_at, handle, index):
            devices |= found
    return devices


def _device_at(handle: Any, index: int) -> dict[tuple[int, int], str]:
    device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
    ids = (
        int(pynvml.nvmlDeviceGetGpuInstanceId(device)),
        int(pynvml.nvmlDeviceGetComputeInstanceId(device)),
    )
    return {ids: str(pynvml.nvmlDeviceGetUUID(device))}


def _profile(handle: Any, number: int) -> Profile | None:
    # The first version is in all drivers that have MIG.
    info = optional(pynvml.nvmlDeviceGetGpuInstanceProfileInfo, handle, number, 1)
    places = None if info is None else optional(_places, handle, info.id)
    name = None if info is None else _name(handle, number, info)
    if info is None or places is None or name is None:
        return None
    starts, size = places
    return Profile(
        name,
        *(info.id, number, info.sliceCount, size, starts),
        *(info.instanceCount, info.memorySizeMB, info.multiprocessorCount),
    )


def _name(handle: Any, number: int, info: Any) -> str | None:
    """Return the driver's own name, or one that is computed; None if neither is possible.

    Drivers before 520 have none. It is computed from the memory with the driver's reserve.
    """
    named = optional(pynvml.nvmlDeviceGetGpuInstanceProfileInfo, handle, number, 2)
    if named is not None:
        return str(named.name).removeprefix(_PREFIX)
    memory = optional(pynvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is None:
        return None
    media = "+me" if number in (7, 8) else ""
    return profile_name(info.sliceCount, info.memorySizeMB, memory.total, media)


def _places(handle: Any, profile_id: int) -> tuple[tuple[int, ...], int]:
    """Return the starts of a profile, ascending, and its size."""
    count = ctypes.c_uint()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, None, ctypes.byref(count))
    places = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(
        handle, profile_id, places, ctypes.byref(count)
    )
    return tuple(sorted(place.start for place in places)), max(place.size for place in places)


_SONAME = "libnvidia-ml.so.1"
_CUDA = "libcuda.so.1"
_NO_INSTANCE = 0xFFFFFFFF


class NoDriver(FenkaError):
    """There is no usable driver. The message says what is missing and what to do."""


class DriverNotFound(NoDriver):
    """No driver's files are in any known place. problem: where they were looked for."""

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(f"this machine has no NVIDIA driver: {problem}; install it, {advice}")
        self.problem = problem


class NotWithLinker(NoDriver):
    """The dynamic linker does not find NVML."""


class DriverLost(NoDriver):
    """The driver no longer answers."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Current figures of a card; None if the card does not report one."""

    uuid: str
    """Of the card or instance. An instance has only memory."""
    used_mib: int | None
    utilisation: int | None
    """Percent of time in which a kernel ran, over about the last second, depending on the model."""
    temperature_c: int | None
    power_w: float | None
    power_limit_w: float | None = None
    """The limit that the driver enforces."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that has a context on a card."""

    uuid: str
    """Of the card, or of the instance that it uses."""
    pid: int
    """In the host's PID namespace, as the driver sees it."""
    used_mib: int | None
    graphics: bool = False
    """Whether it only renders, as a desktop does."""


@dataclass(frozen=True, slots=True)
class Xid:
    """An error that the driver reports. gpu_instance: the one that it concerns; None for the whole card."""

    uuid: str
    number: int
    gpu_instance: int | None = None


@dataclass(slots=True)
class _Loaded:
    """The NVML that this process has loaded. pynvml supports only one."""

    path: Path | None
    library: Any
    users: int = 0


_loading = threading.Lock()
_loaded: _Loaded | None = None


def driver_lost(error: pynvml.NVMLError) -> DriverLost:
    """Return the error of an answer without which fenka cannot use the driver."""
    if is_lost(error):
        return DriverLost(f"the driver no longer answers ({error}): see whether it still runs")
    return DriverLost(
        f"the driver refuses a query that fenka needs ({error}): see whether nvidia-smi works"
    )


@contextlib.contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except pynvml.NVMLError as error:
        raise driver_lost(error) from error


class Driver:
    """An open NVML, made by ``Driver.open``. A context manager.

    Every method raises DriverLost once the driver no longer answers.
    """

    def __init__(self, library: Path | None, root: str = "") -> None:
        self.library, self.root = library, root
        """The directory or file that was loaded, None with the dynamic linker; and the configured root."""
        self._open = True
        with _translated_errors():
            self.version: str = pynvml.nvmlSystemGetDriverVersion()
            """For example "550.163.01"."""
            cuda = _cuda_version()
            self.cuda_version: str = f"{cuda // 1000}.{cuda % 1000 // 10}"
            """The newest CUDA version that the driver supports, for example "12.4"."""
        self.simulated: bool = hasattr(pynvml.nvmlLib, "fenka_simulated")
        """Whether the cards are simulated."""

    @classmethod
    def open(cls, library: Path | None = None, root: str = "") -> Self:
        """Load NVML.

        A process has one driver at a time: while one is open, another library is an error.

        Args:
            library: Its directory, or the file. None: as the dynamic linker finds it, else the table of
                driver_places does.
            root: The driver's root in the options; then the dynamic linker is not asked.

        Raises:
            NoDriver: There is none, or it does not answer.
            InvalidDriverRoot: `root` is not absolute.
        """
        if library is None and root:
            library = _search(root)
        with _loading:
            try:
                _acquire(library and library.absolute())
            except NotWithLinker:
                library = _search("")
                _acquire(library)
        try:
            return cls(library, root)
        except BaseException:
            with _loading:
                _release()
            raise

    def close(self) -> None:
        """Release NVML. Closing twice has no effect."""
        if self._open:
            self._open = False
            with _loading:
                _release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @_translated_errors()
    def cards(self) -> tuple[Card, ...]:
        """Return all cards by index. One that is lost is missing.

        memory_mib is what programs can have, rounded down; 0 if the driver does not report it.
        """
        cards = []
        for index, handle in _handles():
            with skip_lost_card():
                memory = read_memory(handle)
                cards.append(
                    Card(
                        index=index,
                        uuid=DeviceId(pynvml.nvmlDeviceGetUUID(handle)),
                        model=pynvml.nvmlDeviceGetName(handle),
                        memory_mib=0 if memory is None else memory.total_mib,
                    )
                )
        return tuple(cards)

    @_translated_errors()
    def links(self) -> Links | None:
        """Return how the cards are connected; None for fewer than two, or if the driver cannot tell."""
        return read_links({pynvml.nvmlDeviceGetUUID(handle): handle for _, handle in _handles()})

    @_translated_errors()
    def cpus(self, uuid: str) -> frozenset[int]:
        """Return the CPUs that are nearest to a card; none if the driver cannot tell."""
        return read_cpus(pynvml.nvmlDeviceGetHandleByUUID(uuid))

    @_translated_errors()
    def pci_device(self, uuid: str) -> str:
        """Return the PCI id of a card's model and vendor, `0x20B010DE`; empty if it is not known."""
        pci = optional(pynvml.nvmlDeviceGetPciInfo, pynvml.nvmlDeviceGetHandleByUUID(uuid))
        return "" if pci is None else f"0x{pci.pciDeviceId:08X}"

    @_translated_errors()
    def geometry(self, uuid: str) -> Geometry | None:
        """Return what a card can be divided into; None if its model has no MIG."""
        return read_geometry(pynvml.nvmlDeviceGetHandleByUUID(uuid))

    @_translated_errors()
    def readings(self) -> tuple[Reading, ...]:
        """Return the readings of all cards by index, each followed by its instances.

        A card that has fallen off the bus is missing.
        """
        readings: list[Reading] = []
        for _, handle in _handles():
            with skip_lost_card():
                readings += (_reading(handle), *_instance_readings(handle))
        return tuple(readings)

    @_translated_errors()
    def busy_samples(self, uuid: str, since_us: int) -> tuple[int, dict[int, int]] | None:
        """Return the time of the newest sample, and the percentage of the card's time by process ID.

        Without a sample after `since_us` the time is that. Times are in microseconds since the epoch. Return
        None for a card that does not report it or has fallen off the bus.
        """
        samples = None
        with skip_lost_card():
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                samples = optional(_process_samples, handle, since_us)
            except pynvml.NVMLError_NotFound:
                return None
        if samples is None:
            return None
        newest: dict[int, tuple[int, int]] = {}
        for sample in samples:
            value = (sample.timeStamp, sample.smUtil)
            newest[sample.pid] = max(newest.get(sample.pid, (0, 0)), value)
        return (
            max([at for at, _ in newest.values()], default=since_us),
            {pid: percent for pid, (_, percent) in newest.items()},
        )

    @_translated_errors()
    def minor(self, uuid: str) -> int:
        """Return N of the card's /dev/nvidiaN, which need not be its index."""
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return int(pynvml.nvmlDeviceGetMinorNumber(handle))

    @_translated_errors()
    def processes(self) -> tuple[GpuProcess, ...]:
        """Return the processes that have a context, ordered by card and process ID; each pair once."""
        processes: dict[tuple[int, str, int], GpuProcess] = {}
        for index, handle in _handles():
            with skip_lost_card():
                for process in _processes(handle):
                    processes[index, process.uuid, process.pid] = process
        return tuple(processes[key] for key in sorted(processes))


class XidListener:
    """Receives XIDs, the driver's error numbers, of all cards that report them. A context manager.

    It belongs to one open driver, and raises DriverLost once that was closed, or no longer answers.
    """

    @_translated_errors()
    def __init__(self, hardware: "Hardware") -> None:
        self._hardware = hardware
        self._waiting = threading.Lock()
        with hardware.in_use() as self._driver:
            self._set = pynvml.nvmlEventSetCreate()
            for _, handle in _handles():
                # A card that reports none does not prevent the others from being received.
                with skip_lost_card():
                    optional(
                        pynvml.nvmlDeviceRegisterEvents,
                        handle,
                        pynvml.nvmlEventTypeXidCriticalError,
                        self._set,
                    )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Another thread may still wait in it, up to its own timeout.
        with (
            self._waiting,
            self._hardware.in_use() as driver,
            contextlib.suppress(pynvml.NVMLError),
        ):
            if driver is self._driver:
                pynvml.nvmlEventSetFree(self._set)

    @_translated_errors()
    def wait(self, milliseconds: int) -> Xid | None:
        """Return a card's XID; None if there is none within this time."""
        try:
            # A driver that is closed meanwhile would be unloaded under this thread.
            with self._waiting, self._hardware.in_use() as driver:
                if driver is not self._driver:
                    raise DriverLost("the driver was opened again")
                event = pynvml.nvmlEventSetWait_v2(self._set, milliseconds)
                gpu = int(event.gpuInstanceId)
                return Xid(
                    pynvml.nvmlDeviceGetUUID(event.device),
                    int(event.eventData),
                    None if gpu == _NO_INSTANCE else gpu,
                )
        except (pynvml.NVMLError_Timeout, pynvml.NVMLError_GpuIsLost):
            return None


def _acquire(path: Path | None) -> None:
    global _loaded  # noqa: PLW0603 - NVML itself is one per process
    if _loaded is None:
        _loaded = _Loaded(path, _load(path))
    elif _loaded.path != path:
        raise NoDriver(
            f"this process already uses the driver of {_loaded.path or 'the system'}: "
            f"close that one first"
        )
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        simulated = hasattr(_loaded.library, "fenka_simulated")
        if _loaded.users == 0:
            _unload()
        if path is None and isinstance(error, pynvml.NVMLError_LibraryNotFound):
            raise NotWithLinker(f"the dynamic linker does not find {_SONAME}") from None
        raise NoDriver(_explain(error, path, simulated=simulated)) from None
    _loaded.users += 1


def _search(root: str) -> Path:
    """Return the file of NVML by the table. Raises NoDriver, InvalidDriverRoot."""
    search = driver_places.search(configured=root)
    if search.driver is None:
        raise DriverNotFound(
            search.problem,
            "name its directory with `fenka daemon --driver DIRECTORY`, or try simulated cards: "
            "`fenka daemon --background --simulate T4`",
        )
    return search.here(search.driver.libraries[_SONAME])


def file_of(library: Path, name: str) -> Path:
    """Return one of a driver's libraries. library: their directory, or the file of another one of them."""
    if library.is_dir():
        return library / name
    stem, version = name.partition(".so")[0], library.name.partition(".so")[2]
    return library.with_name(f"{stem}.so{version}")


def _cuda_version() -> int:
    """Return the newest CUDA version as 1000 times the major and 10 times the minor one."""
    try:
        return int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_FunctionNotFound):
        # It asks libcuda, which the dynamic linker does not find everywhere.
        return int(pynvml.nvmlSystemGetCudaDriverVersion())


def _release() -> None:
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
    if _loaded is not None:
        _loaded.users -= 1
        if _loaded.users == 0:
            _unload()


def _load(path: Path | None) -> Any:
    """Load the library by its path. pynvml would search by name and load the system's."""
    if path is None:
        return None
    try:
        library = ctypes.CDLL(str(file_of(path, _SONAME)))
    except OSError as error:
        raise NoDriver(f"cannot load {_SONAME} from {path}: {error}") from None
    _set_in_pynvml(library)
    return library


def _unload() -> None:
    """Unload the library, since dlopen treats two libraries of one name, or of one file, as one."""
    global _loaded  # noqa: PLW0603
    if _loaded is not None and _loaded.library is not None:
        _set_in_pynvml(None)
        dlclose(_loaded.library._handle)
    _loaded = None


def _set_in_pynvml(library: Any) -> None:
    with pynvml.libLoadLock:
        pynvml.nvmlLib = library
        pynvml._nvmlGetFunctionPointer_cache.clear()
        pynvml._nvmlLib_refcount = 0


def _explain(error: pynvml.NVMLError, path: Path | None, *, simulated: bool) -> str:
    if simulated:
        return (
            f"the driver in {path} does not answer ({error}): "
            f"the simulated node's card server is not running, start the node"
        )
    return (
        f"the NVIDIA driver{f' in {path}' if path else ''} does not answer ({error}): "
        f"see whether nvidia-smi works, or try simulated cards: "
        f"`fenka daemon --background --simulate T4`"
    )


def _handles() -> Iterator[tuple[int, Any]]:
    """Yield the cards that answer, by index. Raises pynvml.NVMLError if the driver is lost."""
    # Fails if the driver is lost, and not only a card.
    pynvml.nvmlSystemGetDriverVersion()
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = None
        with skip_lost_card():
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            # Drivers give handles of lost cards too.
            optional(pynvml.nvmlDeviceGetMemoryInfo, handle)
        if handle is not None:
            yield index, handle


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a card or instance without what the driver reserves, in MiB, rounded down."""

    total_mib: int
    used_mib: int


def read_memory(handle: Any) -> DeviceMemory | None:
    """Return the memory of a card or instance; None if the driver does not report it.

    Since driver 510, NVML counts the reserve in the total, and its first version also in what is used. Both
    versions state `total - reserved`, which is what programs can have, as `used + free` of the second.

    handle: of pynvml. Raises pynvml.NVMLError if the card or the driver is lost.
    """
    memory = optional(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    if memory is not None:
        return DeviceMemory((memory.total - memory.reserved) // MIB, memory.used // MIB)
    memory = optional(pynvml.nvmlDeviceGetMemoryInfo, handle)
    return None if memory is None else DeviceMemory(memory.total // MIB, memory.used // MIB)


def _processes(handle: Any) -> Iterator[GpuProcess]:
    """Yield a card's processes. One that computes and draws comes twice, last as one that computes."""
    card, instances = pynvml.nvmlDeviceGetUUID(handle), read_devices(handle)
    for query, graphics in (
        (pynvml.nvmlDeviceGetGraphicsRunningProcesses, True),
        (pynvml.nvmlDeviceGetComputeRunningProcesses, False),
    ):
        for process in optional(query, handle) or ():
            used = process.usedGpuMemory
            uuid = instances.get((process.gpuInstanceId, process.computeInstanceId), card)
            yield GpuProcess(uuid, process.pid, None if used is None else used // MIB, graphics)


def _process_samples(handle: Any, since_us: int) -> Any:
    """Return the samples after this time; none if there is none."""
    try:
        return pynvml.nvmlDeviceGetProcessUtilization(handle, since_us)
    except pynvml.NVMLError_NotFound:
        return ()


def _instance_readings(card: Any) -> Iterator[Reading]:
    for uuid in read_devices(card).values():
        with suppress_vanished():
            memory = read_memory(pynvml.nvmlDeviceGetHandleByUUID(uuid))
            yield Reading(uuid, None if memory is None else memory.used_mib, None, None, None)


def _reading(handle: Any) -> Reading:
    memory = read_memory(handle)
    rates = optional(pynvml.nvmlDeviceGetUtilizationRates, handle)
    power = optional(pynvml.nvmlDeviceGetPowerUsage, handle)
    power_limit = optional(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return Reading(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        used_mib=None if memory is None else memory.used_mib,
        utilisation=None if rates is None else rates.gpu,
        temperature_c=optional(
            pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
        ),
        power_w=None if power is None else power / 1000,
        power_limit_w=None if power_limit is None else power_limit / 1000,
    )


PROBE = """
import ctypes, sys
cuda = ctypes.CDLL(sys.argv[1])
device, context = ctypes.c_int(), ctypes.c_void_p()
sys.exit(
    cuda.cuInit(0)
    or cuda.cuDeviceGet(ctypes.byref(device), 0)
    or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    or print("ready", flush=True)
    or bool(sys.stdin.read())
)
"""
"""Uses only the standard library, and ends when its standard input is closed."""


class Hardware:
    """The open driver. It is opened again when it was lost.

    first, again: open the driver, at the start and later; by default in the same way.
    """

    def __init__(
        self, first: Callable[[], Driver], again: Callable[[], Driver] | None = None
    ) -> None:
        self._again = again or first
        self.driver = first()
        self.context_mib: dict[str, int] = {}
        """Context overhead by card UUID, of the cards where it could be measured."""
        self.near_cpus: dict[str, frozenset[int]] = {}
        """The CPUs that are nearest to a card, by its UUID; none if the driver cannot tell."""
        self._uses = 0
        self._changed = threading.Condition()

    def measure(self, cards: Iterable[Card], library: Path | None) -> None:
        """Measure the device memory that a process's context takes, once per model, and read the near CPUs.

        Raises NoDriver.

        library: the driver's, as for `Driver.open`. The overhead is hundreds of MiB on large cards, appears
        in no driver call, and differs by model and driver.
        """
        by_model: dict[str, int | None] = {}
        for card in cards:
            self.near_cpus[card.uuid] = self.driver.cpus(card.uuid)
            if card.model not in by_model:
                by_model[card.model] = _context_mib(self.driver, card, library)
            overhead = by_model[card.model]
            if overhead is not None:
                self.context_mib[card.uuid] = overhead

    @property
    def versions(self) -> tuple[str, str]:
        """Return the driver's version, and the newest CUDA version that it supports."""
        return self.driver.version, self.driver.cuda_version

    def readings(self) -> dict[str, Reading]:
        """Return the cards' readings by UUID. Raises NoDriver."""
        try:
            readings = self.driver.readings()
        except DriverLost:
            with self._changed:
                self._changed.wait_for(lambda: self._uses == 0)
                self.driver.close()
                self.driver = self._again()
            readings = self.driver.readings()
        return {reading.uuid: reading for reading in readings}

    @contextlib.contextmanager
    def in_use(self) -> Iterator[Driver]:
        """Keep the driver open meanwhile, so that any thread may call it."""
        with self._changed:
            self._uses += 1
        try:
            yield self.driver
        finally:
            with self._changed:
                self._uses -= 1
                self._changed.notify_all()

    def processes(self) -> tuple[GpuProcess, ...]:
        """Call `Driver.processes`, in any thread.

        Raises DriverLost; only `readings` opens the driver again.
        """
        with self.in_use() as driver:
            return driver.processes()

    def busy_samples(self, uuid: str, since_us: int) -> tuple[int, Mapping[int, int]] | None:
        """Call `Driver.busy_samples`, as `processes` does with its call. Raises DriverLost."""
        with self.in_use() as driver:
            return driver.busy_samples(uuid, since_us)

    def close(self) -> None:
        """Close the driver, after the calls that other threads have begun."""
        with self._changed:
            self._changed.wait_for(lambda: self._uses == 0)
            self.driver.close()


def _context_mib(driver: Driver, card: Card, library: Path | None) -> int | None:
    """Return the MiB that a process with only a context holds on a card, as the driver reports.

    Return None if the driver reports no process's memory, or makes no context.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": card.uuid}
    # By its file: a directory of a host's libraries on the search path would replace this container's libc.
    path = library or driver.library
    cuda = file_of(path, _CUDA) if path else _CUDA
    with subprocess.Popen(
        [sys.executable, "-SIc", PROBE, str(cuda)],
        cwd="/",
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as probe:
        assert probe.stdin is not None
        assert probe.stdout is not None
        ready = probe.stdout.readline() == b"ready\n"
        held = [
            process.used_mib
            for process in (driver.processes() if ready else ())
            if (process.pid, process.uuid) == (probe.pid, card.uuid)
        ]
        probe.stdin.close()
    return held[0] if held else None
