"""A GPU program for the tests: allocates what its argument says in MiB, reports, and waits for stdin.

Plain ctypes on the driver API, as the simplest of clients. Prints one JSON line.
"""

import ctypes
import json
import sys

MIB = 1 << 20


def main() -> None:
    """Allocate argv[1] MiB on each device and print what is seen."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as why:
        print(json.dumps({"error": str(why)}), flush=True)
        sys.exit(3)
    started = cuda.cuInit(0)
    if started != 0:
        print(json.dumps({"init": started}), flush=True)
        sys.exit(4)
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    seen = []
    for ordinal in range(count.value):
        device, context = ctypes.c_int(), ctypes.c_void_p()
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        cuda.cuCtxSetCurrent(context)
        pointer = ctypes.c_uint64()
        result = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(int(sys.argv[1]) * MIB))
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        seen.append({"result": result, "free": free.value // MIB, "total": total.value // MIB})
    print(json.dumps({"cards": seen}), flush=True)
    sys.stdin.read()


main()
