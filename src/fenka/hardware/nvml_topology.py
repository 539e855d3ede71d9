"""How the driver says that cards are connected, with each other and with CPUs."""

import os
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import pynvml

from fenka.core.inventory import UNKNOWN, Distance, Links
from fenka.hardware.nvml_errors import optional

_LEVELS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: Distance.PCIE_SWITCH,
    pynvml.NVML_TOPOLOGY_SINGLE: Distance.PCIE_SWITCH,
    pynvml.NVML_TOPOLOGY_MULTIPLE: Distance.PCIE_SWITCHES,
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: Distance.HOST_BRIDGE,
    pynvml.NVML_TOPOLOGY_NODE: Distance.NUMA_NODE,
    pynvml.NVML_TOPOLOGY_SYSTEM: Distance.SOCKETS,
}
"""Two cards of one board, which is NVML's first level, are below its switch."""

_WORD_BITS = 64

_NVSWITCH = "an NVSwitch"


def read_links(handles: Mapping[str, Any]) -> Links | None:
    """Return how the cards of a machine are connected; None for fewer than two, or if the driver cannot tell.

    handles: of pynvml, by UUID. Raises pynvml.NVMLError if the driver no longer answers.
    """
    if len(handles) < 2:
        return None
    places = {
        uuid: optional(pynvml.nvmlDeviceGetPciInfo, handle) for uuid, handle in handles.items()
    }
    by_bus = {place.busId: uuid for uuid, place in places.items() if place is not None}
    ends = {uuid: frozenset(_nvlink_ends(handle, by_bus)) for uuid, handle in handles.items()}
    known, count = False, len(handles)
    rows = [bytearray(count) for _ in handles]
    for (row, one), (column, other) in combinations(enumerate(handles), 2):
        level = optional(pynvml.nvmlDeviceGetTopologyCommonAncestor, handles[one], handles[other])
        known |= level is not None
        distance = UNKNOWN if level is None else _LEVELS.get(level, UNKNOWN)
        if other in ends[one] or one in ends[other] or _NVSWITCH in ends[one] & ends[other]:
            distance, known = Distance.NVLINK, True
        rows[row][column] = rows[column][row] = distance
    return Links(tuple(handles), b"".join(map(bytes, rows))) if known else None


def _nvlink_ends(handle: Any, by_bus: Mapping[Any, str]) -> Iterable[str]:
    """Yield what a card's active links lead to: cards by their UUIDs, and `_NVSWITCH`."""
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        if not optional(pynvml.nvmlDeviceGetNvLinkState, handle, link):
            continue
        # Without it, as before driver 470, a link that leads to no card may lead to a CPU.
        kind = optional(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            yield _NVSWITCH
            continue
        pci = optional(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        if pci is not None and pci.busId in by_bus:
            yield by_bus[pci.busId]


def read_cpus(handle: Any) -> frozenset[int]:
    """Return the CPUs that are nearest to a card; none if the driver cannot tell.

    handle: of pynvml. Raises pynvml.NVMLError if the driver no longer answers.
    """
    count = os.sysconf("SC_NPROCESSORS_CONF")
    words = optional(pynvml.nvmlDeviceGetCpuAffinity, handle, -(-count // _WORD_BITS)) or ()
    return frozenset(
        number * _WORD_BITS + bit
        for number, word in enumerate(words)
        for bit in range(_WORD_BITS)
        if word >> bit & 1 and number * _WORD_BITS + bit < count
    )
