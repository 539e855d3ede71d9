"""What can go wrong with a card, provoked: heat, memory errors, XIDs, a card that is lost."""

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from fenka.hardware.card_spec import NodeError, parse_spec
from fenka.hardware.nvml import Driver
from fenka.hardware.simulated_node import NoSuchCard, SimulatedNode
from tests.hardware.client import MakeClient, MakeNode
from tests.waiting import WAIT_S

WAIT_MS = int(WAIT_S * 1000)
XID = pynvml.nvmlEventTypeXidCriticalError
ONE_BIT = pynvml.nvmlEventTypeSingleBitEccError
TWO_BITS = pynvml.nvmlEventTypeDoubleBitEccError
UNKNOWN = 999  # CUDA_ERROR_UNKNOWN


@pytest.fixture
def cards(make_node: MakeNode) -> Iterator[tuple[SimulatedNode, list[Any]]]:
    """Return a node with a T4 and an RTX 4090, which has no ECC, and their handles."""
    node = make_node("T4,RTX4090")
    with Driver.open(node.library_dir):
        yield node, [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2)]


@contextlib.contextmanager
def listening(*wishes: tuple[Any, int]) -> Iterator[Any]:
    """Yield an event set for these cards and types."""
    events = pynvml.nvmlEventSetCreate()
    for handle, types in wishes:
        pynvml.nvmlDeviceRegisterEvents(handle, types, events)
    yield events
    pynvml.nvmlEventSetFree(events)


def heard(events: Any, timeout_ms: int = WAIT_MS) -> tuple[int, int, int]:
    """Return the next event: card, type, data."""
    event = pynvml.nvmlEventSetWait_v2(events, timeout_ms)
    return pynvml.nvmlDeviceGetIndex(event.device), event.eventType, event.eventData


def heard_or_none(events: Any) -> int | None:
    """Return the data of the event that is pending now, if any."""
    try:
        return int(pynvml.nvmlEventSetWait_v2(events, 0).eventData)
    except pynvml.NVMLError_Timeout:
        return None


def silent(events: Any) -> bool:
    """Return whether no event is pending."""
    return heard_or_none(events) is None


def counters(handle: Any) -> list[int]:
    """Return corrected and uncorrected errors since the start, then in the card's life."""
    return [
        pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, since)
        for since in (pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC)
        for kind in (
            pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        )
    ]


def test_temperature_can_be_set_and_restored(cards: tuple[SimulatedNode, list[Any]]) -> None:
    """The card says it until it is taken back; the other card keeps its own."""
    node, handles = cards

    def celsius() -> list[int]:
        return [pynvml.nvmlDeviceGetTemperature(handle, 0) for handle in handles]

    assert celsius() == [30, 30]
    node.set_temperature(0, 91)
    assert celsius() == [91, 30]
    assert pynvml.nvmlDeviceGetTemperatureV(handles[0], 0) == 91
    node.set_temperature(0, None)
    assert celsius() == [30, 30]


def test_ecc_errors_are_counted(cards: tuple[SimulatedNode, list[Any]]) -> None:
    """By kind, in the volatile and the aggregate counter, all of them the device memory's."""
    node, (handle, _) = cards
    assert pynvml.nvmlDeviceGetEccMode(handle) == [1, 1]
    node.add_ecc_errors(0, 3, corrected=True)
    node.add_ecc_errors(0, 2)
    assert counters(handle) == [3, 2, 3, 2]
    where = [pynvml.NVML_MEMORY_LOCATION_DEVICE_MEMORY, pynvml.NVML_MEMORY_LOCATION_L2_CACHE]
    assert [pynvml.nvmlDeviceGetMemoryErrorCounter(handle, 1, 0, place) for place in where] == [
        2,
        0,
    ]


def test_ecc_command_fails_when_the_model_has_no_ecc(
    cards: tuple[SimulatedNode, list[Any]],
) -> None:
    """It has no counters, no such events, and none can be provoked."""
    node, (_, handle) = cards
    for ask in (pynvml.nvmlDeviceGetEccMode, counters):
        with pytest.raises(pynvml.NVMLError_NotSupported):
            ask(handle)
    assert pynvml.nvmlDeviceGetSupportedEventTypes(handle) == XID
    with pytest.raises(pynvml.NVMLError_NotSupported), listening((handle, XID | ONE_BIT)):
        pass
    with pytest.raises(NodeError, match="card 1 has no ECC memory"):
        node.add_ecc_errors(1, 1)


def test_restart_keeps_only_the_aggregate_counters(tmp_path: Path) -> None:
    """As a reboot does: the card is back, cool, and has counted nothing since."""
    node = SimulatedNode.create(tmp_path / "node", parse_spec("T4"))
    node.start()
    node.add_ecc_errors(0, 5)
    node.set_temperature(0, 91)
    node.lose(0)
    node.stop()
    node.start()
    try:
        with Driver.open(node.library_dir) as driver:
            assert counters(pynvml.nvmlDeviceGetHandleByIndex(0)) == [0, 0, 0, 5]
            assert driver.readings()[0].temperature_c == 30
    finally:
        node.stop()


def test_other_cards_are_measured_when_one_is_lost(tmp_path: Path) -> None:
    """The lost one reports nothing."""
    node = SimulatedNode.create(tmp_path / "node", parse_spec("T4*2"))
    node.start()
    try:
        with Driver.open(node.library_dir) as driver:
            lost, other = driver.cards()
            node.lose(0)
            assert driver.busy_samples(other.uuid, 7) == (7, {})
            assert driver.busy_samples(lost.uuid, 7) is None
    finally:
        node.stop()


def test_events_reach_the_sets_that_registered_for_them(
    cards: tuple[SimulatedNode, list[Any]],
) -> None:
    """Every set gets what it asked for, in order, from when it asked, and nothing else."""
    node, (first, second) = cards
    assert pynvml.nvmlDeviceGetSupportedEventTypes(first) == XID | ONE_BIT | TWO_BITS
    with (
        listening((first, XID | ONE_BIT | TWO_BITS), (second, XID)) as everything,
        listening((second, XID)) as one_card,
        listening((first, ONE_BIT)) as one_type,
    ):
        node.raise_xid(0, 31)
        node.raise_xid(1, 43)
        with listening((first, XID)) as late:
            node.add_ecc_errors(0, 7, corrected=True)
            node.add_ecc_errors(0, 1)
            assert heard(late) == (0, XID, 48)
            assert silent(late)
        assert [heard(everything) for _ in range(5)] == [
            (0, XID, 31),
            (1, XID, 43),
            (0, ONE_BIT, 0),
            (0, TWO_BITS, 0),
            (0, XID, 48),
        ]
        assert heard(one_card) == (1, XID, 43)
        assert heard(one_type) == (0, ONE_BIT, 0)
        assert all(silent(events) for events in (everything, one_card, one_type))


def test_registration_gets_no_earlier_events(cards: tuple[SimulatedNode, list[Any]]) -> None:
    """What a set could have heard before it asked for it is not given later."""
    node, (first, second) = cards
    with listening((first, XID)) as events:
        node.raise_xid(1, 43)
        pynvml.nvmlDeviceRegisterEvents(second, XID, events)
        assert silent(events)
        node.raise_xid(1, 44)
        assert heard(events) == (1, XID, 44)


def test_waiting_program_wakes_on_an_event(cards: tuple[SimulatedNode, list[Any]]) -> None:
    """Two programs and a thread wait without using a core, and an XID wakes them all."""
    node, (first, _) = cards
    program = (
        "import sys, time, pynvml as n; n.nvmlInit(); s = n.nvmlEventSetCreate();"
        "n.nvmlDeviceRegisterEvents(n.nvmlDeviceGetHandleByIndex(0), 8, s);"
        "print('waiting', flush=True); before = time.process_time();"
        f"e = n.nvmlEventSetWait_v2(s, {WAIT_MS});"
        "print(e.eventData, time.process_time() - before)"
    )
    others = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={"LD_LIBRARY_PATH": str(node.library_dir)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for other in others:
        assert other.stdout is not None
        assert other.stdout.readline() == "waiting\n"
    with listening((first, XID)) as events:
        woken: list[tuple[int, int, int]] = []

        def wait() -> None:
            woken.append(heard(events))

        thread = threading.Thread(target=wait)
        thread.start()
        # An XID for another card, which nobody asked for, ends nobody's wait.
        node.raise_xid(1, 13)
        node.raise_xid(0, 79)
        thread.join(WAIT_S)
        received = [other.communicate(timeout=WAIT_S)[0].split() for other in others]
    assert woken == [(0, XID, 79)]
    assert [xid for xid, _ in received] == ["79", "79"]
    assert all(float(cpu) < 0.05 for _, cpu in received)


def test_threads_can_wait_in_one_set(cards: tuple[SimulatedNode, list[Any]]) -> None:
    """Each event goes to one of those that wait in it; freeing the set ends the waits that are left."""
    node, (first, _) = cards
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(first, XID, events)
    got: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def wait() -> None:
        try:
            got.put(heard(events)[2])
        except (pynvml.NVMLError_Uninitialized, pynvml.NVMLError_InvalidArgument):
            got.put(None)

    threads = [threading.Thread(target=wait) for _ in range(5)]
    for thread in threads:
        thread.start()
    for number in (11, 12, 13):
        node.raise_xid(0, number)
    assert sorted(got.get(timeout=WAIT_S) or 0 for _ in range(3)) == [11, 12, 13]
    pynvml.nvmlEventSetFree(events)
    assert [got.get(timeout=WAIT_S) for _ in range(2)] == [None, None]
    for thread in threads:
        thread.join(WAIT_S)


def test_set_that_is_never_read_does_not_block_others(
    cards: tuple[SimulatedNode, list[Any]],
) -> None:
    """A set that nobody reads loses what it has no room for: the node and other sets go on."""
    node, (first, _) = cards
    with listening((first, XID)) as deaf, listening((first, XID)) as other:
        for number in range(1, 2001):
            node.raise_xid(0, number)
            assert heard(other) == (0, XID, number)
        kept = list(iter(lambda: heard_or_none(deaf), None))
        assert kept == list(range(1, len(kept) + 1))
        assert 1 < len(kept) < 2000
        node.raise_xid(0, 3000)
        assert heard(deaf) == (0, XID, 3000)


def test_event_set_is_lost_when_a_program_closes_its_descriptor(node: SimulatedNode) -> None:
    """Then the set is lost, and what has its descriptor's number now is neither read nor closed."""
    program = (
        "import os, socket, pynvml as n; n.nvmlInit(); s = n.nvmlEventSetCreate();"
        "os.closerange(3, 64); pairs = [socket.socketpair() for _ in range(8)]\n"
        "for one, other in pairs: one.send(b'x' * 64); other.send(b'y' * 64)\n"
        f"try: n.nvmlEventSetWait_v2(s, {WAIT_MS})\n"
        "except n.NVMLError_GpuIsLost: print('lost')\n"
        "n.nvmlShutdown()\n"
        "print(all(len(end.recv(99)) == 64 for pair in pairs for end in pair))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={"LD_LIBRARY_PATH": str(node.library_dir)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (ended.stdout, ended.stderr) == ("lost\nTrue\n", "")


def test_wait_returns_at_its_timeout(cards: tuple[SimulatedNode, list[Any]]) -> None:
    """It returns no earlier and uses no core, though other cards' events come in."""
    node, (first, _) = cards
    with listening((first, XID)) as events:
        node.raise_xid(1, 13)
        begin, used = time.monotonic(), time.thread_time()
        with pytest.raises(pynvml.NVMLError_Timeout):
            pynvml.nvmlEventSetWait_v2(events, 300)
        assert time.monotonic() - begin >= 0.3
        assert time.thread_time() - used < 0.1


def test_wait_fails_when_the_set_was_freed(cards: tuple[SimulatedNode, list[Any]]) -> None:
    """Freed, it is an invalid argument; and who waits for a server that ends is told."""
    node, (first, _) = cards
    with listening((first, XID)) as events:
        pass
    gone: list[Callable[[], object]] = [
        lambda: pynvml.nvmlEventSetWait_v2(events, 0),
        lambda: pynvml.nvmlEventSetFree(events),
        lambda: pynvml.nvmlDeviceRegisterEvents(first, XID, events),
    ]
    for use in gone:
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            use()
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(first, XID, events)
    thread = threading.Thread(target=node.stop)
    thread.start()
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlEventSetWait_v2(events, WAIT_MS)
    thread.join(WAIT_S)


def test_lost_card_returns_only_errors(make_node: MakeNode, make_client: MakeClient) -> None:
    """NVML says lost, CUDA fails on it, XID 79 is heard; the other card works on; recovery ends it."""
    node = make_node("T4*2")
    client = make_client(node).enter(0)
    client.do("p = ok(d.cuMemAlloc(1 << 30))", "0")
    with Driver.open(node.library_dir):
        first, second = (pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2))
        uuid = pynvml.nvmlDeviceGetUUID(first)
        lost: list[Callable[[], object]] = [
            lambda: pynvml.nvmlDeviceGetMemoryInfo(first),
            lambda: pynvml.nvmlDeviceGetUUID(first),
            lambda: pynvml.nvmlDeviceGetHandleByIndex(0),
            lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid),
            lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(first),
        ]
        with listening((first, XID)) as events:
            node.lose(0)
            node.lose(0)
            for ask in lost:
                with pytest.raises(pynvml.NVMLError_GpuIsLost):
                    ask()
            event = pynvml.nvmlEventSetWait_v2(events, WAIT_MS)
            assert (event.eventType, event.eventData) == (XID, 79)
            assert silent(events)
        assert pynvml.nvmlDeviceGetCount() == 2
        assert pynvml.nvmlDeviceGetMemoryInfo(second).used == 0
        assert client.do("code(d.cuMemAlloc(1 << 20))") == UNKNOWN
        assert client.do("code(d.cuCtxSynchronize())") == UNKNOWN
        assert client.do("code(d.cuDevicePrimaryCtxRetain(0))") == UNKNOWN
        assert client.enter(1).do("code(d.cuMemAlloc(1 << 20))") == 0
        node.recover(0)
        for ask in lost:
            ask()
        assert make_client(node).enter(0).free_bytes() == (15079 - 1024) << 20


def test_impossible_commands_fail_with_a_sentence(node: SimulatedNode, tmp_path: Path) -> None:
    """An unknown card, an impossible number, no node: a sentence each."""
    with Driver.open(node.library_dir) as driver:
        uuid = driver.cards()[0].uuid
    assert (node.find("0"), node.find(uuid), node.find(uuid.upper())) == (0, 0, 0)
    for name in ("1", "-1", "GPU-", "", "T4"):
        with pytest.raises(NoSuchCard, match=f"has no card {name}"):
            node.find(name)
    with pytest.raises(NoSuchCard):
        node.lose(1)
    for number in (0, -1, 65536):
        with pytest.raises(NodeError, match="XIDs are 1 to 65535"):
            node.raise_xid(0, number)
    with pytest.raises(NodeError, match="temperatures 0 to 200"):
        node.set_temperature(0, 201)
    node.stop()
    with pytest.raises(NodeError, match="no simulated node runs in"):
        node.lose(0)
    with pytest.raises(NodeError, match="there is no simulated node in"):
        SimulatedNode(tmp_path / "nowhere").find("0")


def test_forked_child_takes_no_events_of_its_parent(node: SimulatedNode) -> None:
    """A set is its maker's: the child may not wait in it, and its end leaves the set as it was."""
    program = (
        "import json, os, sys, pynvml as n; n.nvmlInit(); s = n.nvmlEventSetCreate();"
        "n.nvmlDeviceRegisterEvents(n.nvmlDeviceGetHandleByIndex(0), 8, s);child = os.fork()\n"
        "if child == 0:\n"
        " try: n.nvmlEventSetWait_v2(s, 0)\n"
        " except n.NVMLError_InvalidArgument: n.nvmlShutdown(); os._exit(7)\n"
        " os._exit(1)\n"
        "status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "print('forked', flush=True); sys.stdin.readline()\n"
        f"print(json.dumps([status, n.nvmlEventSetWait_v2(s, {WAIT_MS}).eventData]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={"LD_LIBRARY_PATH": str(node.library_dir)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "forked\n"
        node.raise_xid(0, 61)
        assert json.loads(parent.communicate("\n", timeout=WAIT_S)[0]) == [7, 61]
