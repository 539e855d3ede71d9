"""What a process takes of a card before it asks for anything: its context.

Hundreds of MiB on large cards, in no entry point's argument, and another number for each model and
driver. So it is measured: a process makes a context and does nothing else, and NVML says what it holds.
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
"""The standard library alone; ends when its standard input does."""


def context_mib(driver: Driver, card: Card, library_dir: Path | None) -> int | None:
    """MiB that a process with nothing but a context holds on this card, by the driver's own account.

    None where it cannot be told: the driver names no process's memory, or makes no context.
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
