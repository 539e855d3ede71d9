"""A numba program: compiles a kernel, launches it, copies, and asks for more than its slice."""

import json
import warnings

import numpy as np
from numba import cuda
from numba.cuda.cudadrv.driver import CudaAPIError

warnings.simplefilter("ignore")


@cuda.jit
def add_one(source, target):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Simulated cards compute nothing; that it compiles and launches is the point."""
    index = cuda.grid(1)
    if index < source.size:
        target[index] = source[index] + 1


def main() -> None:
    """Print what was seen as one JSON line."""
    source = cuda.to_device(np.arange(1024, dtype=np.float32))
    target = cuda.device_array(1024, dtype=np.float32)
    add_one[4, 256](source, target)
    cuda.synchronize()
    back = source.copy_to_host()
    total = cuda.current_context().get_memory_info().total >> 20
    try:
        cuda.device_array(4400 << 20, dtype=np.uint8)
        refused = False
    except CudaAPIError as why:
        refused = "OUT_OF_MEMORY" in str(why)
    print(json.dumps({"back": float(back.sum()), "total": total, "refused": refused}))


main()
