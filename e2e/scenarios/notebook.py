"""Imitate a notebook: a web server in a pod, whose cells are requests.

GET /memory    the card's memory by NVML and by the CUDA driver, in MiB
GET /allocate?mib=N    allocates N MiB of device memory; returns the driver's CUresult
GET /free      frees all allocated memory
GET /copy      writes and reads back some device memory; returns whether both are equal
GET /environment    the environment variables
Each requires ?password=$PASSWORD, as a notebook would.
"""

import ctypes
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

MIB = 1 << 20
cuda = ctypes.CDLL("libcuda.so.1")
nvml = ctypes.CDLL("libnvidia-ml.so.1")
allocated: list[ctypes.c_uint64] = []
Query = dict[str, list[str]]


def check(result: int) -> None:
    """Raise RuntimeError unless a CUDA or NVML call returned 0 (success)."""
    if result:
        raise RuntimeError(f"the driver returned {result}")


def start() -> ctypes.c_void_p:
    """Initialise CUDA and NVML, and return the first card's primary context."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    check(cuda.cuInit(0))
    check(cuda.cuDeviceGet(ctypes.byref(device), 0))
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    check(nvml.nvmlInit_v2())
    return context


CONTEXT = start()


def memory(_query: Query) -> dict[str, Any]:
    """Return total and free or used memory by CUDA and by NVML."""

    class Memory(ctypes.Structure):
        _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))

    free, total, of_nvml, handle = ctypes.c_size_t(), ctypes.c_size_t(), Memory(), ctypes.c_void_p()
    check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    check(nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)))
    check(nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(of_nvml)))
    return {
        "cuda": {"total": total.value // MIB, "free": free.value // MIB},
        "nvml": {"total": of_nvml.total // MIB, "used": of_nvml.used // MIB},
    }


def allocate(query: Query) -> dict[str, Any]:
    """Allocate memory and return cuMemAlloc's result."""
    address = ctypes.c_uint64()
    result = cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(int(query["mib"][0]) * MIB))
    if result == 0:
        allocated.append(address)
    return {"result": result}


def free_all(_query: Query) -> dict[str, Any]:
    """Free all allocated memory."""
    while allocated:
        check(cuda.cuMemFree_v2(allocated.pop()))
    return {"result": 0}


def copy(_query: Query) -> dict[str, Any]:
    """Copy bytes to the card and back."""
    address, sent, got = ctypes.c_uint64(), os.urandom(4096), ctypes.create_string_buffer(4096)
    check(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4096)))
    check(cuda.cuMemcpyHtoD_v2(address, sent, ctypes.c_size_t(4096)))
    check(cuda.cuMemcpyDtoH_v2(got, address, ctypes.c_size_t(4096)))
    check(cuda.cuMemFree_v2(address))
    return {"same": got.raw == sent}


def environment(_query: Query) -> dict[str, Any]:
    """Return the environment variables."""
    return dict(os.environ)


CELLS = {
    "/memory": memory,
    "/allocate": allocate,
    "/free": free_all,
    "/copy": copy,
    "/environment": environment,
}


class Notebook(BaseHTTPRequestHandler):
    """Run one cell for each request."""

    def do_GET(self) -> None:
        """Run the cell if the password is correct."""
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if query.get("password") != [os.environ["PASSWORD"]]:
            self.send_error(403)
            return
        check(cuda.cuCtxSetCurrent(CONTEXT))
        answer = json.dumps(CELLS[url.path](query)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_words: object) -> None:
        """Write no log."""


ThreadingHTTPServer(("", 8888), Notebook).serve_forever()
