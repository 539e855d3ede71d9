"""numba-cuda, unmodified, on a simulated card: it compiles with NVIDIA's own compiler and launches.

It is some 260 MB and no dependency of ours: the test takes it from the Python that the variable
FENKA_TEST_NUMBA names, or from its own, and is skipped where neither has it."""

import os
import subprocess
import sys

import pytest

from tests.hardware.gpu_kit import MakeNode

PROGRAM = """
import numpy, warnings
warnings.simplefilter("ignore")
from numba import cuda
before = cuda.current_context().get_memory_info()
@cuda.jit
def add_us30000(x, y):
    i = cuda.grid(1)
    if i < x.size:
        x[i] += y
numbers = numpy.arange(1 << 20, dtype=numpy.float32)
there = cuda.to_device(numbers)
taken = before.free - cuda.current_context().get_memory_info().free
stream = cuda.stream()
add_us30000[4096, 256, stream](there, 1.0)
stream.synchronize()
same = bool((there.copy_to_host() == numbers).all())
print(before.total >> 20, taken, same, cuda.get_current_device().name)
"""


def test_numba_compiles_and_launches(make_node: MakeNode) -> None:
    """Device memory is charged by the byte, the copy comes back, the kernel is found and launched (it
    computes nothing, so the numbers are as they were)."""
    python = os.environ.get("FENKA_TEST_NUMBA", sys.executable)
    asked = subprocess.run([python, "-c", "import numba_cuda"], capture_output=True, check=False)
    if asked.returncode != 0:
        pytest.skip(f"{python} has no numba-cuda: name one that has in FENKA_TEST_NUMBA")
    done = subprocess.run(
        [python, "-c", PROGRAM],
        env={**os.environ, "LD_LIBRARY_PATH": str(make_node("T4").library_dir)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "15079 4194304 True Tesla T4\n"), done.stderr
