"""A numba program in a slice: holds memory, reports, and on request asks for more than its slice has.

Reads lines: a number of MiB to allocate, or nothing to end. Prints one JSON line first and after each.
"""

import json
import sys
import warnings

import numpy as np
from numba import cuda
from numba.cuda.cudadrv.driver import CudaAPIError

warnings.simplefilter("ignore")


def main() -> None:
    """Print what is seen: the devices, total and free MiB, and whether the last allocation succeeded."""
    held, succeeded = [], True
    while True:
        memory = cuda.current_context().get_memory_info()
        device = cuda.get_current_device()
        seen = {
            "devices": len(cuda.gpus),
            "name": device.name.decode() if isinstance(device.name, bytes) else device.name,
            "total": memory.total >> 20,
            "free": memory.free >> 20,
            "succeeded": succeeded,
        }
        print(json.dumps(seen), flush=True)
        wanted = sys.stdin.readline().strip()
        if not wanted:
            return
        try:
            held.append(cuda.device_array(int(wanted) << 20, dtype=np.uint8))
            succeeded = True
        except CudaAPIError as why:
            if "OUT_OF_MEMORY" not in str(why):
                raise
            succeeded = False


main()
