"""The simulated driver under AddressSanitizer and UndefinedBehaviorSanitizer, with random programs."""

import contextlib
import functools
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fenka.hardware.simulated_node import SimulatedNode
from tests.hardware import test_simulated_arrays, test_simulated_graph_nodes, test_simulated_pools
from tests.hardware.client import Client
from tests.hardware.random_programs import GRAPHS, OBJECTS, Program, play
from tests.native.clients import HEADERS

NATIVE = Path(__file__).parents[2] / "native"
GENERATED = NATIVE / "build" / "simdriver"
# The helpers that each kind of program calls.
SETUPS = {
    "graphs": (GRAPHS, [test_simulated_graph_nodes.SETUP]),
    "objects": (OBJECTS, [test_simulated_pools.SETUP, test_simulated_arrays.SETUP]),
}
FAULTS = {"lib.cuDriverGetVersion(room)": "heap-buffer-overflow"} | {
    "lib.cuDriverGetVersion(ctypes.c_void_p(aligned + 1))": "misaligned address"
}


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return libcuda.so.1 as the Makefile builds it, but by gcc and with its sanitizers."""
    folder = tmp_path_factory.mktemp("sanitized")
    sources = [
        *(
            p
            for p in (NATIVE / "simdriver").glob("*.c")
            if not p.stem.startswith(("nvml_", "cards"))
        ),
        *(GENERATED / f"cuda_{name}.c" for name in ("stubs", "threads")),
    ]
    flags = [
        *("-g1", "-O0", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-w", "-fno-builtin"),
        *(f"-I{NATIVE / 'simdriver'}", f"-I{GENERATED}", f"-I{NATIVE / 'include'}"),
        *(f"-isystem{HEADERS}", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    ]
    objects = [folder / f"{source.stem}.o" for source in sources]
    commands = [
        ["gcc", *flags, "-c", "-o", output, source]
        for source, output in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(functools.partial(subprocess.run, check=True), commands))
    linked = ["-shared", "-Wl,-Bsymbolic", "-Wl,-z,nodelete", "-Wl,-soname,libcuda.so.1"]
    library = folder / "libcuda.so.1"
    subprocess.run(
        ["gcc", *flags, *linked, "-o", library, *objects, "-ldl", "-lpthread", "-lrt"], check=True
    )
    return library


def sanitizer(name: str) -> str:
    """Return the path of one of gcc's sanitizers."""
    return subprocess.run(
        ["gcc", f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def libraries(node: SimulatedNode, sanitized: Path) -> Path:
    """Return a folder of a node's libraries in which the driver is the sanitized one."""
    # The driver finds its node by its own place: a folder of the node.
    folder = node.library_dir.parent / "sanitized"
    shutil.copytree(node.library_dir, folder, symlinks=True)
    (folder / "libcuda.so.1").unlink()
    shutil.copy(sanitized, folder / "libcuda.so.1")
    return folder


@contextlib.contextmanager
def started(libraries: Path) -> Iterator[Client]:
    """Run a program on the sanitized driver; capfd gets its stderr only if it starts inside the test."""
    client = Client(
        libraries,
        LD_PRELOAD=f"{sanitizer('libasan.so')} {sanitizer('libubsan.so')}",
        PYTHONMALLOC="malloc",
        ASAN_OPTIONS="detect_leaks=0",
    )
    try:
        yield client.enter()
    finally:
        client.kill()
        for pipe in (client.process.stdin, client.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", SETUPS)
def test_sanitizers_find_nothing_in_random_programs(
    libraries: Path, capfd: pytest.CaptureFixture[str], kind: str, seed: int
) -> None:
    """All moves in any order, on handles that may be stale, read and write only the driver's own memory."""
    moves: Program
    moves, setups = SETUPS[kind]
    with started(libraries) as program:
        for setup in setups:
            program.do(f"exec({setup!r}, globals())", "0")
        try:
            play(program, moves, seed, 600)
        except ValueError:
            pytest.fail(f"ended with {program.process.wait()}: {capfd.readouterr().err}")
        program.end()
        assert capfd.readouterr().err == ""
        assert program.process.returncode == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_sanitizers_find_a_planted_fault(
    libraries: Path, capfd: pytest.CaptureFixture[str], fault: str
) -> None:
    """The driver writes four bytes where the program has room for one, or at an odd address."""
    with started(libraries) as program:
        program.do(
            "import ctypes",
            "lib, libc = ctypes.CDLL('libcuda.so.1'), ctypes.CDLL(None)",
            "libc.malloc.restype = ctypes.c_void_p",
            "room, aligned = ctypes.c_void_p(libc.malloc(1)), libc.malloc(64)",
            "0",
        )
        with pytest.raises(ValueError, match="Expecting value"):
            program.do(fault)
        program.process.wait()
        assert FAULTS[fault] in capfd.readouterr().err
