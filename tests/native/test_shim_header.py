"""No function of the installed CUDA headers that takes or maps device memory is unknown to the shim.

Every function that cuda.h declares is replaced, or is on a list here that says why it need not be. A newer
header with a function that is on neither fails, and so does a newer version of one that is replaced.
"""

import subprocess
from pathlib import Path

import pytest

from tests.native.driver_functions import ALLOWED, declared, declared_beside, stem, unknown
from tests.native.test_shim_rows import HOOKS


@pytest.fixture(scope="module")
def names() -> set[str]:
    """What the installed headers declare, and what the shim adds to them."""
    header = Path(__file__).parents[2] / "native" / "shim" / "newer_driver.h"
    return declared(f'#include "{header}"\n') | declared_beside()


def test_every_function_of_the_header_is_classified(names: set[str]) -> None:
    """All 700 of them; what is replaced is really declared, so that no hook is misspelt."""
    assert len(names) > 700
    assert not unknown(names)
    assert not set(HOOKS) - names


def test_every_exception_exists_in_the_header(names: set[str]) -> None:
    """The list does not outlive the header, and excuses nothing that is replaced."""
    stems = {stem(name) for name in names}
    assert not set(ALLOWED) - stems
    assert not set(ALLOWED) & {stem(name) for name in HOOKS}


@pytest.mark.parametrize(
    "new",
    [
        "cuMemAllocCompressed",
        "cuMemCreate_v2",
        "cuMemAllocAsync_v2_ptsz",
        "cuArray4DCreate",
        "cuMemPoolReserve",
        "cuHeapGrow",
        "cuMemcpyAndAllocAsync_ptds",
        "cuFrobnicate",
        "cuLaunchKernel_v2",
        "cuGraphLaunch_v2_ptsz",
        "cuStreamSetLaunch",
    ],
)
def test_check_fails_when_the_header_has_a_new_function(new: str) -> None:
    """One that a later header adds is not let pass because its name resembles a harmless one."""
    text = f"typedef int CUresult;\nCUresult {new}(void *out, unsigned long bytes);\n"
    assert declared(text) == {new}
    assert unknown({new}) == {new}


def test_shim_exports_what_the_table_lists() -> None:
    """Every row is a symbol of the library that is preloaded."""
    shim = Path(__file__).parent.parent.parent / "src" / "fenka" / "_native" / "libfenka.so"
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(shim)], capture_output=True, text=True, check=True
    ).stdout
    exported = {line.split()[2] for line in listed.splitlines()}
    assert set(HOOKS) <= exported
