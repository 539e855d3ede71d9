"""Parts of the driver that the shim cannot limit, in leases of slices and of whole cards."""

import json
from pathlib import Path

import pytest

from tests.native.clients import compile_c
from tests.workstation.conftest import Workstation

NAME = "libnvidia-opencl.so.1"

LOAD = f"""
import ctypes, json, os
try:
    loaded = ctypes.CDLL({NAME!r}).clGetPlatformIDs(0, None, None)
except OSError:
    loaded = None
print(json.dumps([loaded, os.environ["CUDA_VISIBLE_DEVICES"][:4]]))
"""


@pytest.fixture
def opencl(station: Workstation, tmp_path: Path) -> Workstation:
    """A workstation whose driver has a library that needs no libcuda."""
    station.start("--simulate", "T4")
    source = tmp_path / "opencl.c"
    source.write_text("int clGetPlatformIDs(unsigned n, void *p, unsigned *m) { return 7; }")
    directory = station.root / "simulated" / "lib"
    compile_c(source, directory / "libnvidia-opencl.so.550.54.14", "-shared", "-fPIC")
    (directory / NAME).symlink_to("libnvidia-opencl.so.550.54.14")
    return station


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (("--gpu-mem", "4"), [None, "0"]),
        (("--gpu-mem", "4", "--allow-unlimited-drivers"), [7, "GPU-"]),
        (("--gpu-mem", "4", "--isolation", "cooperative"), [7, "GPU-"]),
        (("--gpus", "1"), [7, "0"]),
    ],
    ids=["slice", "allowed", "cooperative", "whole card"],
)
def test_slice_has_no_driver_that_is_not_limited(
    opencl: Workstation, words: tuple[str, ...], seen: list[object]
) -> None:
    """It is refused by its name and by its path; a whole card, and who is allowed, load it."""
    path = opencl.root / "simulated" / "lib" / "libnvidia-opencl.so.550.54.14"
    for program in (LOAD, LOAD.replace(repr(NAME), repr(str(path)))):
        ran = opencl.ok("run", *words, "--", opencl.interpreter, "-c", program)
        assert json.loads(ran) == seen
    assert path.stat().st_size > 0


def test_doctor_names_who_may_use_them(t4: Workstation) -> None:
    """Their memory counts for nobody's slice."""
    held = t4.run(
        *("--gpu-mem", "4", "--name", "loose", "--allow-unlimited-drivers", "--", "sleep", "600")
    )
    t4.ok("run", "--gpu-mem", "1", "--", "true")
    rows = json.loads(t4.fenka("doctor", "-o", "json").stdout)
    (leases,) = (row for row in rows if row["subject"] == "leases")
    assert leases["detail"].endswith("these programs could undo their limits: loose")
    held.process.kill()
