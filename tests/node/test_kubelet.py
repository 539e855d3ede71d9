"""Device lists, the size of their message, and the kubelet's checkpoint."""

import base64
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.inventory import Card, DeviceId
from fenka.core.request import Slice
from fenka.core.units import card_units
from fenka.node.kubelet import messages_pb2 as api
from fenka.node.kubelet.client import (
    MESSAGE_BYTES,
    Claim,
    fitting_unit,
    largest_bytes,
    listing,
    read_checkpoint,
    unit_id,
)
from fenka.node.kubelet.plugin import AllocatedIds, device_list

UNIT = 1024


Node = tuple[list[Card], list[AllocatedIds]]


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    """Draw cards in any state, and containers that hold any IDs but fit on their cards."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    cards = [
        Card(
            index,
            DeviceId(f"GPU-{index}"),
            "T4",
            size * UNIT + draw(st.integers(0, UNIT - 1)),
            healthy=draw(st.booleans()),
            cordoned=draw(st.booleans()),
        )
        for index, size in enumerate(sizes)
    ]
    ids = draw(st.permutations([unit_id(n) for n in range(sum(sizes))]))
    allocated, begin = [], 0
    for card, size in zip(cards, sizes, strict=True):
        free = size
        while free and draw(st.booleans()):
            count = draw(st.integers(1, free))
            slices = (Slice(card.index, card.uuid, 1, 0),)
            allocated.append(AllocatedIds(tuple(ids[begin : begin + count]), slices))
            begin, free = begin + count, free - count
    return cards, allocated


@given(nodes())
def test_device_list_has_a_healthy_id_for_each_usable_unit(node: Node) -> None:
    """Containers on healthy cards keep their IDs, also on cordoned ones."""
    cards, allocated = node
    units = {card.uuid: card_units(card.memory_mib, UNIT) for card in cards}
    devices = dict(device_list(cards, units, allocated, ()))
    assert len(devices) == sum(units.values())
    in_use = dict.fromkeys(units, 0)
    healthy = {card.uuid: card.healthy for card in cards}
    for container in allocated:
        uuid = container.slices[0].uuid
        in_use[uuid] += len(container.ids)
        assert all(devices[device] == healthy[uuid] for device in container.ids)
    usable = sum((in_use if card.cordoned else units)[card.uuid] for card in cards if card.healthy)
    assert sum(devices.values()) == usable


@given(st.integers(0, 3000), st.booleans())
def test_largest_bytes_bounds_the_message(units: int, healthy: bool) -> None:
    """The bound is exact for unhealthy units."""
    sent = listing([(unit_id(n), healthy) for n in range(units)]).ByteSize()
    assert sent <= largest_bytes(units)
    assert healthy or sent == largest_bytes(units)


def test_fitting_unit_doubles_the_unit_when_its_list_is_too_long() -> None:
    """Eight cards of 80 GB in MiB are 648,000 ids."""
    fitting = fitting_unit(1, lambda mib: 8 * (81251 // mib))
    assert fitting == 4
    assert largest_bytes(8 * (81251 // 4)) <= MESSAGE_BYTES < largest_bytes(8 * (81251 // 2))
    assert fitting_unit(1024, lambda mib: 15079 // mib) == 1024


def test_checkpoint_is_read_with_pods_and_tokens(tmp_path: Path) -> None:
    """The format is kubelet 1.37's. The IDs of several NUMA nodes are one set."""
    answer = api.ContainerAllocateResponse(cdi_devices=[api.CDIDevice(name="fenka.io/lease=abc")])
    entry = {
        "PodUID": "uid",
        "ContainerName": "main",
        "ResourceName": "aliyun.com/gpu-mem",
        "DeviceIDs": {"-1": ["u1"], "0": ["u2"], "1": None},
        "AllocResp": base64.b64encode(answer.SerializeToString()).decode(),
    }
    path = tmp_path / "checkpoint"
    data = {"PodDeviceEntries": [entry], "RegisteredDevices": {}}
    path.write_text(json.dumps({"Data": data, "Checksum": 7}))
    claim = Claim("aliyun.com/gpu-mem", frozenset({"u1", "u2"}), "main", uid="uid", token="abc")
    assert read_checkpoint(path) == [claim]
    entry["AllocResp"] = "\u00e9"
    path.write_text(json.dumps({"Data": data}))
    assert read_checkpoint(path) == [replace(claim, token="")]


UNKNOWN = [
    b"",
    b"{}",
    b'{"Data": 3}',
    b"[" * 10000,
    b'{"Data":{"x":1}}',
    b'{"Data":{"PodDeviceEntries":[{"PodUID":"\xff"}]}}',
]


@pytest.mark.parametrize("content", UNKNOWN)
def test_checkpoint_is_ignored_when_its_format_is_unknown(tmp_path: Path, content: bytes) -> None:
    """It is the kubelet's internal file, and may change or be damaged."""
    path = tmp_path / "checkpoint"
    path.write_bytes(content)
    assert read_checkpoint(path) == []
    assert read_checkpoint(tmp_path / "missing") == []
