"""What fenka.hardware promises of any driver: run against the simulated one and, where there is one,
against the machine's own."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pynvml
import pytest

from fenka.core.inventory import DeviceId
from fenka.hardware.nvml import Driver, NoDriver
from tests.hardware.client import MakeNode


@pytest.fixture(params=["simulated", "real"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Return an open driver with at least one card."""
    if request.param == "simulated":
        make_node: MakeNode = request.getfixturevalue("make_node")
        opened = Driver.open(make_node("T4,A100-80G").library_dir)
    else:
        try:
            opened = Driver.open()
        except NoDriver as why:
            pytest.skip(f"no real driver here: {why}")
    with opened as driver:
        assert driver.simulated == (request.param == "simulated")
        yield driver


def test_versions_are_numbers_and_points(driver: Driver) -> None:
    """The driver's version and the CUDA version parse."""
    assert re.fullmatch(r"\d+(\.\d+)+", driver.version)
    assert re.fullmatch(r"\d+\.\d+", driver.cuda_version)


def test_cards_are_numbered_and_named(driver: Driver) -> None:
    """Indices count from 0, UUIDs are distinct and well-formed, each card has a model and memory."""
    cards = driver.cards()
    assert [card.index for card in cards] == list(range(len(cards)))
    assert len({card.uuid for card in cards}) == len(cards) > 0
    for card in cards:
        assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", card.uuid)
        assert card.model
        assert card.memory_mib > 0
        assert card.healthy


def test_readings_are_plausible(driver: Driver) -> None:
    """One reading per card, in order, within what the card can do."""
    cards, readings = driver.cards(), driver.readings()
    assert [reading.uuid for reading in readings] == [card.uuid for card in cards]
    for card, reading in zip(cards, readings, strict=True):
        assert reading.used_mib is None or 0 <= reading.used_mib <= card.memory_mib
        assert reading.utilisation is None or 0 <= reading.utilisation <= 100
        assert reading.temperature_c is None or 0 < reading.temperature_c < 120
        assert reading.power_w is None or 0 < reading.power_w < 2000


def test_distances_are_of_all_cards_and_symmetric(driver: Driver) -> None:
    """A card is at distance 0 from itself alone; a driver with one card, or that cannot tell, has none."""
    links, uuids = driver.links(), [card.uuid for card in driver.cards()]
    if links is None:
        return
    assert list(links.devices) == uuids
    for one in uuids:
        for other in uuids:
            assert links.distance(one, other) == links.distance(other, one)
            assert (links.distance(one, other) == 0) == (one == other)


def test_nearest_cpus_are_the_machines(driver: Driver) -> None:
    """None if the driver cannot tell."""
    for card in driver.cards():
        assert driver.cpus(card.uuid) <= set(range(os.sysconf("SC_NPROCESSORS_CONF")))


def test_processes_are_on_cards(driver: Driver) -> None:
    """Each process is on a card that exists, once, and holds no more than the card has."""
    memory = {card.uuid: card.memory_mib for card in driver.cards()}
    processes = driver.processes()
    assert len({(process.uuid, process.pid) for process in processes}) == len(processes)
    for process in processes:
        assert process.pid > 0
        assert process.used_mib is None or 0 <= process.used_mib <= memory[DeviceId(process.uuid)]


def test_driver_stays_open_until_its_last_user_closes_it(driver: Driver) -> None:
    """A second handle may close before and after the first; another directory is refused meanwhile."""
    with Driver.open(driver.library) as second:
        assert second.cards() == driver.cards()
    assert driver.cards()
    driver.close()
    driver.close()
    with Driver.open(driver.library) as third:
        assert third.cards()


def test_open_fails_when_another_driver_is_open(make_node: MakeNode) -> None:
    """While one node's driver is open another's is refused; afterwards it opens, with its own cards."""
    node, other = make_node("T4"), make_node("L4")
    with Driver.open(node.library_dir) as driver:
        assert [card.model for card in driver.cards()] == ["Tesla T4"]
        with pytest.raises(NoDriver, match="already uses the driver of"):
            Driver.open(other.library_dir)
    with Driver.open(other.library_dir) as driver:
        assert [card.model for card in driver.cards()] == ["NVIDIA L4"]


def test_open_fails_when_the_directory_has_no_driver(make_node: MakeNode) -> None:
    """The sentence names the library and the directory."""
    node = make_node("T4")
    with pytest.raises(NoDriver, match=r"cannot load libnvidia-ml\.so\.1 from"):
        Driver.open(node.directory)


def test_reading_is_none_when_the_card_does_not_report_it(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question that NVML does not support for the card gives None, and the rest is there."""

    def unsupported(*arguments: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in ("UtilizationRates", "PowerUsage", "Temperature"):
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", unsupported)
    with Driver.open(make_node("T4").library_dir) as driver:
        (reading,) = driver.readings()
    fields = dataclasses.asdict(reading)
    del fields["uuid"]
    assert fields == {
        "used_mib": 0,
        "utilisation": None,
        "temperature_c": None,
        "power_w": None,
        "power_limit_w": 70.0,
    }


_FORK = """
import os, sys
from pathlib import Path
from fenka.hardware.nvml import Driver
with Driver.open(Path(sys.argv[1])): pass
child = os.fork()
if child == 0: os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_closed_driver_leaves_nothing_to_a_forked_child(make_node: MakeNode) -> None:
    """After the library was unloaded a child starts unharmed: no handler of it is left to be called."""
    library_dir = make_node("T4").library_dir
    done = subprocess.run(
        [sys.executable, "-c", _FORK, library_dir], capture_output=True, text=True, check=True
    )
    assert done.stdout == "0\n"
