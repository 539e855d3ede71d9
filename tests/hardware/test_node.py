"""A simulated node's life: made, started, found running, ended, abandoned."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from fenka.hardware.card_spec import NodeError, parse_spec
from fenka.hardware.nvml import Driver, DriverLost, NoDriver
from fenka.hardware.simulated_node import SimulatedNode
from tests.hardware.client import MakeClient, MakeNode
from tests.waiting import WAIT_S, wait_until


def server_pid(node: SimulatedNode) -> int:
    """Return the process of the node's card server, as the kernel reports it."""
    line = node._connect()
    assert line is not None
    with line:
        return int.from_bytes(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), "little")


def test_node_starts_and_stops(tmp_path: Path) -> None:
    """Start and stop do what they say, twice is as once, and stopping leaves no socket."""
    node = SimulatedNode.create(tmp_path / "node", parse_spec("T4"))
    assert not node.running
    node.start()
    node.start()
    assert node.running
    node.stop()
    node.stop()
    assert not node.running
    assert sorted(path.name for path in node.directory.iterdir()) == ["lib", "state"]


def test_running_node_is_reused(node: SimulatedNode) -> None:
    """The same cards in the same directory are the same node: another handle uses its server."""
    again = SimulatedNode.create(node.directory, parse_spec("T4"))
    before = server_pid(node)
    again.start()
    assert server_pid(again) == before
    again.stop()
    assert not node.running


def test_create_fails_when_a_running_node_has_other_cards(node: SimulatedNode) -> None:
    """One sentence, and the running node keeps its cards."""
    with pytest.raises(NodeError, match="already serves other cards"):
        SimulatedNode.create(node.directory, parse_spec("T4*2"))
    with Driver.open(node.library_dir) as driver:
        assert len(driver.cards()) == 1


def test_create_replaces_the_cards_of_a_stopped_node(node: SimulatedNode) -> None:
    """Once its server has gone, the directory is free."""
    node.stop()
    other = SimulatedNode.create(node.directory, parse_spec("L4*2"))
    other.start()
    with Driver.open(other.library_dir) as driver:
        assert [card.model for card in driver.cards()] == ["NVIDIA L4"] * 2
    other.stop()


def test_uuids_depend_on_the_directory(make_node: MakeNode) -> None:
    """Two nodes share no UUID; the same node made again has the same ones."""
    stopped, other = make_node("T4*2"), make_node("T4*2")
    seen = []
    for node in (stopped, other):
        with Driver.open(node.library_dir) as driver:
            seen += [card.uuid for card in driver.cards()]
    assert len(set(seen)) == 4
    stopped.stop()
    SimulatedNode.create(stopped.directory, parse_spec("T4*2")).start()
    with Driver.open(stopped.library_dir) as driver:
        assert [card.uuid for card in driver.cards()] == seen[:2]


def test_node_works_when_its_path_is_long(tmp_path: Path, make_client: MakeClient) -> None:
    """The directory's path may be longer than the 108 bytes of a socket's address."""
    node = SimulatedNode.create(tmp_path / ("long" * 50) / "node", parse_spec("T4"))
    node.start()
    try:
        assert make_client(node).enter().free_bytes() == 15079 << 20
    finally:
        node.stop()


def test_second_server_names_the_first(node: SimulatedNode) -> None:
    """Started by hand on a served directory, it ends with one sentence."""
    server = node.library_dir.joinpath("libcuda.so.1").resolve().with_name("fenka-cardserver")
    second = subprocess.run([server, node.directory], capture_output=True, text=True, check=False)
    assert second.returncode == 1
    assert second.stderr == (
        f"fenka-cardserver: another card server already serves {node.directory}.\n"
    )


def test_server_ends_when_no_program_needs_it(tmp_path: Path) -> None:
    """Without any connection it ends after the time that it was given."""
    node = SimulatedNode.create(tmp_path / "node", parse_spec("T4"))
    node.start(idle_seconds=1)
    assert node._connection is not None
    node._connection.close()
    node._connection = None
    assert node._server is not None
    assert node._server.wait(WAIT_S) == 0
    assert not (node.directory / "server.sock").exists()


def test_node_recovers_when_its_server_was_killed(
    node: SimulatedNode, make_client: MakeClient
) -> None:
    """After SIGKILL, what it left does not hinder the next one, which remembers no process."""
    make_client().enter().do("ok(d.cuMemAlloc(1 << 30))", "0")
    os.kill(server_pid(node), signal.SIGKILL)
    wait_until(lambda: not node.running)
    again = SimulatedNode(node.directory)
    again.start()
    with Driver.open(node.library_dir) as driver:
        assert driver.processes() == ()
        assert driver.readings()[0].used_mib == 0
    again.stop()


def test_driver_fails_with_a_sentence_when_its_server_is_missing(node: SimulatedNode) -> None:
    """An open driver says that it lost the cards; opening says what to do."""
    with Driver.open(node.library_dir) as driver:
        node.stop()

        def lost() -> bool:
            try:
                driver.readings()
            except DriverLost:
                return True
            return False

        wait_until(lost)
    with pytest.raises(NoDriver, match="card server is not running, start the node"):
        Driver.open(node.library_dir)


def test_node_fails_with_a_sentence_when_its_directory_is_invalid(tmp_path: Path) -> None:
    """A state of another version, and a directory that is no directory, get a sentence each."""
    node = SimulatedNode.create(tmp_path / "node", parse_spec("T4"))
    with (node.directory / "state").open("r+b") as state:
        state.seek(8)
        state.write(b"\xff")
    with pytest.raises(NodeError, match="another version of fenka"):
        node.start()
    (tmp_path / "file").touch()
    with pytest.raises(NodeError, match="cannot make a simulated node"):
        SimulatedNode.create(tmp_path / "file", parse_spec("T4"))


def test_context_takes_the_specified_memory(tmp_path: Path, make_client: MakeClient) -> None:
    """With context_mib, a process's first context on a card is charged, and only the first."""
    path = tmp_path / "cards.toml"
    path.write_text('version = 1\n[[card]]\nmodel = "T4"\nmemory_mib = 1000\ncontext_mib = 100\n')
    node = SimulatedNode.create(tmp_path / "node", parse_spec(str(path)))
    node.start()
    try:
        client = make_client(node).enter()
        assert client.free_bytes() == 900 << 20
        client.do("own = ok(d.cuCtxCreate(0, 0))", "0")
        assert client.free_bytes() == 900 << 20
        other = make_client(node).enter()
        assert other.free_bytes() == 800 << 20
        other.end()
        wait_until(lambda: client.free_bytes() == 900 << 20)
    finally:
        node.stop()
