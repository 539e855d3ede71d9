"""A machine with one divided card."""

from pathlib import Path

from fenka.core.mig.geometry import Geometry, Place
from fenka.hardware import nvml_mig
from fenka.hardware.nvml import Driver
from fenka.hardware.simulated_node import SimulatedNode
from fenka.mig.keeper import InstanceKeeper


class Killed(BaseException):
    """The program ends here."""


class Machine:
    """One divided card, fenka's records of it, and an administrator."""

    def __init__(self, node: SimulatedNode, driver: Driver, path: Path) -> None:
        self.node, self.driver, self.path = node, driver, path
        self.card = driver.cards()[0].uuid
        geometry = driver.geometry(self.card)
        assert geometry
        self.geometry: Geometry = geometry
        nvml_mig.set_mig_mode(self.card, enabled=True)

    def keeper(self) -> InstanceKeeper:
        """Start the program that keeps instances."""
        return InstanceKeeper(self.path, "boot", {self.card: self.geometry})

    def place(self, profile: str, start: int) -> Place:
        """Return a place of the card."""
        return Place(self.geometry.by_name[profile], start)

    def layout(self) -> list[tuple[str, int, int]]:
        """Return profile, start and the number of compute instances of all instances."""
        listed = nvml_mig.instances(self.card, self.geometry)
        return sorted((each.profile.name, each.start, len(each.compute)) for each in listed)

    def administrator(self, profile: str, start: int, *, compute: bool = True) -> int:
        """Create an instance as nvidia-smi does."""
        place = self.place(profile, start)
        gpu = nvml_mig.create_gpu_instance(self.card, place.profile, start)
        if compute:
            nvml_mig.create_compute_instance(self.card, gpu)
        return gpu
