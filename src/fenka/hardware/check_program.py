"""A program that uses a card, for `fenka doctor --hardware`: `python -m fenka.hardware.check_program WHAT …`.

It prints one JSON line, or {"error": …}. The first argument after WHAT is the driver's library.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from fenka.hardware.cuda_calls import MIB, Cuda, CudaError, least_ns

_GET_STATE: Final = "cuCheckpointProcessGetState"
CHECKPOINT: Final = (
    "cuCheckpointProcessLock",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
    _GET_STATE,
    "cuCheckpointProcessGetRestoreThreadId",
)
"""Functions that suspend a program, from driver 570 on."""

_PAIRS, _LAUNCHES, _QUERIES = 200, 100, 500
_PAIR_BYTES = MIB
PAGE_BYTES: Final = 2 * MIB
"""The unit of large allocations."""
_BATCH = 20
"""Kernels that are launched together."""


def limit(library: str) -> dict[str, Any]:
    """Ask for one byte more than is free, for all pages that are free, and then for one page."""
    cuda = Cuda(library).enter()
    free, total = cuda.memory()
    beyond, _ = cuda.allocate(free + 1)
    pages = free - free % PAGE_BYTES
    all_free, pointer = cuda.allocate(pages)
    one_more, _ = cuda.allocate(PAGE_BYTES)
    if not all_free:
        cuda.free(pointer)
    again, pointer = cuda.allocate(pages)
    return {
        "free": free,
        "total": total,
        "beyond": beyond,
        "all": all_free,
        "one_more": one_more,
        "again": again,
    }


def calls(library: str) -> dict[str, float]:
    """Measure the nanoseconds of an allocation with its release, of a launch, and of a query."""
    cuda = Cuda(library).enter()
    kernels = cuda.kernels()

    def pair() -> None:
        code, pointer = cuda.allocate(_PAIR_BYTES)
        if code or (code := cuda.free(pointer)):
            raise CudaError("cuMemAlloc_v2 or cuMemFree_v2", code)

    return {
        "allocation": least_ns(pair, _PAIRS),
        "launch": least_ns(kernels.empty, _LAUNCHES, kernels.wait),
        "query": least_ns(cuda.memory, _QUERIES),
    }


def calibrate(library: str) -> dict[str, float]:
    """Return the turns of a kernel, and the microseconds that it takes alone."""
    turns, us = Cuda(library).enter().kernels().calibrate()
    return {"turns": turns, "us": us}


def spin(library: str, turns: str, warm: str, seconds: str) -> dict[str, float]:
    """Launch kernels all the time, from a line of standard input on. Return how many, and the seconds.

    Those of the first `warm` seconds do not count: the limit measures the kernels then.
    """
    kernels = Cuda(library).enter().kernels()
    _say({"ready": True})
    sys.stdin.readline()
    kernels.spin_for(int(turns), float(warm), _BATCH)
    count, elapsed = kernels.spin_for(int(turns), float(seconds), _BATCH)
    return {"kernels": count, "seconds": elapsed}


def hold(library: str, mib: str) -> dict[str, Any]:
    """Hold memory until standard input ends."""
    cuda = Cuda(library).enter()
    code, _ = cuda.allocate(int(mib) * MIB)
    _say({"code": code})
    sys.stdin.read()
    return {}


def churn(library: str, mib: str) -> dict[str, Any]:
    """Hold memory, and allocate and free the same again until this is killed."""
    cuda = Cuda(library).enter()
    code, _ = cuda.allocate(int(mib) * MIB)
    _say({"code": code})
    while not code:
        code, pointer = cuda.allocate(int(mib) * MIB)
        cuda.free(pointer)
    return {"code": code}


def assumptions(library: str) -> dict[str, Any]:
    """Compare the driver with what the simulated one assumes: one line for each answer, as it comes."""
    from fenka.hardware.assumptions import compare

    for answer in compare(library):
        _say(answer)
    return {}


def features(library: str, nvml: str) -> dict[str, Any]:
    """Return the newer functions that the driver has, and its answer to one of them."""
    cuda = Cuda(library).enter()
    state = ctypes.c_int(-1)
    checkpoint = [name for name in CHECKPOINT if hasattr(cuda.library, name)]
    return {
        "checkpoint": checkpoint,
        "state": cuda.code(_GET_STATE, os.getpid(), ctypes.byref(state))
        if _GET_STATE in checkpoint
        else None,
        "memory_limits": hasattr(ctypes.CDLL(nvml), "nvmlDeviceSetMemoryLimits_v1"),
    }


ACTIONS: Final[dict[str, Callable[..., Any]]] = {
    action.__name__: action
    for action in (limit, calls, calibrate, spin, hold, churn, assumptions, features)
}


def _say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    """Do what the arguments say."""
    what, *arguments = sys.argv[1:]
    try:
        _say(ACTIONS[what](*arguments))
    except (CudaError, OSError, RuntimeError, AttributeError) as why:
        _say({"error": str(why)})
        sys.exit(1)


if __name__ == "__main__":
    main()
