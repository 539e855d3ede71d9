"""Programs that load other libraries before those of /etc/ld.so.preload."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from fenka.hardware.driver_places import _LINKER_KIND, libraries
from fenka.isolation.proxy_install import LIBRARIES
from tests.hardware.trees import ELF
from tests.native.clients import compile_c
from tests.workstation.conftest import HOLD, Workstation

CAP, OUT_OF_MEMORY = 4308, 2

LINKED = r"""
#include <cuda.h>
#include <stdio.h>
int main(void) {
    CUdevice device;
    CUcontext context;
    CUdeviceptr pointer;
    size_t free, total;
    cuInit(0);
    cuDeviceGet(&device, 0);
    cuDevicePrimaryCtxRetain(&context, device);
    cuCtxSetCurrent(context);
    CUresult result = cuMemAlloc(&pointer, (size_t)9000 << 20);
    cuMemGetInfo(&free, &total);
    printf("{\"cards\": [{\"result\": %d, \"free\": %zu, ", result, free >> 20);
    printf("\"total\": %zu}]}\n", total >> 20);
}
"""


@pytest.fixture(scope="session")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that is linked against libcuda.so.1 and allocates 9,000 MiB."""
    folder = tmp_path_factory.mktemp("linked")
    folder.chmod(0o755)
    (folder / "linked.c").write_text(LINKED)
    (folder / "stub.c").write_text(
        "#define __CUDA_API_VERSION_INTERNAL\n#include <cuda.h>\n"
        + "".join(
            f"CUresult {name}({arguments}) {{ return 0; }}\n"
            for name, arguments in (
                ("cuInit", "unsigned int f"),
                ("cuDeviceGet", "CUdevice *d, int n"),
                ("cuDevicePrimaryCtxRetain", "CUcontext *c, CUdevice d"),
                ("cuCtxSetCurrent", "CUcontext c"),
                ("cuMemAlloc_v2", "CUdeviceptr *p, size_t n"),
                ("cuMemGetInfo_v2", "size_t *f, size_t *t"),
            )
        )
    )
    library = folder / "libcuda.so.1"
    compile_c(folder / "stub.c", library, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    return compile_c(folder / "linked.c", folder / "linked", str(library))


def limited(report: dict[str, list[dict[str, int]]]) -> None:
    """Assert that the program could not exceed its slice."""
    assert report == {"cards": [{"result": OUT_OF_MEMORY, "free": CAP, "total": CAP}]}


@pytest.mark.parametrize(
    "first", ["libc.so.6", "libdl.so.2", "libcuda.so.1", "libcuda.so.1:libc.so.6"]
)
def test_limit_holds_when_another_library_is_preloaded_first(
    t4: Workstation, linked: Path, first: str
) -> None:
    """LD_PRELOAD precedes /etc/ld.so.preload; the proxies with the driver's names call the shim then."""
    words = ("--gpu-mem", "4", "--", "env", f"LD_PRELOAD={first}")
    limited(t4.run(*words, *HOLD, "9000").report())
    limited(json.loads(t4.ok("run", *words, str(linked))))


def test_limit_holds_when_the_driver_is_loaded_by_its_path(t4: Workstation) -> None:
    """Inside, the proxies replace the driver's files at their paths."""
    for file in {(t4.root / "simulated" / "lib" / LIBRARIES[0]).resolve()}:
        words = ("--gpu-mem", "4", "--", "env", "-i", f"LD_PRELOAD=libc.so.6:{file}")
        limited(t4.run(*words, *HOLD, "9000").report())


def test_proxies_are_read_only_and_only_inside(t4: Workstation) -> None:
    """The machine's files stay as they are; only inside the lease the paths lead to the proxies."""
    file = (t4.root / "simulated" / "lib" / LIBRARIES[0]).resolve()
    before = file.stat()
    inside = int(t4.ok("run", "--gpu-mem", "1", "--", "stat", "-c", "%i", str(file)))
    assert inside != before.st_ino
    assert (file.stat().st_ino, file.stat().st_size) == (before.st_ino, before.st_size)
    printed = t4.ok(
        "run", "--gpu-mem", "1", "--", "sh", "-c", "touch /run/fenka/driver/x || echo no"
    )
    assert printed == "no\n"


def test_driver_is_found_when_its_path_is_a_link(tmp_path: Path) -> None:
    """A library with several names is one file to replace."""
    real = tmp_path / "libcuda.so.550.1"
    real.write_bytes(ELF)
    (tmp_path / LIBRARIES[0]).symlink_to(real.name)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / LIBRARIES[0]).symlink_to(real)
    driver = libraries([tmp_path, tmp_path / "again", tmp_path / "nowhere"])
    assert driver[LIBRARIES[0]][-1:] == (real,)
    assert len(driver[LIBRARIES[0]]) == len(set(driver[LIBRARIES[0]]))


def test_driver_is_found_in_the_linker_s_cache() -> None:
    """libc is found in the cache by the same entry format."""
    cache = subprocess.run(
        ["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True
    ).stdout
    assert any("libc.so.6" in line and _LINKER_KIND in line for line in cache.splitlines())
    assert _LINKER_KIND or os.uname().machine not in ("x86_64", "aarch64")
