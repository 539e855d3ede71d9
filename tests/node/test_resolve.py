"""Ids and units: invariants of what is offered, of the checkpoint's reading, of the message's size."""

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.inventory import Card, DeviceId
from fenka.core.request import Slice
from fenka.core.units import card_units
from fenka.node.kubelet import device_ids
from fenka.node.kubelet import deviceplugin_pb2 as api
from fenka.node.kubelet.client import (
    MESSAGE_BYTES,
    Claim,
    fitting_unit,
    largest_bytes,
    listing,
    read_checkpoint,
    unit_id,
)
from fenka.node.monitor.health import APPLICATION_XIDS, INFO_XIDS, is_fatal_xid

UNIT = 1024


@st.composite
def nodes(draw: st.DrawFn) -> tuple[list[Card], list[device_ids.Held]]:
    """CardHealth in any state, and containers whose ids are drawn from anywhere but fit their cards."""
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
    held, begin = [], 0
    for card, size in zip(cards, sizes, strict=True):
        left = size
        while left and draw(st.booleans()):
            wanted = draw(st.integers(1, left))
            held.append(
                device_ids.Held(
                    tuple(ids[begin : begin + wanted]), (Slice(card.index, card.uuid, 1, 0),)
                )
            )
            begin, left = begin + wanted, left - wanted
    return cards, held


@given(nodes())
def test_offered_is_what_can_be_given(made: tuple[list[Card], list[device_ids.Held]]) -> None:
    """Healthy ids are worth what healthy cards are; who is on a healthy card keeps what it has."""
    cards, held = made
    offered = dict(
        device_ids.device_list(cards, lambda it: card_units(it.memory_mib, UNIT), held, ())
    )
    worth = {card.uuid: card_units(card.memory_mib, UNIT) for card in cards}
    assert len(offered) == sum(worth.values())
    usable = {card.uuid: card.healthy and not card.cordoned for card in cards}
    on_card = {uuid: sum(len(it.ids) for it in held if it.slices[0].uuid == uuid) for uuid in worth}
    healthy = {card.uuid: card.healthy for card in cards}
    for it in held:
        assert all(offered[one] == healthy[it.slices[0].uuid] for one in it.ids)
    expected = sum(
        worth[uuid] if usable[uuid] else (on_card[uuid] if healthy[uuid] else 0) for uuid in worth
    )
    assert sum(offered.values()) == expected


@given(st.integers(0, 3000), st.booleans())
def test_the_message_is_as_long_as_was_worked_out(units: int, healthy: bool) -> None:
    """The bound is exact for sick units, and never less than what is sent."""
    sent = listing([(unit_id(n), healthy) for n in range(units)]).ByteSize()
    assert sent <= largest_bytes(units)
    assert healthy or sent == largest_bytes(units)


def test_a_unit_that_does_not_fit_is_answered_with_one_that_does() -> None:
    """Eight cards of 80 GB in MiB are 648,000 ids."""
    fitting = fitting_unit(1, lambda mib: 8 * (81251 // mib))
    assert fitting == 4
    assert largest_bytes(8 * (81251 // 4)) <= MESSAGE_BYTES < largest_bytes(8 * (81251 // 2))
    assert fitting_unit(1024, lambda mib: 15079 // mib) == 1024


def test_the_checkpoint_tells_pods_and_tokens(tmp_path: Path) -> None:
    """As kubelet 1.37 writes it; ids of several NUMA nodes are one set."""
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


@pytest.mark.parametrize("text", ["", "{}", '{"Data": 3}', "[" * 10000, '{"Data":{"x":1}}'])
def test_a_checkpoint_of_another_kind_says_nothing(tmp_path: Path, text: str) -> None:
    """It is the kubelet's own file, and may change."""
    path = tmp_path / "checkpoint"
    path.write_text(text)
    assert read_checkpoint(path) == []
    assert read_checkpoint(tmp_path / "missing") == []


def test_xids_that_are_a_programs_own_leave_the_card() -> None:
    """As NVIDIA's own plugin has it: 13, 31, 43, 45, 68 and 109; 79 is a lost card."""
    assert {13, 31, 43, 45, 68, 109} <= set(APPLICATION_XIDS)
    assert not any(map(is_fatal_xid, (*APPLICATION_XIDS, *INFO_XIDS)))
    assert all(map(is_fatal_xid, (48, 62, 64, 74, 79, 95, 119, 120, 99999)))
