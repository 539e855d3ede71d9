"""The driver's cards, readings and processes, through NVML.

Simulated and real cards come the same way; only ``Driver.simulated`` tells them apart, and only for
screens to say so.
"""

import contextlib
import ctypes
import threading
from _ctypes import dlclose
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import pynvml

from fenka.core.errors import FenkaError
from fenka.core.inventory import Card, DeviceId

__all__ = ["Driver", "DriverLost", "GpuProcess", "NoDriver", "Reading", "XidListener"]

_SONAME = "libnvidia-ml.so.1"
_MIB = 1 << 20
_Value = TypeVar("_Value")


class NoDriver(FenkaError):
    """There is no usable driver; one sentence: what is missing and what to do."""


class DriverLost(NoDriver):
    """The driver was there and no longer answers."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one card does just now; None where the card does not say."""

    uuid: str
    used_mib: int
    total_mib: int
    utilisation: int | None
    """Percent of the last second or so, depending on the model, in which a kernel ran."""
    temperature_c: int | None
    power_w: float | None
    power_limit_w: float | None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that has a context on a card."""

    uuid: str
    pid: int
    """As the driver sees it, which is the host's number and not a container's."""
    used_mib: int | None
    graphics: bool = False
    """Whether it only draws, as a desktop does."""


@dataclass(slots=True)
class _Loaded:
    """The one NVML that this process talks to: pynvml has room for no second."""

    library_dir: Path | None
    library: Any
    users: int = 0


_loading = threading.Lock()
_loaded: _Loaded | None = None


@contextlib.contextmanager
def _answered() -> Iterator[None]:
    try:
        yield
    except pynvml.NVMLError as why:
        raise DriverLost(
            f"the driver no longer answers ({why}): see whether it still runs"
        ) from why


class Driver:
    """NVML while it is open. A context manager; make it with ``Driver.open``.

    Every method raises DriverLost once the driver no longer answers.
    """

    def __init__(self, library_dir: Path | None) -> None:
        self._library_dir = library_dir
        self._open = True
        with _answered():
            self.version: str = pynvml.nvmlSystemGetDriverVersion()
            """As the driver says it: "550.163.01"."""
            cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
            self.cuda_version: str = f"{cuda // 1000}.{cuda % 1000 // 10}"
            """The newest CUDA that the driver serves: "12.4"."""
        self.simulated: bool = hasattr(pynvml.nvmlLib, "fenka_simulated")
        """Whether there is no hardware behind this."""

    @classmethod
    def open(cls, library_dir: Path | None = None) -> Self:
        """Load NVML, from a directory or from where the system has it.

        Raises NoDriver. A process holds one driver at a time: while one is open, another directory
        is refused.
        """
        with _loading:
            _acquire(library_dir and library_dir.absolute())
        try:
            return cls(library_dir)
        except BaseException:
            with _loading:
                _release()
            raise

    def close(self) -> None:
        """Give NVML back; closing twice is harmless."""
        if self._open:
            self._open = False
            with _loading:
                _release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        why: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @_answered()
    def cards(self) -> tuple[Card, ...]:
        """All cards, by index. memory_mib is what the driver reports, rounded down."""
        return tuple(
            Card(
                index=index,
                uuid=DeviceId(pynvml.nvmlDeviceGetUUID(handle)),
                model=pynvml.nvmlDeviceGetName(handle),
                memory_mib=pynvml.nvmlDeviceGetMemoryInfo(handle).total // _MIB,
            )
            for index, handle in _handles()
        )

    @_answered()
    def readings(self) -> tuple[Reading, ...]:
        """What each card does just now, by index; a card that has fallen off the bus is left out."""
        return tuple(_reading(handle) for _, handle in _handles())

    @_answered()
    def busy_percent(self, since_us: int) -> dict[tuple[str, int], int]:
        """Percent of a card's time that a process has had, by UUID and process id, in the newest sample
        after this moment (microseconds since the epoch); nothing of cards that do not tell."""
        found: dict[tuple[str, int], tuple[int, int]] = {}
        for _, handle in _handles():
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            try:
                samples = pynvml.nvmlDeviceGetProcessUtilization(handle, since_us)
            except (pynvml.NVMLError_NotFound, pynvml.NVMLError_NotSupported):
                continue
            for it in samples:
                key, newest = (uuid, it.pid), (it.timeStamp, it.smUtil)
                found[key] = max(found.get(key, newest), newest)
        return {key: percent for key, (_, percent) in found.items()}

    @_answered()
    def busy_samples(self, uuid: str, since_us: int) -> tuple[int, dict[int, int]] | None:
        """When the newest sample after that moment was taken (microseconds since the epoch; the moment
        itself where there is none), and by process id the percent of the card's time had in it.

        None of a card that does not tell. Raises DriverLost.
        """
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            samples = pynvml.nvmlDeviceGetProcessUtilization(handle, since_us)
        except pynvml.NVMLError_NotFound:
            return since_us, {}
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission):
            return None
        newest: dict[int, tuple[int, int]] = {}
        for it in samples:
            newest[it.pid] = max(newest.get(it.pid, (0, 0)), (it.timeStamp, it.smUtil))
        return (
            max([at for at, _ in newest.values()], default=since_us),
            {pid: percent for pid, (_, percent) in newest.items()},
        )

    @_answered()
    def minor(self, uuid: str) -> int:
        """N of the card's /dev/nvidiaN, which need not be its index."""
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return int(pynvml.nvmlDeviceGetMinorNumber(handle))

    @_answered()
    def processes(self) -> tuple[GpuProcess, ...]:
        """Who has a context on which card, by card and process id; each pair once."""
        found: dict[tuple[int, int], GpuProcess] = {}
        for index, handle in _handles():
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            for ask, graphics in (
                (pynvml.nvmlDeviceGetGraphicsRunningProcesses, True),
                (pynvml.nvmlDeviceGetComputeRunningProcesses, False),
            ):
                for process in _or_none(ask, handle) or ():
                    used = process.usedGpuMemory
                    found[index, process.pid] = GpuProcess(
                        uuid, process.pid, None if used is None else used // _MIB, graphics
                    )
        return tuple(found[key] for key in sorted(found))


class XidListener:
    """XIDs, the driver's word for an error of a card, of all cards that tell. `with` ends it.

    Raises DriverLost.
    """

    @_answered()
    def __init__(self) -> None:
        self._waiting = threading.Lock()
        self._set = pynvml.nvmlEventSetCreate()
        for _, handle in _handles():
            # A card that cannot tell is no reason not to hear the others.
            _or_none(
                pynvml.nvmlDeviceRegisterEvents,
                handle,
                pynvml.nvmlEventTypeXidCriticalError,
                self._set,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Another thread may still wait in it, for no longer than it said.
        with self._waiting, contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlEventSetFree(self._set)

    @_answered()
    def wait(self, milliseconds: int) -> tuple[str, int] | None:
        """UUID of a card and its XID; None if there was none in this time."""
        try:
            with self._waiting:
                event = pynvml.nvmlEventSetWait_v2(self._set, milliseconds)
            return pynvml.nvmlDeviceGetUUID(event.device), int(event.eventData)
        except (pynvml.NVMLError_Timeout, pynvml.NVMLError_GpuIsLost):
            return None


def _acquire(library_dir: Path | None) -> None:
    global _loaded  # noqa: PLW0603 - NVML itself is one per process
    if _loaded is None:
        _loaded = _Loaded(library_dir, _load(library_dir))
    elif _loaded.library_dir != library_dir:
        raise NoDriver(
            f"this process already uses the driver of {_loaded.library_dir or 'the system'}: "
            f"close that one first"
        )
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as why:
        if _loaded.users == 0:
            _unload()
        raise NoDriver(_refusal(why, library_dir)) from None
    _loaded.users += 1


def _release() -> None:
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
    if _loaded is not None:
        _loaded.users -= 1
        if _loaded.users == 0:
            _unload()


def _load(library_dir: Path | None) -> Any:
    """The library, by its path: pynvml would look by name and take the system's."""
    if library_dir is None:
        return None
    try:
        library = ctypes.CDLL(str(library_dir / _SONAME))
    except OSError as why:
        raise NoDriver(f"cannot load {_SONAME} from {library_dir}: {why}") from None
    _give_to_pynvml(library)
    return library


def _unload() -> None:
    """So that this process can open another one: two of one name, or of one file, are one to dlopen."""
    global _loaded  # noqa: PLW0603
    if _loaded is not None and _loaded.library is not None:
        _give_to_pynvml(None)
        dlclose(_loaded.library._handle)
    _loaded = None


def _give_to_pynvml(library: Any) -> None:
    with pynvml.libLoadLock:
        pynvml.nvmlLib = library
        pynvml._nvmlGetFunctionPointer_cache.clear()
        pynvml._nvmlLib_refcount = 0


def _refusal(why: pynvml.NVMLError, library_dir: Path | None) -> str:
    if library_dir is not None:
        return (
            f"the driver in {library_dir} does not answer ({why}): "
            f"the simulated node's card server is not running, start the node"
        )
    if isinstance(why, pynvml.NVMLError_LibraryNotFound):
        return (
            f"this machine has no NVIDIA driver ({_SONAME} was not found): "
            f"install it, or try simulated cards: `fenka daemon --background --simulate T4`"
        )
    return (
        f"the NVIDIA driver does not answer ({why}): "
        f"see whether nvidia-smi works, or try simulated cards: "
        f"`fenka daemon --background --simulate T4`"
    )


def _handles() -> Iterator[tuple[int, Any]]:
    # Fails if it is the driver that has gone, and not one card.
    pynvml.nvmlSystemGetDriverVersion()
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            pynvml.nvmlDeviceGetMemoryInfo(handle)
        except pynvml.NVMLError_GpuIsLost:
            continue
        yield index, handle


def _or_none(ask: Callable[..., _Value], *arguments: object) -> _Value | None:
    try:
        return ask(*arguments)
    except pynvml.NVMLError_NotSupported:
        return None


def _reading(handle: Any) -> Reading:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    rates = _or_none(pynvml.nvmlDeviceGetUtilizationRates, handle)
    power = _or_none(pynvml.nvmlDeviceGetPowerUsage, handle)
    limit = _or_none(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return Reading(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        used_mib=memory.used // _MIB,
        total_mib=memory.total // _MIB,
        utilisation=None if rates is None else rates.gpu,
        temperature_c=_or_none(
            pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
        ),
        power_w=None if power is None else power / 1000,
        power_limit_w=None if limit is None else limit / 1000,
    )
