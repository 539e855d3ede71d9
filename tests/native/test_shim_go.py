"""A Go program without cgo is bounded: purego opens the driver and calls it by itself."""

import subprocess
from pathlib import Path

import pytest

from tests.hardware.test_go_nvml import build
from tests.native.clients import GIB, Lease
from tests.native.test_shim_everywhere import contained

CLIENT = Path(__file__).parent.parent / "go-purego-client"
SIZES = (5 * GIB, 3 * GIB, 2 * GIB, GIB)
"""Of 4 GiB: too much, fits, no longer, to the last byte."""
BOUNDED = "0 0 2 0 2 0\n"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client, built without a C compiler."""
    return build(CLIENT, tmp_path_factory.mktemp("go") / "client", cgo=False)


def test_go_program_without_cgo_is_limited(program: Path, lease: Lease) -> None:
    """By LD_PRELOAD: it has no C in it, but the dynamic linker starts it."""
    ran = subprocess.run(
        [str(program), *map(str, SIZES)],
        env=lease.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert (ran.stdout, ran.stderr) == (BOUNDED, "")


def test_limit_holds_whatever_the_environment_says(program: Path, lease: Lease) -> None:
    """By the lease's files alone, in an environment that says nothing of them."""
    command = f"/mnt/program {' '.join(map(str, SIZES))}"
    inside = f"env -i FENKA_NULL_CARDS=$FENKA_NULL_CARDS LD_LIBRARY_PATH=/mnt {command}"
    assert contained(lease, program, inside, "-rm") == BOUNDED
