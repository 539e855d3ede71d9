"""Code that the driver loads from a file: all of it is read, and nothing is read that is no file."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fenka.hardware.card_spec import parse_spec
from fenka.hardware.simulated_node import SimulatedNode
from fenka.isolation.lease_control import Limit
from tests.native.clients import GIB, MIB, Lease
from tests.native.test_shim_module_size import KERNEL, cubin, entry, fat
from tests.native.test_shim_simulated import LIST, python

DATA = (".nv.global", 8, 3, 64 * MIB)
IMAGE = cubin(KERNEL, DATA)
TEXT = b".version 7.0 .target sm_75 .global .b8 x[67108864]; .visible .entry k() { ret; }"
CODE = {
    "cubin": (IMAGE, 66),
    "fat binary": (fat(entry(IMAGE)), 66),
    "text": (TEXT, 66),
    "text with a byte that is no ASCII": (b"// \xff\n" + TEXT, 66),
    "fat binary of two, the first with many bytes 0xff": (
        fat(entry(b"\xff" * 5000), entry(IMAGE)),
        66,
    ),
}
"""Content, and the MiB that it takes."""
INVALID = 200
MISSING = 301


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    """One T4."""
    made = SimulatedNode.create(tmp_path_factory.mktemp("node"), parse_spec("T4"))
    made.start()
    yield made
    made.stop()


@pytest.fixture(params=["bare", "in a lease"])
def lease(
    node: SimulatedNode, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Lease | None]:
    """None, or 4 GiB."""
    if request.param == "bare":
        yield None
        return
    (uuid,) = python(node, LIST + "print(json.dumps([n.nvmlDeviceGetUUID(h) for h in handles]))")
    made = Lease(tmp_path / "lease", (Limit(uuid, 4 * GIB),))
    yield made
    made.close()


PROGRAM = """
import json, sys
from cuda.bindings import driver as d
d.cuInit(0)
d.cuCtxSetCurrent(d.cuDevicePrimaryCtxRetain(0)[1])
path, said = sys.argv[1].encode(), []
for load, unload in ((lambda: d.cuModuleLoad(path), d.cuModuleUnload),
                     (lambda: d.cuLibraryLoadFromFile(path, [], [], 0, [], [], 0), d.cuLibraryUnload)):
    before = d.cuMemGetInfo()[1]
    code, *made = load()
    said.append([int(code), (before - d.cuMemGetInfo()[1]) >> 20])
    if made and int(code) == 0: unload(made[0])
    said[-1].append(before - d.cuMemGetInfo()[1])
print(json.dumps(said))
"""


def load(node: SimulatedNode, lease: Lease | None, path: str) -> list[list[int]]:
    """Code, MiB taken, and bytes left after the unload: of a module and of a library. Fails if it waits."""
    environment = lease.environment() if lease else {"PATH": os.environ["PATH"]}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, path],
        env={**environment, "LD_LIBRARY_PATH": str(node.library_dir)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, (ran.returncode, ran.stderr)
    answer: list[list[int]] = json.loads(ran.stdout)
    return answer


@pytest.mark.parametrize("name", CODE)
def test_code_in_a_file_is_read_whole(
    node: SimulatedNode, lease: Lease | None, tmp_path: Path, name: str
) -> None:
    """Also behind a byte 0xff; what it takes is the same without a lease and in one."""
    content, mib = CODE[name]
    (tmp_path / "code").write_bytes(content)
    assert load(node, lease, str(tmp_path / "code")) == [[0, mib, 0], [0, mib, 0]]


def hostile(folder: Path, kind: str) -> str:
    """A path of this kind."""
    path = folder / "code"
    whole = fat(entry(IMAGE))
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device without end":
        return "/dev/zero"
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "one byte":
        path.write_bytes(b"\xff")
    elif kind == "larger than can be":
        with path.open("wb") as file:
            file.truncate(1 << 43)
    elif kind == "fat binary that ends early":
        path.write_bytes(whole[:100])
    elif kind == "fat binary of nothing but a magic":
        path.write_bytes(whole[:8])
    elif kind == "fat binary that says it is endless":
        path.write_bytes(whole[:8] + b"\xff" * 8 + whole[16:])
    elif kind == "cubin whose names lie behind its end":
        path.write_bytes(IMAGE[: -len(".shstrtab") - 20])
    elif kind == "cubin of nothing but a header":
        path.write_bytes(IMAGE[:64])
    return str(path)


@pytest.mark.parametrize(
    ("kind", "codes"),
    [
        ("missing", {MISSING}),
        ("FIFO", {INVALID}),
        ("directory", {INVALID}),
        ("device without end", {INVALID}),
        ("empty", {INVALID}),
        ("one byte", {INVALID}),
        ("larger than can be", {INVALID}),
        ("fat binary that ends early", {0, INVALID}),
        ("fat binary of nothing but a magic", {0, INVALID}),
        ("fat binary that says it is endless", {0, INVALID}),
        ("cubin whose names lie behind its end", {0, INVALID}),
        ("cubin of nothing but a header", {0, INVALID}),
    ],
)
def test_hostile_file_is_refused_without_a_crash(
    node: SimulatedNode, lease: Lease | None, tmp_path: Path, kind: str, codes: set[int]
) -> None:
    """Nobody waits for a pipe, or reads without end; nothing stays charged."""
    said = load(node, lease, hostile(tmp_path, kind))
    assert {code for code, *_ in said} <= codes
    assert [left for *_, left in said] == [0, 0]
