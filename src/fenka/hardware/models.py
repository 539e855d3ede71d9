"""The models of simulated cards, with the figures that NVML reports of real ones."""

from dataclasses import dataclass

__all__ = ["MODELS", "Model"]


@dataclass(frozen=True, slots=True)
class Model:
    """Properties that all cards of a model share."""

    key: str
    """The name in specifications."""
    name: str
    """The name that NVML reports."""
    memory_mib: int
    """As the driver reports it, which is less than in the data sheet."""
    sm_count: int
    compute_capability: tuple[int, int]
    power_limit_w: int
    idle_power_w: int
    sm_clock_mhz: int
    """Maximum, as the next one."""
    memory_clock_mhz: int
    fan_percent: int = 0
    """At idle; 0 if the chassis cools it, and NVML reports "not supported"."""
    ecc: bool = True
    """Whether its memory counts bit errors; if not, NVML reports "not supported"."""


_TABLE = (
    Model("P4", "Tesla P4", 7611, 20, (6, 1), 75, 7, 1531, 3003),
    Model("P100-16G", "Tesla P100-PCIE-16GB", 16280, 56, (6, 0), 250, 27, 1328, 715),
    Model("V100-16G", "Tesla V100-SXM2-16GB", 16130, 80, (7, 0), 300, 40, 1530, 877),
    Model("V100-32G", "Tesla V100-SXM2-32GB", 32510, 80, (7, 0), 300, 42, 1530, 877),
    Model("T4", "Tesla T4", 15079, 40, (7, 5), 70, 10, 1590, 5001),
    Model("A10", "NVIDIA A10", 22731, 72, (8, 6), 150, 16, 1695, 6251),
    Model("A30", "NVIDIA A30", 24258, 56, (8, 0), 165, 27, 1440, 1215),
    Model("A100-40G", "NVIDIA A100-SXM4-40GB", 40536, 108, (8, 0), 400, 52, 1410, 1215),
    Model("A100-80G", "NVIDIA A100-SXM4-80GB", 81251, 108, (8, 0), 400, 60, 1410, 1593),
    Model("L4", "NVIDIA L4", 23034, 58, (8, 9), 72, 12, 2040, 6251),
    Model("H100-80G", "NVIDIA H100 80GB HBM3", 81559, 132, (9, 0), 700, 70, 1980, 2619),
    Model("H200", "NVIDIA H200", 143771, 132, (9, 0), 700, 75, 1980, 3201),
    Model(
        "RTX4090", "NVIDIA GeForce RTX 4090", 24564, 128, (8, 9), 450, 20, 3105, 10501, 30, False
    ),
)

MODELS = {model.key: model for model in _TABLE}
