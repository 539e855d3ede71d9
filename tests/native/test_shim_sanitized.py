"""The shim's parts under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, and fuzzed."""

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.clients import CARDS, HERE, Lease, built, compile_c

SHIM_SOURCE = HERE.parent.parent / "native" / "shim"
# Without interposition: it exports a dlsym, and the sanitizers have their own.
LINKED = ("resolve", "interpose", "next_symbol")
PARTS = [str(p) for p in SHIM_SOURCE.glob("*.c") if p.stem not in LINKED and "nvml" not in p.stem]
# What shim_fuzz.c is linked with.
PAGE_PARTS = [
    str(p)
    for p in [
        *SHIM_SOURCE.glob("account*.c"),
        *map(SHIM_SOURCE.joinpath, ("os.c", "export_locks.c")),
    ]
]
INCLUDE = [f"-I{SHIM_SOURCE}", f"-I{SHIM_SOURCE.parent / 'include'}"]
SANITIZERS = {
    "address": ["-fsanitize=address", "-fno-omit-frame-pointer"],
    "undefined": ["-fsanitize=undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
ENVIRONMENT = {
    # What a process still holds at its end dies with it, by design.
    "ASAN_OPTIONS": "detect_leaks=0",
    "TSAN_OPTIONS": "halt_on_error=1",
    "FENKA_NULL_CARDS": ",".join(CARDS),
}


@functools.cache
def units(sanitizer: str) -> Path:
    """The parts and their tests, built with a sanitizer."""
    flags = [
        "-g",
        "-O1",
        "-std=gnu11",
        *INCLUDE,
        *SANITIZERS[sanitizer],
        *PARTS,
        "-ldl",
        "-pthread",
    ]
    return compile_c(HERE / "shim_units.c", built() / f"units-{sanitizer}", *flags)


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Without address space randomization, which ThreadSanitizer does not always survive."""
    assert shutil.which("setarch")
    return subprocess.run(
        ["setarch", "-R", str(program), *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("case", ["threads", "calls", "allocations", "owners"])
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_sanitizer_finds_nothing(lease: Lease, sanitizer: str, case: str) -> None:
    """Every check of the C tests holds, and the sanitizer has nothing to say."""
    ran = run(units(sanitizer), str(built() / "libcuda.so.1"), str(lease.folder), case)
    assert ran.stderr == ""
    assert ran.returncode == 0


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_sanitizer_finds_a_planted_fault(lease: Lease, sanitizer: str) -> None:
    """The sanitizer is really there: it ends a program that has a fault of its kind."""
    driver = str(built() / "libcuda.so.1")
    ran = run(units(sanitizer), driver, str(lease.folder), f"plant-{sanitizer}")
    assert ran.returncode != 0
    assert {"address": "heap-buffer-overflow", "undefined": "overflow", "thread": "data race"}[
        sanitizer
    ] in ran.stderr


@pytest.mark.parametrize("sanitizer", ["address,undefined"])
def test_shim_survives_random_pages(tmp_path: Path, sanitizer: str) -> None:
    """Twenty thousand pages and accounts, each made from the last by chance that repeats itself."""
    program = compile_c(
        HERE / "shim_fuzz.c",
        built() / "fuzz",
        *("-g", "-O1", "-std=gnu11", "-DSTANDALONE", *INCLUDE),
        *(f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"),
        *PAGE_PARTS,
    )
    ran = run(program, str(tmp_path), "20000")
    assert ran.stderr == ""
    assert ran.returncode == 0
