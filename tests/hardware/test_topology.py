"""How cards are connected, from the simulated driver's answers to what the core reads."""

import os
from collections.abc import Callable

import pynvml
import pytest

from fenka.core.inventory import Distance
from fenka.hardware import nvml_topology
from fenka.hardware.card_spec import BadSpec, parse_spec
from fenka.hardware.nvml import Driver
from tests.hardware.client import MakeNode


def rows_of(driver: Driver) -> list[str]:
    """The distances as digits."""
    links = driver.links()
    assert links is not None
    return [
        "".join(str(int(links.distance(one, other))) for other in links.devices)
        for one in links.devices
    ]


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        # One host bridge, as all simulated nodes had.
        ("T4*3", ["044", "404", "440"]),
        ("H100-80G*4@nvswitch", ["0111", "1011", "1101", "1110"]),
        # Three cards for the first socket, of which two have a bridge, and two for the second.
        ("A30*5@bridges", ["01466", "10466", "44066", "66601", "66610"]),
        # Two cards of a socket share a PCIe switch.
        ("L4*6@sockets", ["025666", "205666", "550666", "666025", "666205", "666550"]),
    ],
)
def test_distances_are_those_of_the_topology(
    make_node: MakeNode, spec: str, rows: list[str]
) -> None:
    """NVLink first, then the PCIe level."""
    with Driver.open(make_node(spec).library_dir) as driver:
        assert rows_of(driver) == rows


def test_one_card_has_no_distances(make_node: MakeNode) -> None:
    """There is no other."""
    with Driver.open(make_node("T4@nvswitch").library_dir) as driver:
        assert driver.links() is None


def test_lost_card_has_no_row(make_node: MakeNode) -> None:
    """Until it returns."""
    node = make_node("A30*4@bridges")
    node.lose(1)
    with Driver.open(node.library_dir) as driver:
        assert rows_of(driver) == ["066", "601", "610"]


def test_cpus_are_those_of_the_socket(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sockets share the CPUs of this machine; an odd one belongs to the first, a single one to both."""
    real = os.sysconf("SC_NPROCESSORS_CONF")
    with Driver.open(make_node("L4*2@sockets").library_dir) as driver:
        first, second = (driver.cpus(card.uuid) for card in driver.cards())
        online = os.cpu_count() or 1
        assert first == frozenset(range((online + 1) // 2))
        assert second == frozenset(range(online // 2, online))
        # A machine with fewer CPUs than the driver's words have bits.
        monkeypatch.setattr(os, "sysconf", lambda _: 1)
        assert driver.cpus(driver.cards()[0].uuid) == {0}
    monkeypatch.undo()
    with Driver.open(make_node("L4").library_dir) as driver:
        assert driver.cpus(driver.cards()[0].uuid) == frozenset(range(real))


def test_nvml_answers_as_it_documents(make_node: MakeNode) -> None:
    """Also what fenka does not ask: the nearest cards, the memory's node, and links that lead nowhere."""
    with Driver.open(make_node("A30*5@bridges").library_dir):
        cards = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(5)]
        bus_ids = [pynvml.nvmlDeviceGetPciInfo(card).busId for card in cards]
        near = pynvml.nvmlDeviceGetTopologyNearestGpus(cards[0], pynvml.NVML_TOPOLOGY_HOSTBRIDGE)
        assert [pynvml.nvmlDeviceGetIndex(card) for card in near] == [1, 2]
        assert [pynvml.nvmlDeviceGetNvLinkState(cards[0], link) for link in (0, 3, 4)] == [1, 1, 0]
        assert pynvml.nvmlDeviceGetNvLinkRemotePciInfo(cards[0], 3).busId == bus_ids[1]
        for index, node in enumerate([0, 0, 0, 1, 1]):
            assert pynvml.nvmlDeviceGetMemoryAffinity(cards[index], 1, 0)[0] == 1 << node
        # The third card of the first socket has no neighbour.
        assert pynvml.nvmlDeviceGetNvLinkState(cards[2], 0) == 0
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            pynvml.nvmlDeviceGetNvLinkRemotePciInfo(cards[0], 4)
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            pynvml.nvmlDeviceGetNvLinkState(cards[0], pynvml.NVML_NVLINK_MAX_LINKS)


def test_links_to_nvswitches_lead_to_no_card(make_node: MakeNode) -> None:
    """An H100 has 18 links, an A100 12."""
    with Driver.open(make_node("H100-80G,A100-80G@nvswitch").library_dir):
        for index, links in ((0, 18), (1, 12)):
            card = pynvml.nvmlDeviceGetHandleByIndex(index)
            states = [pynvml.nvmlDeviceGetNvLinkState(card, link) for link in range(18)]
            assert sum(states) == links
            kind = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(card, 0)
            assert kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
            assert b"C0" in pynvml.nvmlDeviceGetNvLinkRemotePciInfo(card, 0).busId.encode()


@pytest.mark.parametrize(
    ("missing", "rows"),
    [
        (["nvmlDeviceGetTopologyCommonAncestor"], ["0166", "1066", "6601", "6610"]),
        (["nvmlDeviceGetNvLinkState"], ["0466", "4066", "6604", "6640"]),
        (["nvmlDeviceGetNvLinkRemoteDeviceType"], ["0166", "1066", "6601", "6610"]),
        (["nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetNvLinkRemotePciInfo"], None),
    ],
)
def test_what_a_driver_does_not_support_is_unknown(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch, missing: list[str], rows: list[str] | None
) -> None:
    """Distances are as large as possible; without any answer there are none."""

    def unsupported(code: int) -> Callable[..., object]:
        def call(*_: object) -> object:
            raise pynvml.NVMLError(code)

        return call

    for name in missing:
        monkeypatch.setattr(pynvml, name, unsupported(pynvml.NVML_ERROR_NOT_SUPPORTED))
    with Driver.open(make_node("A30*4@bridges").library_dir) as driver:
        if rows is None:
            assert driver.links() is None
        else:
            assert rows_of(driver) == rows


def test_unknown_topology_is_refused_with_the_known_ones() -> None:
    """In one sentence."""
    with pytest.raises(BadSpec, match="no topology is called 'ring': known are flat, nvswitch, br"):
        parse_spec("T4*2@ring")


def test_distances_follow_nvmls_levels() -> None:
    """NVML's constants ascend in the same order."""
    levels = sorted(nvml_topology._LEVELS)
    assert [nvml_topology._LEVELS[level] for level in levels] == [
        Distance.PCIE_SWITCH,
        Distance.PCIE_SWITCH,
        Distance.PCIE_SWITCHES,
        Distance.HOST_BRIDGE,
        Distance.NUMA_NODE,
        Distance.SOCKETS,
    ]
