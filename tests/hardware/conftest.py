"""Simulated nodes and programs on them, made and ended per test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fenka.hardware.card_spec import parse_spec
from fenka.hardware.simulated_node import SimulatedNode
from tests.hardware.client import Client, MakeClient, MakeNode


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[MakeNode]:
    """Return a function that makes running nodes from short specifications, each in its own directory."""
    nodes: list[SimulatedNode] = []

    def make(spec: str) -> SimulatedNode:
        node = SimulatedNode.create(tmp_path / f"node{len(nodes)}", parse_spec(spec))
        nodes.append(node)
        node.start()
        return node

    yield make
    for node in nodes:
        node.stop()


@pytest.fixture
def node(make_node: MakeNode) -> SimulatedNode:
    """Return a node with one T4."""
    return make_node("T4")


@pytest.fixture
def make_client(node: SimulatedNode) -> Iterator[MakeClient]:
    """Return a function that starts programs on the node."""
    clients: list[Client] = []

    def make(on: SimulatedNode | None = None, **environment: str) -> Client:
        clients.append(Client((on or node).library_dir, **environment))
        return clients[-1]

    yield make
    for client in clients:
        client.kill()
        for pipe in (client.process.stdin, client.process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


@pytest.fixture
def client(make_client: MakeClient) -> Client:
    """Return a program with a context on card 0."""
    return make_client().enter()
