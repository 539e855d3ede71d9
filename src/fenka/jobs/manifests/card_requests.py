"""Writes a request for cards in the names that pods use.

Slices have ACK's names where those express them. gpu-manager's express any share of one card; HAMi's, which a
cluster may not read, exact sizes and shares of several cards. Whole cards have NVIDIA's. An annotation says
what a share means if it is not a limit.
"""

from dataclasses import dataclass, field, replace

import msgspec

from fenka.core.request import InvalidRequest, Memory
from fenka.dialects import ack, gpu_manager, gpushare
from fenka.dialects import hami as hami_names
from fenka.dialects.base import CORE_MODE, NVIDIA_GPU, TOPOLOGY
from fenka.dialects.mig_records import INSIDE
from fenka.formats.mig_profiles import parse_profile, resource_name
from fenka.formats.quantities import parse_memory
from fenka.jobs.job_spec import GpuResources

_GIB_MIB = 1024


@dataclass(frozen=True, slots=True)
class CardRequest:
    """A pod's resources, annotations and variables for cards.

    Attributes:
        limits: Extended resources of its container.
        labels: Labels of the pod.
        annotations: Annotations of the pod.
    """

    limits: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)


def card_request(gpu: GpuResources | None, *, hami: bool = True) -> CardRequest:
    """Return what a pod that gets these cards says.

    Args:
        gpu: The cards.
        hami: The cluster reads HAMi's names.

    Raises:
        InvalidRequest, InvalidSize: No pod can request them.
    """
    if gpu is None:
        return CardRequest()
    request = _of_cards(gpu, hami=hami)
    if gpu.topology == "any":
        return request
    return replace(request, annotations=request.annotations | {TOPOLOGY: gpu.topology})


def _of_cards(gpu: GpuResources, *, hami: bool) -> CardRequest:
    if gpu.whole:
        return CardRequest({NVIDIA_GPU: str(gpu.cards)})
    if gpu.mig:
        return CardRequest({resource_name(parse_profile(gpu.mig)): str(gpu.cards)})
    if gpu.inside:
        slices = card_request(msgspec.structs.replace(gpu, inside=""), hami=hami)
        return replace(slices, annotations=slices.annotations | {INSIDE: gpu.inside})
    if not 0 <= gpu.core <= ack.MOST:
        raise InvalidRequest(f"--gpu-core must be from 0 to {ack.MOST}, got {gpu.core}")
    if gpu.core_mode == "hard":
        return _slices(gpu, hami=hami)
    if not gpu.core:
        raise InvalidRequest(f"--gpu-core-mode {gpu.core_mode} requires --gpu-core")
    return replace(_slices(gpu, hami=hami), annotations={CORE_MODE: gpu.core_mode})


def _slices(gpu: GpuResources, *, hami: bool) -> CardRequest:
    """Return the names of slices, whatever the share means. Raises as card_request does."""
    if _has_units(gpu):
        return _units(gpu)
    if _has_blocks(gpu):
        return _blocks(gpu)
    if gpu.core == hami_names.FULL:
        raise InvalidRequest(
            f"--gpu-core {gpu.core} with {_reason(gpu)} must be below {hami_names.FULL} on Kubernetes"
        )
    if not hami:
        raise InvalidRequest(
            f"{_reason(gpu)} is requested by HAMi's names, and this cluster's scheduler does not report "
            f"that it reads them (hamiNames=true): {_instead(gpu)}"
        )
    return _slices_by_hami(gpu)


def requires_hami(gpu: GpuResources | None) -> bool:
    """Return whether only HAMi's names express a valid request."""
    if gpu is None or gpu.whole or gpu.mig:
        return False
    return not (_has_units(gpu) or _has_blocks(gpu))


def _memory(gpu: GpuResources) -> Memory:
    """Return the memory of each slice. Raises InvalidSize."""
    return parse_memory(gpu.memory, _GIB_MIB)


def _mib(gpu: GpuResources) -> int:
    return _memory(gpu).nominal_mib(_GIB_MIB)


# ---- units of the nodes' cards: ACK's names ----


def _has_units(gpu: GpuResources) -> bool:
    counted = _memory(gpu).unit_mib == _GIB_MIB
    return counted and not gpu.core % ack.STEP and (gpu.cards == 1 or not gpu.core)


def _units(gpu: GpuResources) -> CardRequest:
    """The pod's units are shared out over its cards."""
    limits = {gpushare.MEMORY: str(_memory(gpu).amount * gpu.cards)}
    if gpu.core:
        limits[ack.CORE] = str(gpu.core)
    return CardRequest(limits, {gpushare.COUNT: str(gpu.cards)} if gpu.cards > 1 else {})


# ---- blocks of memory with any share of one card: gpu-manager's names ----


def _has_blocks(gpu: GpuResources) -> bool:
    whole_blocks = not _mib(gpu) % gpu_manager.UNIT_MIB
    return whole_blocks and gpu.cards == 1 and 1 <= gpu.core < gpu_manager.WHOLE


def _blocks(gpu: GpuResources) -> CardRequest:
    return CardRequest(
        {
            gpu_manager.CORE: str(gpu.core),
            gpu_manager.MEMORY: str(_mib(gpu) // gpu_manager.UNIT_MIB),
        }
    )


# ---- exact sizes, and shares of several cards: HAMi's names ----


def _slices_by_hami(gpu: GpuResources) -> CardRequest:
    limits = {hami_names.COUNT: str(gpu.cards), hami_names.MEMORY: str(_mib(gpu))}
    if gpu.core:
        limits[hami_names.CORES] = str(gpu.core)
    return CardRequest(limits)


def _reason(gpu: GpuResources) -> str:
    """Return what only HAMi's names express."""
    if gpu.core and gpu.cards > 1:
        return f"a share of each of {gpu.cards} cards"
    return f"the exact size {gpu.memory}"


def _instead(gpu: GpuResources) -> str:
    if gpu.core and gpu.cards > 1:
        return "leave out --gpu-core or --cards"
    if gpu.core:
        return f"use a multiple of {gpu_manager.UNIT_MIB}MiB"
    # As many units of 1 GiB as hold it.
    return f"write --gpu-mem {-(-_mib(gpu) // _GIB_MIB)}"
