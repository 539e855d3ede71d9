"""The driver API by ctypes, and kernels as PTX, for programs that check a card. Needs no compiler.

Simulated cards take the kernels' time from their names. Real ones run the text, with as many turns as given.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Any, Final

MIB: Final = 1 << 20
SPIN_US: Final = 2000

PTX: Final = """
.version 6.0
.target sm_50
.address_size 64

.visible .entry fenka_spin_us2000(.param .u64 result, .param .u32 turns)
{
    .reg .pred %again;
    .reg .u32 %turn, %turns, %value;
    .reg .u64 %place;
    ld.param.u64 %place, [result];
    ld.param.u32 %turns, [turns];
    cvta.to.global.u64 %place, %place;
    mov.u32 %turn, 0;
    mov.u32 %value, 1;
AGAIN:
    mad.lo.u32 %value, %value, 1664525, 1013904223;
    add.u32 %turn, %turn, 1;
    setp.lt.u32 %again, %turn, %turns;
    @%again bra AGAIN;
    st.global.u32 [%place], %value;
    ret;
}

.visible .entry fenka_empty_us0()
{
    ret;
}
"""

CALIBRATION_TURNS: Final = 100_000
MAX_TURNS: Final = 2**31


class CudaError(Exception):
    """A call of the driver failed. code: its CUresult."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} returned {code}")
        self.code = code


class Cuda:
    """The driver in this process, with the first visible card's primary context after `enter`."""

    def __init__(self, library: str) -> None:
        self.library = ctypes.CDLL(library)
        self.device, self.context = ctypes.c_int(), ctypes.c_void_p()

    def code(self, name: str, *arguments: Any) -> int:
        """Call a function and return its CUresult. Raises AttributeError if the driver does not have it."""
        return int(getattr(self.library, name)(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function. Raises CudaError if it fails, AttributeError as `code` does."""
        if code := self.code(name, *arguments):
            raise CudaError(name, code)

    def enter(self) -> "Cuda":
        """Initialise, and make the card's primary context current. Raises CudaError."""
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), self.device)
        self.call("cuCtxSetCurrent", self.context)
        return self

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes. Raises CudaError."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size: int) -> tuple[int, ctypes.c_uint64]:
        """Return the CUresult of an allocation of so many bytes, and its address."""
        pointer = ctypes.c_uint64()
        return self.code("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size)), pointer

    def free(self, pointer: ctypes.c_uint64) -> int:
        """Return the CUresult of freeing an allocation."""
        return self.code("cuMemFree_v2", pointer)

    def kernels(self) -> "Kernels":
        """Load the kernels. Raises CudaError."""
        return Kernels(self)

    def attribute(self, number: int) -> int:
        """Return an attribute of the card. Raises CudaError."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, self.device)
        return value.value


class Kernels:
    """The functions in PTX. Raises CudaError."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.module = ctypes.c_void_p()
        cuda.call("cuModuleLoadData", ctypes.byref(self.module), ctypes.c_char_p(PTX.encode()))
        self._spin = self._function(b"fenka_spin_us2000")
        self._empty = self._function(b"fenka_empty_us0")
        code, self.result = cuda.allocate(256)
        if code:
            raise CudaError("cuMemAlloc_v2", code)

    def _function(self, name: bytes) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        self._cuda.call("cuModuleGetFunction", ctypes.byref(function), self.module, name)
        return function

    def _launch(self, function: ctypes.c_void_p, arguments: Any) -> None:
        self._cuda.call("cuLaunchKernel", function, *(1, 1, 1, 1, 1, 1, 0), None, arguments, None)

    def spin(self, turns: int) -> None:
        """Start one thread that goes so many turns."""
        value = ctypes.c_uint32(turns)
        addresses = ctypes.addressof(self.result), ctypes.addressof(value)
        self._launch(self._spin, (ctypes.c_void_p * 2)(*addresses))

    def empty(self) -> None:
        """Start one thread that does nothing."""
        self._launch(self._empty, None)

    def wait(self) -> None:
        """Wait for all work of the context."""
        self._cuda.call("cuCtxSynchronize")

    def spin_for(self, turns: int, seconds: float, batch: int) -> tuple[int, float]:
        """Launch kernels for some seconds. Return how many have ended, and the seconds until the last end.

        The next batch is launched before the last one has ended, so that a busy host leaves no gaps.
        """
        events = [ctypes.c_void_p(), ctypes.c_void_p()]
        for event in events:
            self._cuda.call("cuEventCreate", ctypes.byref(event), 0)
        start, batches = time.monotonic(), 0
        while time.monotonic() < start + seconds:
            event = events[batches % 2]
            if batches > 1:
                self._cuda.call("cuEventSynchronize", event)
            for _ in range(batch):
                self.spin(turns)
            self._cuda.call("cuEventRecord", event, None)
            batches += 1
        self.wait()
        for event in events:
            self._cuda.call("cuEventDestroy_v2", event)
        return batches * batch, time.monotonic() - start

    def calibrate(self) -> tuple[int, float]:
        """Return the turns of about SPIN_US, and the microseconds that they take on an idle card."""
        turns = CALIBRATION_TURNS
        for _ in range(4):
            self.spin(turns)
            self.wait()
            us = self.time_us(turns, 5)
            turns = max(1, min(MAX_TURNS, round(turns * SPIN_US / us)))
        return turns, self.time_us(turns, 50)

    def time_us(self, turns: int, count: int) -> float:
        """Return the microseconds of one of several kernels in a row, by the card's own clock."""
        start, end, milliseconds = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_float()
        for event in (start, end):
            self._cuda.call("cuEventCreate", ctypes.byref(event), 0)
        self._cuda.call("cuEventRecord", start, None)
        for _ in range(count):
            self.spin(turns)
        self._cuda.call("cuEventRecord", end, None)
        self.wait()
        self._cuda.call("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
        for event in (start, end):
            self._cuda.call("cuEventDestroy_v2", event)
        return milliseconds.value * 1000 / count


def least_ns(
    call: Callable[[], object], count: int, after: Callable[[], object] | None = None
) -> float:
    """Return a call's nanoseconds in the fastest of seven rounds, since other programs slow down the others.

    after: called after each round, not timed.
    """
    rounds = list[float]()
    for _ in range(7):
        start = time.perf_counter_ns()
        for _ in range(count):
            call()
        rounds.append((time.perf_counter_ns() - start) / count)
        if after is not None:
            after()
    return min(rounds)
