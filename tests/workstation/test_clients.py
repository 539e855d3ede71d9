"""Unchanged programs that people use, inside a lease and beside one."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.workstation.conftest import HOLD, PROGRAMS, Workstation

BIN = Path(sys.executable).parent


def test_numba_is_limited_when_it_runs_in_a_lease(t4: Workstation) -> None:
    """NVVM and the linker are NVIDIA's own; the driver is simulated. The limit holds."""
    result = t4.fenka(
        "run", "--gpu-mem", "4", "--", sys.executable, str(PROGRAMS / "numba_client.py")
    )
    # 0 + 1 + … + 1023 = 1023 * 1024 / 2
    assert json.loads(result.stdout) == {"back": 523776.0, "total": 4308, "refused": True}, (
        result.stderr
    )


def test_nvitop_shows_the_slice_when_it_runs_in_a_lease(t4: Workstation) -> None:
    """nvitop shows 4308 MiB in the notebook, and on the host 15079 MiB and the processes."""
    program = t4.run("--gpu-mem", "4", "--", *HOLD, "1000")
    program.report()
    inside = t4.ok("run", "--gpu-mem", "4", "--", str(BIN / "nvitop"), "--once", "--ascii")
    assert "0B / 4308MiB" in inside
    assert str(program.pid) not in inside
    outside = subprocess.run(
        [BIN / "nvitop", "--once", "--ascii"],
        env=os.environ | {"LD_LIBRARY_PATH": str(t4.root / "simulated" / "lib")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "1000MiB / 15079MiB" in outside
    assert str(program.pid) in outside


def test_gpustat_shows_the_slice_when_it_runs_in_a_lease(t4: Workstation) -> None:
    """Used and total memory are those of the slice."""
    seen = json.loads(t4.ok("run", "--gpu-mem", "4", "--", str(BIN / "gpustat"), "--json"))
    (card,) = seen["gpus"]
    assert (card["memory.total"], card["memory.used"]) == (4308, 0)
