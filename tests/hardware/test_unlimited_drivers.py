"""The driver's parts for OpenCL, Vulkan, EGL and OpenGL among the files of a machine."""

import os
from pathlib import Path

import pytest

from fenka.hardware import unlimited_drivers


@pytest.mark.parametrize(
    ("name", "unlimited"),
    [
        ("libnvidia-opencl.so.550.54.14", True),
        ("libnvidia-opencl.so.1", True),
        ("libGLX_nvidia.so.0", True),
        ("libEGL_nvidia.so.550.54.14", True),
        ("libGLESv2_nvidia.so.2", True),
        ("libnvidia-glcore.so.550.54.14", True),
        ("libnvidia-eglcore.so.550.54.14", True),
        ("libcuda.so.1", False),
        ("libnvidia-ml.so.1", False),
        ("libnvidia-ptxjitcompiler.so.1", False),
        ("libnvoptix.so.1", False),
        ("libGLX_mesa.so.0", False),
        ("libOpenCL.so.1", False),
        ("libnvidia-opencl.so.1.bak", False),
    ],
)
def test_libraries_are_told_apart_by_their_names(name: str, unlimited: bool) -> None:
    """CUDA's own, other vendors' and the loaders are left."""
    assert unlimited_drivers.is_unlimited(name) is unlimited


def test_files_are_found_where_distributions_put_them(tmp_path: Path) -> None:
    """Each library once, with links resolved, 32 bits too; of vendor files NVIDIA's alone."""
    beside = tmp_path / "opt"
    libraries = {
        "usr/lib/i386-linux-gnu/libnvidia-glcore.so.550.54.14",
        "usr/lib64/libnvidia-opencl.so.550.54.14",
        "opt/libEGL_nvidia.so.550.54.14",
    }
    vendors = {
        "etc/OpenCL/vendors/nvidia.icd",
        "usr/share/vulkan/icd.d/nvidia_icd.x86_64.json",
        "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
    }
    others = {
        "etc/OpenCL/vendors/pocl.icd",
        "usr/share/glvnd/egl_vendor.d/50_mesa.json",
        "usr/lib64/libGLX_mesa.so.0",
    }
    for name in libraries | vendors | others:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "usr/lib64/libnvidia-opencl.so.1").symlink_to("libnvidia-opencl.so.550.54.14")
    (tmp_path / "usr/lib64/libGLX_nvidia.so.0").symlink_to("nowhere")
    found = unlimited_drivers.libraries([beside], tmp_path)
    assert sorted(found) == sorted(tmp_path / name for name in libraries)
    assert unlimited_drivers.libraries([beside], None) == [
        tmp_path / "opt/libEGL_nvidia.so.550.54.14"
    ]
    beside.joinpath("libGLX_nvidia.so.550.54.14").touch()
    os.utime(beside, ns=(1, 1))
    assert len(unlimited_drivers.libraries([beside], None)) == 2
    assert {*unlimited_drivers.vendor_files(tmp_path)} == {tmp_path / name for name in vendors}
