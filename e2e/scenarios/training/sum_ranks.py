"""A training of MPI: its ranks add their numbers, and each prints what it sees of its card and its code.

With WAIT=1 it waits until the file /tmp/go exists in the pod of rank 0. With FAIL=RANK that rank exits with
code 7.
"""

import os
import socket
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI
from numba import cuda
from numba.cuda.cudadrv.driver import CudaAPIError


def revision() -> str:
    """Return the commit that is checked out, or "" outside of a repository."""
    head = Path(__file__).resolve().parent / ".git" / "HEAD"
    return head.read_text().strip() if head.exists() else ""


def largest_allocation(mib: int) -> str:
    """Return whether a block of this size can be allocated."""
    try:
        cuda.device_array(mib << 20, dtype=np.uint8)
    except CudaAPIError as error:
        return "refused" if "OUT_OF_MEMORY" in str(error) else str(error)
    return "allocated"


def main() -> None:
    """Print one line for each rank."""
    world = MPI.COMM_WORLD
    if os.environ.get("WAIT") and world.rank == 0:
        while not Path("/tmp/go").exists():
            time.sleep(0.1)
    total = world.allreduce(world.rank + 1)
    if os.environ.get("FAIL") == str(world.rank):
        sys.exit(7)
    mib = cuda.current_context().get_memory_info().total >> 20
    line = {
        "rank": world.rank,
        "sum": total,
        "host": socket.gethostname(),
        "commit": revision(),
        "mib": mib,
        "within": largest_allocation(mib - 512),
        "beyond": largest_allocation(mib + 64),
        "attempt": os.environ.get("FENKA_RESTARTS"),
    }
    # In one call: `print` would write the end of the line separately, behind another rank's line.
    sys.stdout.write(" ".join(f"{key}={value}" for key, value in line.items()) + "\n")


main()
