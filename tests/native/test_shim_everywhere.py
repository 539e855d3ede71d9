"""The limit where the environment does not reach, and beside others who look up symbols."""

import ctypes.util
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.clients import CARDS, GIB, SHIM, Lease, built, client, compile_c

PROGRAM = f"""
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>
int cuInit(unsigned); int cuCtxCreate_v2(void **, unsigned, int); int cuMemAlloc_v2(void **, unsigned long);
int main(void) {{
    void *c = malloc(1000), *p;
    free(c);
    int entered = cuInit(0) || cuCtxCreate_v2(&c, 0, 0);
    printf("%d %d %d %d\\n", (int)getauxval(AT_SECURE), entered, cuMemAlloc_v2(&p, {5 * GIB}ul),
           cuMemAlloc_v2(&p, {GIB}ul));
}}
"""
BOUNDED = "0 0 2 0\n"
BOUNDED_SECURELY = "1 0 2 0\n"

# A container in small: the shim in /etc/ld.so.preload, the lease in /run/fenka, all within one mount
# namespace that ends with the program.
CONTAINER = """
set -e
mount -t tmpfs none /mnt
cp {shim} /mnt/libfenka.so; cp {driver} /mnt/libcuda.so.1; cp {program} /mnt/program
chmod 4755 /mnt/program
mkdir /mnt/etc; cp -a /etc/. /mnt/etc 2>/dev/null || true
echo /mnt/libfenka.so > /mnt/etc/ld.so.preload; mount --bind /mnt/etc /etc
mount -t tmpfs none /run; mkdir /run/fenka; mount --bind {lease} /run/fenka
exec {command}
"""


def built_program(folder: Path, *flags: str, found_in: str = "") -> Path:
    """The program above; it finds its driver without the environment."""
    source = folder / "program.c"
    source.write_text(PROGRAM)
    library = str(built() / "libcuda.so.1")
    return compile_c(
        source, folder / "program", *flags, library, f"-Wl,-rpath,{found_in or built()}"
    )


def contained(lease: Lease, program: Path, command: str, *unshare: str) -> str:
    """What the command prints where only the container knows of the lease."""
    allowed = ["unshare", *unshare]
    if subprocess.run([*allowed, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no private mount namespace")
    quoted = {
        "shim": SHIM,
        "driver": built() / "libcuda.so.1",
        "program": program,
        "lease": lease.folder,
    }
    script = CONTAINER.format(
        command=command, **{name: shlex.quote(str(path)) for name, path in quoted.items()}
    )
    ran = subprocess.run(
        [*allowed, "sh", "-c", script],
        env={"PATH": os.environ["PATH"], "FENKA_NULL_CARDS": CARDS[0]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr == ""
    return ran.stdout


@pytest.mark.parametrize(
    "command",
    [
        "/mnt/program",
        f"env -i FENKA_NULL_CARDS={CARDS[0]} /mnt/program",
        f"env -i sh -l -c 'FENKA_NULL_CARDS={CARDS[0]} /mnt/program'",
        f"env -i LD_PRELOAD= FENKA_LEASE=/nowhere FENKA_NULL_CARDS={CARDS[0]} /mnt/program",
    ],
    ids=["plainly", "without an environment", "in a login shell", "with a misleading environment"],
)
def test_limit_holds_whatever_the_environment_says(
    tmp_path: Path, lease: Lease, command: str
) -> None:
    """In a container the lease is found, and the shim loaded, by files alone."""
    program = built_program(tmp_path, found_in="/mnt")
    assert contained(lease, program, command, "-rm") == BOUNDED


def test_setuid_program_is_limited(tmp_path: Path, lease: Lease) -> None:
    """The dynamic linker drops LD_PRELOAD for it, but not the file; run by another user."""
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("only root can become another user")
    program = built_program(tmp_path, found_in="/mnt")
    become = "setpriv --reuid=65534 --regid=65534 --clear-groups /mnt/program"
    assert contained(lease, program, become, "-m") == BOUNDED_SECURELY


def run(lease: Lease, program: Path, **environment: str) -> str:
    """What it prints, under LD_PRELOAD."""
    ran = subprocess.run(
        [str(program)],
        env=lease.environment(**environment),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr == ""
    return ran.stdout


@pytest.mark.parametrize("first", ["shim", "jemalloc"])
def test_jemalloc_works_with_the_shim(tmp_path: Path, lease: Lease, first: str) -> None:
    """It looks up what it hides by RTLD_NEXT, before any constructor has run."""
    jemalloc = ctypes.util.find_library("jemalloc")
    if not jemalloc:
        pytest.skip("jemalloc is not installed (Debian: libjemalloc2)")
    order = [str(SHIM), jemalloc] if first == "shim" else [jemalloc, str(SHIM)]
    assert run(lease, built_program(tmp_path), LD_PRELOAD=":".join(order)) == BOUNDED


EARLY = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
static void *(*next)(size_t);
static char first[4096];
static size_t used;
static int within;
/* As preloaded allocators do: the first malloc asks for the one behind it, which may itself allocate. */
void *malloc(size_t n) {
    if (!next && !within) {
        within = 1;
        next = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
    }
    if (next)
        return next(n);
    return &first[(used += (n + 15) & ~15ul) - n];
}
"""


@pytest.mark.parametrize("shim_first", [True, False])
def test_allocator_that_uses_rtld_next_works_with_the_shim(
    tmp_path: Path, lease: Lease, shim_first: bool
) -> None:
    """The same in small, so that it is seen on every machine: RTLD_NEXT is the allocator's own."""
    source = tmp_path / "early.c"
    source.write_text(EARLY)
    early = str(compile_c(source, tmp_path / "early.so", "-shared", "-fPIC"))
    order = [str(SHIM), early] if shim_first else [early, str(SHIM)]
    assert run(lease, built_program(tmp_path), LD_PRELOAD=":".join(order)) == BOUNDED


@pytest.mark.parametrize("sanitizer", ["address", "undefined", "thread"])
def test_sanitized_program_works_with_the_shim(
    tmp_path: Path, lease: Lease, sanitizer: str
) -> None:
    """A program with a sanitizer of its own starts, is bounded, and has nothing reported."""
    runtime = {
        "address": "-static-libasan",
        "undefined": "-static-libubsan",
        "thread": "-static-libtsan",
    }
    program = built_program(tmp_path, f"-fsanitize={sanitizer}", runtime[sanitizer])
    wrapper = tmp_path / "wrapper"
    # ThreadSanitizer does not always survive randomized addresses.
    wrapper.write_text(f"#!/bin/sh\nexec setarch -R {program}\n")
    wrapper.chmod(0o755)
    assert run(lease, wrapper, ASAN_OPTIONS="detect_leaks=0") == BOUNDED


def test_shared_sanitizer_works_with_the_shim(tmp_path: Path, lease: Lease) -> None:
    """The same with the sanitizer's own library, which expects to be first and is not."""
    program = built_program(tmp_path, "-fsanitize=address")
    options = "detect_leaks=0:verify_asan_link_order=0"
    assert run(lease, program, ASAN_OPTIONS=options) == BOUNDED


GO = f"""package main

/*
int cuInit(unsigned);
int cuCtxCreate_v2(void **, unsigned, int);
int cuMemAlloc_v2(void **, unsigned long);
*/
import "C"
import ("fmt"; "unsafe"; "runtime")

func main() {{
	var c, p unsafe.Pointer
	runtime.LockOSThread()
	entered := C.cuInit(0) | C.cuCtxCreate_v2(&c, 0, 0)
	fmt.Println(0, entered, C.cuMemAlloc_v2(&p, {5 * GIB}), C.cuMemAlloc_v2(&p, {GIB}))
}}
"""


def test_go_program_is_limited(tmp_path: Path, lease: Lease) -> None:
    """One that calls the driver by cgo."""
    if not shutil.which("go"):
        pytest.skip("go is not installed")
    (tmp_path / "main.go").write_text(GO)
    program = tmp_path / "program"
    subprocess.run(
        ["go", "build", "-o", str(program), "main.go"],
        cwd=tmp_path,
        env={
            **os.environ,
            "CGO_ENABLED": "1",
            "GO111MODULE": "off",
            "GOFLAGS": "",
            "CGO_LDFLAGS": f"{built() / 'libcuda.so.1'} -Wl,-rpath,{built()}",
        },
        check=True,
        capture_output=True,
    )
    assert run(lease, program) == BOUNDED


def test_program_is_limited_when_no_shell_starts_it(lease: Lease) -> None:
    """Started by exec from a program that never used the GPU."""
    script = f"import os; os.execv({str(client(0))!r}, ['client'])"
    ran = subprocess.run(
        ["python3", "-c", script],
        env=lease.environment(),
        input=f"init\ncontext 0\nalloc {5 * GIB}\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.split()[0] for line in ran.stdout.splitlines()] == ["0", "0", "2"]
