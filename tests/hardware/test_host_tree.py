"""The files of a simulated node that NVIDIA's programs read beside NVML."""

import os
import stat
from pathlib import Path

import pynvml
import pytest

from fenka.hardware import host_tree, nvml_mig
from fenka.hardware.card_spec import parse_spec
from fenka.hardware.nvml import Driver
from fenka.hardware.nvml_mig import NoCapability, administration_files, device_files
from fenka.hardware.simulated_node import SimulatedNode


def test_minors_follow_the_drivers_formula() -> None:
    """3 + 135 N + 9 G for a GPU instance, and from 1 on behind it for its compute instances."""
    minors = dict(host_tree.minors())
    assert (minors["config"], minors["monitor"]) == (1, 2)
    assert minors["gpu0/gi0/access"] == 3
    assert minors["gpu1/gi13/access"] == 3 + 135 + 9 * 13
    assert minors["gpu31/gi14/ci7/access"] == 4322
    assert len(minors) == 2 + 32 * 15 * 9


def test_tree_has_the_capabilities_of_the_instances_that_exist(tmp_path: Path) -> None:
    """They come and go with the instances; a restart of the node ends them."""
    cards = parse_spec("T4,A100-40G")
    tree = tmp_path / "tree"
    host_tree.write(tree, tmp_path / "node", cards)
    node = SimulatedNode.create(tmp_path / "node", cards)
    node.start()
    capabilities = tree / "proc/driver/nvidia/capabilities/gpu1/mig"
    minor = 3 + 135 + 9 * 13
    try:
        with Driver.open(node.library_dir):
            card = pynvml.nvmlDeviceGetHandleByIndex(1)
            pynvml.nvmlDeviceSetMigMode(card, 1)
            gpu = pynvml.nvmlDeviceCreateGpuInstance(card, 19)
            compute = pynvml.nvmlGpuInstanceCreateComputeInstance(gpu, 0)
            text = (capabilities / "gi13/ci0/access").read_text()
            assert text.startswith(f"DeviceFileMinor: {minor + 1}\nDeviceFileMode: 292\n")
            assert (tree / f"dev/nvidia-caps/nvidia-cap{minor}").exists()
            pynvml.nvmlComputeInstanceDestroy(compute)
            assert [path.name for path in (capabilities / "gi13").iterdir()] == ["access"]
            pynvml.nvmlGpuInstanceDestroy(gpu)
            assert list(capabilities.iterdir()) == []
            pynvml.nvmlDeviceCreateGpuInstance(card, 9)
            assert [path.name for path in capabilities.iterdir()] == ["gi2"]
        node.stop()
        node.start()
        assert list(capabilities.iterdir()) == []
    finally:
        node.stop()
    names = sorted(path.name for path in (tree / "dev/nvidia-caps").iterdir())
    assert names == ["nvidia-cap1", "nvidia-cap2"]
    assert (tree / "sys/bus/pci/devices/0000:02:00.0/device").read_text() == "0x20b0\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device files")
def test_device_files_of_an_instance_are_those_that_the_driver_states(tmp_path: Path) -> None:
    """One that does not exist has none."""
    node, tree = tmp_path / "node", tmp_path / "tree"
    cards = parse_spec("A100-40G*2")
    host_tree.write(tree, node, cards)
    simulated = SimulatedNode.create(node, cards)
    simulated.start()
    with Driver.open(simulated.library_dir) as driver:
        card = driver.cards()[1].uuid
        geometry = driver.geometry(card)
        assert geometry
        nvml_mig.set_mig_mode(card, enabled=True)
        gpu = nvml_mig.create_gpu_instance(card, geometry.by_name["3g.20gb"], 4)
        compute = nvml_mig.create_compute_instance(card, gpu).id
        minor = 3 + 135 * 1 + 9 * gpu
        assert device_files(driver.minor(card), gpu, [compute], tree) == [
            tree / f"dev/nvidia-caps/nvidia-cap{number}" for number in (minor, minor + 1 + compute)
        ]
        # Without nvidia-modprobe, as in the container of a node program, they are made here.
        (missing,) = device_files(driver.minor(card), gpu, [], tree)
        missing.unlink()
        assert device_files(driver.minor(card), gpu, [], tree) == [missing]
        made = missing.stat()
        assert (os.major(made.st_rdev), os.minor(made.st_rdev)) == (195, minor)
        assert oct(made.st_mode) == oct(stat.S_IFCHR | 0o444)
        with pytest.raises(NoCapability, match="gi5/access does not say which device file"):
            device_files(1, 5, [], tree)
    simulated.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device files")
def test_files_for_dividing_cards_are_made_when_the_driver_has_them(tmp_path: Path) -> None:
    """Minors 1 and 2; a driver whose cards have no MIG states none."""
    tree = tmp_path / "tree"
    host_tree.write(tree, tmp_path / "node", parse_spec("A100-40G"))
    for name in ("nvidia-cap1", "nvidia-cap2"):
        (tree / "dev/nvidia-caps" / name).unlink()
    (tree / "dev/nvidia-caps").rmdir()
    files = administration_files(tree)
    assert [os.minor(file.stat().st_rdev) for file in files] == [1, 2]
    (tree / "proc/devices").write_text("Character devices:\n  1 mem\n")
    files[0].unlink()
    with pytest.raises(NoCapability, match="has no nvidia-caps"):
        administration_files(tree)
    with pytest.raises(NoCapability, match="does not say which device file"):
        administration_files(tmp_path)
