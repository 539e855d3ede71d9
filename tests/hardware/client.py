"""An unmodified cuda-bindings program on a simulated node, told line by line what to do."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fenka.hardware.simulated_node import SimulatedNode
from tests.waiting import WAIT_S

MIB = 1 << 20

# `ok` unpacks a driver call's answer and complains; `code` gives the bare error number.
_PROGRAM = """
import json, sys
from cuda.bindings import driver as d
def ok(answer):
    if answer[0] != d.CUresult.CUDA_SUCCESS: raise RuntimeError(answer[0].name)
    return answer[1] if len(answer) == 2 else answer[1:]
def code(answer): return int(answer[0])
def plain(value):
    try: return int(value)
    except (TypeError, ValueError): return str(value)
names = {"d": d, "ok": ok, "code": code}
for line in sys.stdin:
    *statements, last = json.loads(line)
    try:
        for statement in statements: exec(statement, names)
        answer = {"value": eval(last, names)}
    except Exception as why:
        answer = {"error": f"{type(why).__name__}: {why}"}
    print(json.dumps(answer, default=plain), flush=True)
"""


class Client:
    """A process of its own; `do` runs statements there and returns the last one's value."""

    def __init__(self, library_dir: Path, **environment: str) -> None:
        kept = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env={**kept, "LD_LIBRARY_PATH": str(library_dir), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Return its process ID in this process's PID namespace."""
        return self.process.pid

    def do(self, *statements: str) -> Any:
        """Run statements and return the last one's value. Raises RuntimeError with what it raised."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(statements) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def enter(self, device: int = 0) -> "Client":
        """Initialise, and make the device's primary context current."""
        self.do(
            "ok(d.cuInit(0))",
            f"context = ok(d.cuDevicePrimaryCtxRetain({device}))",
            "code(d.cuCtxSetCurrent(context))",
        )
        return self

    def free_bytes(self) -> int:
        """Return what cuMemGetInfo reports as free on the current device."""
        return int(self.do("ok(d.cuMemGetInfo())[0]"))

    def end(self) -> None:
        """End the program as one that has nothing more to do."""
        self.process.communicate(timeout=WAIT_S)

    def kill(self) -> None:
        """End the program without a chance to clean up."""
        self.process.kill()
        self.process.wait(WAIT_S)


MakeNode = Callable[[str], SimulatedNode]
MakeClient = Callable[..., Client]
