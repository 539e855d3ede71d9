"""The daemon's driver, when it is lost."""

from pathlib import Path

import pytest

from fenka.hardware import nvml_mig
from fenka.hardware.nvml import Driver, DriverLost
from fenka.hardware.simulated_node import NATIVE
from fenka.workstation.files import DaemonConfig
from fenka.workstation.main import _hardware
from fenka.workstation.paths import Runtime


def test_instances_stay_when_the_driver_is_lost_but_the_card_server_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the connection is made again: other programs use the server, too."""
    runtime = Runtime(tmp_path)
    runtime.leases.mkdir()
    with _hardware(runtime, DaemonConfig("A100-40G"), NATIVE.parent) as hardware:
        (card,) = hardware.driver.cards()
        nvml_mig.set_mig_mode(card.uuid, enabled=True)
        geometry = hardware.driver.geometry(card.uuid)
        assert geometry
        nvml_mig.create_gpu_instance(card.uuid, geometry.by_name["2g.10gb"], 0)

        def lost(_: Driver) -> None:
            monkeypatch.undo()
            raise DriverLost

        monkeypatch.setattr(Driver, "readings", lost)
        assert card.uuid in hardware.readings()
        assert len(nvml_mig.instances(card.uuid, geometry)) == 1
