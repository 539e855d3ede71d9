"""Extended resources that the node advertises."""

from fenka.dialects import ack, base, gpu_manager, gpushare
from fenka.dialects.registry import WITH_HAMI

ENDPOINTS = {
    gpushare.MEMORY: "fenka-gpu-mem",
    base.NVIDIA_GPU: "fenka-gpu-whole",
    ack.CORE: "fenka-gpu-core",
    gpu_manager.CORE: "fenka-vcuda-core",
    gpu_manager.MEMORY: "fenka-vcuda-memory",
}
"""Prefix of the device plugin's socket, by resource."""

LEASED = frozenset(dialect.LEASED for dialect in WITH_HAMI)
"""Resources whose allocation brings a lease. The others are only counted, and accompany one of these."""
