"""Measures the device memory that a process's context takes.

It is hundreds of MiB on large cards, appears in no driver call, and differs by model and driver. So a probe
process makes a context and does nothing else, and NVML reports what it holds.
"""

import os
import subprocess
import sys
from pathlib import Path

from fenka.core.inventory import Card
from fenka.hardware.nvml import Driver

PROBE = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
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


def context_mib(driver: Driver, card: Card, library_dir: Path | None) -> int | None:
    """Return the MiB that a process with only a context holds on a card, as the driver reports.

    Return None if the driver reports no process's memory, or makes no context.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": card.uuid}
    if library_dir is not None:
        environment["LD_LIBRARY_PATH"] = str(library_dir)
    with subprocess.Popen(
        [sys.executable, "-SIc", PROBE],
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
