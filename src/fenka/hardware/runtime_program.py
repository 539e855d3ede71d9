"""Makes a context as the CUDA runtime does, and allocates a byte when a line of standard input comes.

`fenka doctor --hardware` runs this file with the Python that has PyTorch, which need not have fenka.
The first argument is the driver's library. It prints a JSON line after each of both steps. The runtime gets
its context from a private table of the driver. The simulated driver has only a table of its own.
"""

import ctypes
import glob
import json
import site
import sys
import sysconfig
from typing import Any

SIMULATED = b"fenka's contexts"
"""Name of the simulated driver's table."""
SONAMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so")
PLACES = ("/usr/local/cuda*/lib64", "/opt/cuda/lib64")
"""Where toolkits have it, apart from the linker's directories and Python's wheels."""


class Table(ctypes.Structure):
    """The simulated driver's table."""

    _fields_ = (
        ("bytes", ctypes.c_size_t),
        ("retain", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int)),
        ("release", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)),
    )


def from_table(cuda: ctypes.CDLL) -> "dict[str, Any] | None":
    """Make a context by the simulated driver's table; None if the driver has none."""
    table, context = ctypes.POINTER(Table)(), ctypes.c_void_p()
    if cuda.cuGetExportTable(ctypes.byref(table), SIMULATED):
        return None
    code = table.contents.retain(ctypes.byref(context), 0) or cuda.cuCtxSetCurrent(context)
    return {"way": "the simulated driver's table", "code": code}


def from_runtime() -> "dict[str, Any]":
    """Make a context by the CUDA runtime; "missing" if there is none."""
    wheels = {sysconfig.get_paths()["purelib"], site.getusersitepackages()}
    places = [*PLACES, *(f"{wheel}/nvidia/*/lib" for wheel in wheels)]
    files = [path for place in places for path in sorted(glob.glob(f"{place}/libcudart.so*"))]
    for name in [*SONAMES, *files]:
        try:
            runtime = ctypes.CDLL(name)
        except OSError:
            continue
        return {"way": name, "code": runtime.cudaFree(None)}
    return {"missing": True}


def main(library: str) -> None:
    """Do both steps."""
    cuda = ctypes.CDLL(library)
    made = {"code": code} if (code := cuda.cuInit(0)) else from_table(cuda) or from_runtime()
    print(json.dumps(made), flush=True)
    if sys.stdin.readline():
        pointer = ctypes.c_uint64()
        code = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1))
        print(json.dumps({"code": code}), flush=True)
        sys.stdin.read()


main(sys.argv[1])
