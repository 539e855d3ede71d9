"""What `fenka doctor` says about containers' device nodes."""

import pytest

from fenka.cli.admin.doctor import device_nodes_check
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
