"""The shim of the other architecture, on an emulated processor: its units, and two clients under it."""

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.clients import CARDS, GIB, HEADERS, HERE, NULL_DRIVER, Lease, built
from tests.native.test_shim_sanitized import INCLUDE, PARTS

NATIVE = HERE.parent.parent / "native"
LIBC = Path("/usr/aarch64-linux-gnu")
ZIG = (sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu.2.17")
FLAGS = ("-O1", "-g", "-w", "-std=gnu11", "-fno-sanitize=undefined", *INCLUDE)


@functools.cache
def folder() -> Path:
    """What is built for aarch64; skips where it could not be run."""
    if not shutil.which("qemu-aarch64") or not LIBC.exists():
        pytest.skip("no emulated aarch64 here (Debian: qemu-user and libc6-arm64-cross)")
    made = built() / "aarch64"
    made.mkdir()
    where = [f"OUT={made}", f"BUILD={made / 'build'}", f"PYTHON={sys.executable}"]
    build = ["make", "-C", str(NATIVE / "shim"), "ARCH=aarch64", *where]
    subprocess.run(build, check=True, capture_output=True)
    for output, *rest in (
        ("libcuda.so.1", "-shared", "-fPIC", "-Wl,-Bsymbolic", str(NULL_DRIVER)),
        ("units", str(HERE / "shim_units.c"), *PARTS, "-ldl", "-pthread"),
        ("client1", "-DSTYLE=1", str(HERE / "shim_client.c"), "-ldl", "-pthread"),
        ("client4", "-DSTYLE=4", str(HERE / "shim_client.c"), "-ldl", "-pthread"),
    ):
        command = [*ZIG, *FLAGS, f"-isystem{HEADERS}", "-o", str(made / output), *rest]
        subprocess.run(command, check=True, capture_output=True)
    return made


def run(
    lease: Lease, *command: str, given: str = "", preload: str = ""
) -> subprocess.CompletedProcess[str]:
    """In the lease. The variables are for the emulated program, not for the emulator."""
    variables = [f"LD_PRELOAD={preload}", f"LD_LIBRARY_PATH={folder()}"] if preload else []
    inside = [word for variable in variables for word in ("-E", variable)]
    return subprocess.run(
        ["qemu-aarch64", "-L", str(LIBC), *inside, *command],
        env={"FENKA_LEASE": str(lease.folder), "FENKA_NULL_CARDS": ",".join(CARDS)},
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("case", ["threads", "calls", "allocations", "owners"])
def test_units_pass_on_aarch64(lease: Lease, case: str) -> None:
    """Also where a locked instruction is no full barrier."""
    ran = run(
        lease, str(folder() / "units"), str(folder() / "libcuda.so.1"), str(lease.folder), case
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("style", [1, 4])
def test_program_is_limited_on_aarch64(lease: Lease, style: int) -> None:
    """Of 4 GiB 5 are too much, 3 fit, 1 is left; by dlsym, and by cuGetProcAddress."""
    asked = f"init\ncontext\nalloc {5 * GIB}\nalloc {3 * GIB}\ninfo\nalloc {2 * GIB}\nalloc {GIB}\n"
    shim = str(folder() / "libfenka.so")
    ran = run(lease, str(folder() / f"client{style}"), given=asked, preload=shim)
    assert ran.stderr == ""
    answers = [list(map(int, line.split())) for line in ran.stdout.splitlines()]
    assert [code for code, *_ in answers] == [0, 0, 2, 0, 0, 2, 0]
    assert answers[4][1:] == [GIB, 4 * GIB]
