"""The simulated driver as C programs meet it: linked, threaded, and on old systems."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fenka.hardware.card_spec import parse_spec
from fenka.hardware.simulated_node import SimulatedNode

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "src/fenka/_native/simulated"


@pytest.fixture
def simulated(tmp_path: Path) -> Iterator[SimulatedNode]:
    """A running node with one T4."""
    node = SimulatedNode.create(tmp_path / "node", parse_spec("T4"))
    node.start()
    yield node
    node.stop()


def test_threads_share_the_driver(simulated: SimulatedNode, tmp_path: Path) -> None:
    """Eight threads at once: each reads back what it wrote, and in the end all memory is free."""
    program = tmp_path / "threads"
    source, library = HERE / "test_simdriver_threads.c", NATIVE / "libcuda.so.1"
    compiler = [sys.executable, "-m", "ziglang", "cc", "-O1", "-pthread"]
    subprocess.run([*compiler, "-o", program, source, library], check=True)
    done = subprocess.run(
        [program, "500"],
        env={**os.environ, "LD_LIBRARY_PATH": str(simulated.library_dir)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    rounds, before, after = map(int, done.stdout.split())
    assert rounds > 8
    assert before == after == 15079 << 20


@pytest.mark.parametrize("library", ["libcuda.so.1", "libnvidia-ml.so.1", "fenka-cardserver"])
def test_simulated_driver_needs_no_newer_glibc(library: str) -> None:
    """No symbol of a glibc after 2.17 is asked for."""
    asked = {tuple(map(int, v.split(b"."))) for v in _versions((NATIVE / library).read_bytes())}
    assert asked
    assert max(asked) <= (2, 17)


def _versions(content: bytes) -> list[bytes]:
    return re.findall(rb"GLIBC_(\d+\.\d+(?:\.\d+)?)\0", content)


@pytest.mark.parametrize(
    ("library", "header", "prefix"),
    [("libcuda.so.1", "cuda.i", "cu"), ("libnvidia-ml.so.1", "nvml.i", "nvml")],
)
def test_simulated_driver_exports_every_function_of_the_header(
    library: str, header: str, prefix: str
) -> None:
    """What NVIDIA's header declares, a program can link to."""
    preprocessed = HERE.parents[1] / "native/build/simdriver" / header
    if not preprocessed.exists():
        pytest.skip("the native libraries were not built in this tree")
    declared = set(re.findall(rf"\b({prefix}[A-Z]\w*)\s*\((?!\s*\*)", preprocessed.read_text()))
    assert len(declared) > 300
    # In a process of its own: a library once loaded would be found again by the next test.
    ask = "import ctypes, sys; l = ctypes.CDLL(sys.argv[1]); names = sys.stdin.read().split();"
    show = "print([name for name in names if not hasattr(l, name)])"
    missing = subprocess.run(
        [sys.executable, "-c", ask + show, NATIVE / library],
        input=" ".join(sorted(declared)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert missing.stdout == "[]\n"
