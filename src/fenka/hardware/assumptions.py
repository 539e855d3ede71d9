"""The simulated driver's assumptions about NVIDIA's, each as a question to the driver at hand.

An answer that differs says where tests on simulated cards prove less than they seem to. Each question runs in
this process, takes at most 300 MiB for a moment, and leaves the card as it was.
"""

import ctypes
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from fenka.hardware.cuda_calls import MIB, SPIN_US, Cuda, CudaError, Kernels

IMPOSSIBLE: Final = "not possible"
_Subject = TypeVar("_Subject")
_DEVICE_LOCATION, _PINNED = 1, 1
_UNIFIED_ADDRESSING, _VIRTUAL_MEMORY, _POOLS = 41, 102, 115


@dataclass(frozen=True, slots=True)
class Asked:
    """The driver, with a context, and the kernels."""

    cuda: Cuda
    kernels: Kernels
    turns: int


@dataclass(frozen=True, slots=True)
class Assumption:
    """One assumption. assumed: the simulated driver's answer. ask: returns that of the driver at hand."""

    name: str
    assumed: str
    ask: Callable[[Asked], str]


def compare(library: str) -> Iterator[dict[str, str]]:
    """Yield all assumptions with the driver's answers, and a verdict: ok, differs or not possible."""
    for name, assumed, early in _BEFORE:
        yield _answer(name, assumed, _asked(early, Cuda(library)))
    cuda = Cuda(library).enter()
    kernels = cuda.kernels()
    asked = Asked(cuda, kernels, kernels.calibrate()[0])
    for one in ASSUMPTIONS:
        yield _answer(one.name, one.assumed, _asked(one.ask, asked))


def _answer(name: str, assumed: str, answer: str) -> dict[str, str]:
    verdict = "ok" if answer == assumed else "differs"
    if answer.startswith(IMPOSSIBLE):
        verdict, answer = IMPOSSIBLE, answer.removeprefix(f"{IMPOSSIBLE}: ")
    return {"name": name, "assumed": assumed, "answer": answer, "verdict": verdict}


def _asked(ask: Callable[[_Subject], str], subject: _Subject) -> str:
    try:
        return ask(subject)
    except CudaError as why:
        return str(why)
    except AttributeError as why:
        return f"{IMPOSSIBLE}: the driver lacks {str(why).rpartition(': ')[2]}"


def _code(code: int) -> str:
    return {0: "succeeds", 1: "invalid value (1)", 2: "out of memory (2)"}.get(
        code, f"error {code}"
    )


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


# ---- before cuInit ----


def _count_before_start(cuda: Cuda) -> str:
    return _code(cuda.code("cuDeviceGetCount", ctypes.byref(ctypes.c_int())))


def _version_before_start(cuda: Cuda) -> str:
    return _code(cuda.code("cuDriverGetVersion", ctypes.byref(ctypes.c_int())))


def _flags(cuda: Cuda) -> str:
    return _code(cuda.code("cuInit", 1))


_BEFORE: Final[tuple[tuple[str, str, Callable[[Cuda], str]], ...]] = (
    ("cuDeviceGetCount before cuInit", "error 3", _count_before_start),
    ("cuDriverGetVersion before cuInit", "succeeds", _version_before_start),
    ("cuInit with a flag", "invalid value (1)", _flags),
)


# ---- memory ----


def _nothing(asked: Asked) -> str:
    return _code(asked.cuda.allocate(0)[0])


def _too_much(asked: Asked) -> str:
    code, _ = asked.cuda.allocate(asked.cuda.memory()[1] + 1)
    again, pointer = asked.cuda.allocate(MIB)
    asked.cuda.free(pointer)
    return f"{_code(code)}, then 1 MiB {_code(again)}"


def _totals(asked: Asked) -> str:
    total = ctypes.c_size_t()
    asked.cuda.call("cuDeviceTotalMem_v2", ctypes.byref(total), asked.cuda.device)
    return _yes(total.value == asked.cuda.memory()[1])


def _alignment(asked: Asked) -> str:
    pointers = [asked.cuda.allocate(1)[1] for _ in range(4)]
    aligned = all(pointer.value % 256 == 0 for pointer in pointers)
    for pointer in pointers:
        asked.cuda.free(pointer)
    return _yes(aligned)


def _taken(asked: Asked, size: int) -> int:
    """Return by how many bytes an allocation reduces the free memory."""
    before = asked.cuda.memory()[0]
    code, pointer = asked.cuda.allocate(size)
    if code:
        raise CudaError("cuMemAlloc_v2", code)
    taken = before - asked.cuda.memory()[0]
    asked.cuda.free(pointer)
    return taken


def _large(asked: Asked) -> str:
    return f"{_taken(asked, 64 * MIB) / MIB:g} MiB"


def _odd(asked: Asked) -> str:
    return f"{_taken(asked, 64 * MIB + 1) - 64 * MIB} bytes"


def _given_back(asked: Asked) -> str:
    before = asked.cuda.memory()[0]
    asked.cuda.free(asked.cuda.allocate(64 * MIB)[1])
    return _yes(asked.cuda.memory()[0] == before)


def _unknown(asked: Asked) -> str:
    return _code(asked.cuda.free(ctypes.c_uint64(0x1000)))


def _twice(asked: Asked) -> str:
    _, pointer = asked.cuda.allocate(MIB)
    asked.cuda.free(pointer)
    return _code(asked.cuda.free(pointer))


def _copies(asked: Asked) -> str:
    cuda = asked.cuda
    _, pointer = cuda.allocate(8)
    cuda.call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(0xA5), ctypes.c_size_t(8))
    read = ctypes.create_string_buffer(8)
    cuda.call("cuMemcpyDtoH_v2", read, pointer, ctypes.c_size_t(8))
    cuda.free(pointer)
    return _yes(read.raw == b"\xa5" * 8)


def _properties(asked: Asked) -> ctypes.Array[ctypes.c_char]:
    """Return CUmemAllocationProp of pinned memory of the card, of its beginning and zeros."""
    head = struct.pack("=iiii", _PINNED, 0, _DEVICE_LOCATION, asked.cuda.device.value)
    return ctypes.create_string_buffer(head, 64)


def _granularity(asked: Asked) -> str:
    size = ctypes.c_size_t()
    asked.cuda.call("cuMemGetAllocationGranularity", ctypes.byref(size), _properties(asked), 0)
    return f"{size.value / MIB:g} MiB"


def _mapped(asked: Asked) -> str:
    """Ask whether memory that is mapped stays taken when its handle is released."""
    cuda, size = asked.cuda, ctypes.c_size_t(64 * MIB)
    before = cuda.memory()[0]
    handle, place = ctypes.c_uint64(), ctypes.c_uint64()
    none = ctypes.c_uint64(0)
    cuda.call("cuMemCreate", ctypes.byref(handle), size, _properties(asked), none)
    cuda.call("cuMemAddressReserve", ctypes.byref(place), size, ctypes.c_size_t(0), none, none)
    cuda.call("cuMemMap", place, size, ctypes.c_size_t(0), handle, none)
    cuda.call("cuMemRelease", handle)
    held = before - cuda.memory()[0]
    cuda.call("cuMemUnmap", place, size)
    freed = cuda.memory()[0] == before
    cuda.call("cuMemAddressFree", place, size)
    return f"{_yes(held >= size.value)}, until it is unmapped: {_yes(freed)}"


def _pool(asked: Asked) -> str:
    """Ask whether freed memory of the default pool is free after the next synchronisation."""
    cuda = asked.cuda
    before = cuda.memory()[0]
    pointer = ctypes.c_uint64()
    cuda.call("cuMemAllocAsync", ctypes.byref(pointer), ctypes.c_size_t(64 * MIB), None)
    cuda.call("cuMemFreeAsync", pointer, None)
    asked.kernels.wait()
    return _yes(cuda.memory()[0] == before)


def _ipc(asked: Asked) -> str:
    _, pointer = asked.cuda.allocate(MIB)
    handle = ctypes.create_string_buffer(64)
    code = asked.cuda.code("cuIpcGetMemHandle", handle, pointer)
    asked.cuda.free(pointer)
    return _code(code)


# ---- functions and code ----


def _unknown_function(asked: Asked) -> str:
    function, status = ctypes.c_void_p(1), ctypes.c_int(-1)
    code = asked.cuda.code(
        "cuGetProcAddress_v2",
        b"cuNoSuchFunction",
        ctypes.byref(function),
        12000,
        ctypes.c_uint64(0),
        ctypes.byref(status),
    )
    return f"{_code(code)}, status {status.value}, {'no address' if not function.value else 'an address'}"


def _same_address(asked: Asked) -> str:
    function = ctypes.c_void_p()
    asked.cuda.call(
        *("cuGetProcAddress_v2", b"cuMemAlloc", ctypes.byref(function), 12000),
        *(ctypes.c_uint64(0), None),
    )
    exported = ctypes.cast(asked.cuda.library.cuMemAlloc_v2, ctypes.c_void_p)
    return _yes(function.value == exported.value)


def _missing_kernel(asked: Asked) -> str:
    function = ctypes.c_void_p()
    module = asked.kernels.module
    return _code(
        asked.cuda.code("cuModuleGetFunction", ctypes.byref(function), module, b"fenka_none")
    )


def _unlaunchable(asked: Asked) -> str:
    kernel = asked.kernels
    previous = ctypes.c_void_p()
    asked.cuda.call("cuCtxPopCurrent_v2", ctypes.byref(previous))
    try:
        kernel.empty()
    except CudaError as why:
        return _code(why.code)
    finally:
        asked.cuda.call("cuCtxPushCurrent_v2", previous)
    return _code(0)


# ---- time ----


def _pending(asked: Asked) -> str:
    """Ask whether a launch returns before its kernel ends."""
    asked.kernels.spin(asked.turns * 10)
    code = asked.cuda.code("cuStreamQuery", None)
    asked.kernels.wait()
    return f"{_code(code)}, then {_code(asked.cuda.code('cuStreamQuery', None))}"


def _events(asked: Asked) -> str:
    """Ask whether events around a kernel measure it, to a fifth."""
    cuda = asked.cuda
    start, end, elapsed = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_float()
    for event in (start, end):
        cuda.call("cuEventCreate", ctypes.byref(event), 0)
    cuda.call("cuEventRecord", start, None)
    for _ in range(5):
        asked.kernels.spin(asked.turns)
    cuda.call("cuEventRecord", end, None)
    early = cuda.code("cuEventElapsedTime", ctypes.byref(elapsed), start, end)
    asked.kernels.wait()
    cuda.call("cuEventElapsedTime", ctypes.byref(elapsed), start, end)
    for event in (start, end):
        cuda.call("cuEventDestroy_v2", event)
    near = abs(elapsed.value * 1000 - 5 * SPIN_US) < SPIN_US
    return f"{_code(early)} while it runs, right afterwards: {_yes(near)}"


def _computes(asked: Asked) -> str:
    cuda, kernels = asked.cuda, asked.kernels
    cuda.call("cuMemsetD8_v2", kernels.result, ctypes.c_ubyte(0), ctypes.c_size_t(4))
    kernels.spin(1)
    kernels.wait()
    value = ctypes.c_uint32()
    cuda.call("cuMemcpyDtoH_v2", ctypes.byref(value), kernels.result, ctypes.c_size_t(4))
    return _yes(value.value == 1664525 + 1013904223)


# ---- processes, and newer interfaces ----


def _child(asked: Asked) -> str:
    """Ask for the memory in a child of fork, which has no CUDA of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        free = ctypes.c_size_t()
        code = asked.cuda.code("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(free))
        os.write(writing, str(code).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    answer = os.read(reading, 16)
    os.close(reading)
    return _code(int(answer)) if answer else "the child died"


def _checkpoint(asked: Asked) -> str:
    state = ctypes.c_int(-1)
    code = asked.cuda.code("cuCheckpointProcessGetState", os.getpid(), ctypes.byref(state))
    return f"running ({state.value})" if code == 0 else _code(code)


def _attributes(asked: Asked) -> str:
    numbers = {
        "unified addresses": _UNIFIED_ADDRESSING,
        "virtual memory": _VIRTUAL_MEMORY,
        "pools": _POOLS,
    }
    return ", ".join(f"{name} {asked.cuda.attribute(number)}" for name, number in numbers.items())


ASSUMPTIONS: Final = (
    Assumption("an allocation of 0 bytes", "invalid value (1)", _nothing),
    Assumption(
        "an allocation of more than the card has",
        "out of memory (2), then 1 MiB succeeds",
        _too_much,
    ),
    Assumption("cuDeviceTotalMem equals cuMemGetInfo's total", "yes", _totals),
    Assumption("addresses are aligned to 256 bytes", "yes", _alignment),
    Assumption("64 MiB reduce the free memory by", "64 MiB", _large),
    Assumption("one byte more than 64 MiB takes in addition", "2097152 bytes", _odd),
    Assumption("freed memory is free at once", "yes", _given_back),
    Assumption("freeing an unknown address", "invalid value (1)", _unknown),
    Assumption("freeing twice", "invalid value (1)", _twice),
    Assumption("cuMemset and copies are real", "yes", _copies),
    Assumption("granularity of cuMemCreate", "2 MiB", _granularity),
    Assumption(
        "mapped memory stays when its handle is released", "yes, until it is unmapped: yes", _mapped
    ),
    Assumption("freed memory of the default pool is free after a synchronisation", "yes", _pool),
    Assumption("cuIpcGetMemHandle", "succeeds", _ipc),
    Assumption(
        "cuGetProcAddress of an unknown name", "succeeds, status 1, no address", _unknown_function
    ),
    Assumption("cuGetProcAddress returns the exported address", "yes", _same_address),
    Assumption("a kernel that the module does not have", "error 500", _missing_kernel),
    Assumption("a launch without a context", "error 201", _unlaunchable),
    Assumption("a stream while its kernel runs", "error 600, then succeeds", _pending),
    Assumption("events around kernels", "error 600 while it runs, right afterwards: yes", _events),
    Assumption("kernels compute", "no", _computes),
    Assumption("cuMemGetInfo in a child of fork", "error 3", _child),
    Assumption("cuCheckpointProcessGetState of this process", "error 801", _checkpoint),
    Assumption("attributes", "unified addresses 1, virtual memory 1, pools 1", _attributes),
)
