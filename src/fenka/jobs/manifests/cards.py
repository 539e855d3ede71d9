"""Writes a request for cards in the names that pods use.

Slices have ACK's names, slices that may use idle time have gpu-manager's, and whole cards have NVIDIA's.
"""

from dataclasses import dataclass, field

from fenka.core.request import InvalidRequest, Memory
from fenka.dialects import ack, gpu_manager, gpushare
from fenka.dialects.base import NVIDIA_GPU
from fenka.dialects.sizes import parse_memory
from fenka.jobs.spec import GpuResources

_GIB_MIB = 1024


@dataclass(frozen=True, slots=True)
class CardRequest:
    """What a pod says of its cards.

    Attributes:
        limits: Extended resources of its container.
        labels: Labels of the pod.
        annotations: Annotations of the pod.
    """

    limits: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)


def card_request(gpu: GpuResources | None) -> CardRequest:
    """Return what a pod that gets these cards says. Raises InvalidRequest, InvalidSize."""
    if gpu is None:
        return CardRequest()
    if gpu.whole:
        return CardRequest({NVIDIA_GPU: str(gpu.cards)})
    if gpu.core_mode == "weight":
        raise InvalidRequest(
            "--gpu-core-mode weight is not supported on Kubernetes: use hard or soft"
        )
    if gpu.core and gpu.cards > 1:
        raise InvalidRequest(
            f"--gpu-core on Kubernetes is a share of one card, not of {gpu.cards}: leave out --gpu-core or "
            "--cards"
        )
    return _soft_slice(gpu) if gpu.core_mode == "soft" else _slices(gpu)


def _slices(gpu: GpuResources) -> CardRequest:
    """Request slices by ACK's names: the pod's units are shared out over its cards."""
    memory = parse_memory(gpu.memory, _GIB_MIB)
    if memory.unit_mib != _GIB_MIB:
        raise InvalidRequest(
            f"--gpu-mem {gpu.memory} is an exact size, and pods request units of a card: write "
            f"--gpu-mem {_units(memory)}"
        )
    limits = {gpushare.MEMORY: str(memory.amount * gpu.cards)}
    if gpu.core % ack.STEP or gpu.core > ack.MOST:
        raise InvalidRequest(
            f"--gpu-core must be from {ack.STEP} to {ack.MOST} in steps of {ack.STEP} on Kubernetes, got "
            f"{gpu.core}"
        )
    if gpu.core:
        limits[ack.CORE] = str(gpu.core)
    return CardRequest(limits, {gpushare.COUNT: str(gpu.cards)} if gpu.cards > 1 else {})


def _soft_slice(gpu: GpuResources) -> CardRequest:
    """Request a slice by gpu-manager's names, with the whole card as the ceiling of its compute."""
    if gpu.cards > 1:
        raise InvalidRequest(
            f"--gpu-core-mode soft on Kubernetes takes a slice of one card, not of {gpu.cards}: leave out "
            "--cards"
        )
    if not 1 <= gpu.core < gpu_manager.WHOLE:
        raise InvalidRequest(
            f"--gpu-core-mode soft requires --gpu-core from 1 to 99 on Kubernetes, got {gpu.core}"
        )
    memory = parse_memory(gpu.memory, _GIB_MIB)
    mib = memory.nominal_mib(_GIB_MIB)
    if mib % gpu_manager.UNIT_MIB:
        raise InvalidRequest(
            f"--gpu-mem {gpu.memory} with --gpu-core-mode soft must be a multiple of "
            f"{gpu_manager.UNIT_MIB}MiB on Kubernetes"
        )
    return CardRequest(
        {
            gpu_manager.CORE: str(gpu.core),
            gpu_manager.MEMORY: str(mib // gpu_manager.UNIT_MIB),
        },
        annotations={gpu_manager.CEILING: str(gpu_manager.WHOLE)},
    )


def _units(memory: Memory) -> int:
    """Return the units of 1 GiB that hold an exact size."""
    return -(-memory.amount // _GIB_MIB)
