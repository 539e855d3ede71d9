"""What `fenka doctor` says about cards' device nodes."""

import pytest

from fenka.cli.admin.doctor import closed_cards_check, device_nodes_check
from fenka.workstation.protocol import DeviceAccessRead


@pytest.mark.parametrize(
    ("read", "status", "words"),
    [
        (DeviceAccessRead(1, "", shim_only=False), "ok", "its control group of version 1"),
        (DeviceAccessRead(2, "", shim_only=False), "ok", "its control group of version 2"),
        (
            DeviceAccessRead(2, "", shim_only=True),
            "note",
            "with --shim-only one whose group cannot",
        ),
        (
            DeviceAccessRead(0, "no BPF", shim_only=True),
            "note",
            "as --shim-only allows: only the shim",
        ),
        (DeviceAccessRead(0, "no BPF", shim_only=False), "wrong", "no container is started"),
    ],
)
def test_device_nodes_are_wrong_only_where_no_container_starts(
    read: DeviceAccessRead, status: str, words: str
) -> None:
    """What keeps containers from other cards is named, and why nothing does."""
    check = device_nodes_check(read)
    assert (check.subject, check.status) == ("device nodes", status)
    assert words in check.detail
    assert read.problem in check.detail


@pytest.mark.parametrize(
    ("modify", "mode", "status"),
    [
        ("1", 0o666, "wrong"),
        ("1", 0o660, "wrong"),
        ("1", 0o600, "ok"),
        ("0", 0o666, "ok"),
        ("0", 0o600, "ok"),
    ],
)
def test_closed_cards_are_wrong_where_the_driver_opens_them(
    modify: str, mode: int, status: str
) -> None:
    """nvidia-modprobe follows these parameters, which the kernel prints in decimal numbers."""
    parameters = (
        f"ResmanDebugLevel: 4294967295\nModifyDeviceFiles: {modify}\nDeviceFileUID: 0\n"
        f'DeviceFileGID: 0\nDeviceFileMode: {mode}\nRegistryDwords: ""\n'
    )
    check = closed_cards_check(parameters)
    assert check.status == status
    assert ("NVreg_ModifyDeviceFiles=0" in check.detail) == (status == "wrong")


def test_closed_cards_are_well_without_a_real_driver() -> None:
    """Simulated ones have no parameters."""
    assert closed_cards_check("").status == "ok"
