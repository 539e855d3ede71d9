"""Use the first card for the given seconds, print a line, and stay without using it."""

import signal
import sys
import time

from cuda.bindings import driver as cuda

PTX = b".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry spin_us2000() { ret; }\n"


def ok(result: tuple[object, ...]) -> object:
    """Return the value of a call that must succeed."""
    assert result[0] == cuda.CUresult.CUDA_SUCCESS, result
    return result[1] if len(result) > 1 else None


def main() -> None:
    """Launch kernels of 2 ms, one after the other."""
    ok(cuda.cuInit(0))
    ok(cuda.cuCtxSetCurrent(ok(cuda.cuDevicePrimaryCtxRetain(0))))
    kernel = ok(cuda.cuModuleGetFunction(ok(cuda.cuModuleLoadData(PTX)), b"spin_us2000"))
    end = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < end:
        ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
        ok(cuda.cuCtxSynchronize())
    print("used", flush=True)
    signal.pause()


main()
