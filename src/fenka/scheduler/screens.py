"""What the screens `fenka queue` and `fenka top node` show, for users who may not list pods and nodes.

Names, requests and cards: no command, no variable, no label of a pod.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

from fenka.cluster.objects import Pod
from fenka.cluster.queue_snapshot import QueueSnapshot
from fenka.cluster.snapshot import ClusterSnapshot
from fenka.cluster.state import ClusterState
from fenka.views.cluster_queue import queue_rows
from fenka.views.nodes import node_rows

MAX_ENTRIES = 2000
"""Of the queue; each costs a sentence about all cards."""


def queue_text(
    state: ClusterState, scheduled: Callable[[], QueueSnapshot]
) -> Callable[[], Iterator[bytes]]:
    """Return what yields the JSON of the queue's first entries, in parts."""
    return lambda: _array(islice(queue_rows(scheduled(), state), MAX_ENTRIES))


def nodes_text(state: ClusterState, pods: Callable[[], list[Pod]]) -> Callable[[], Iterator[bytes]]:
    """Return what yields the JSON of all nodes, in parts. pods: returns all pods."""
    return lambda: _array(node_rows(ClusterSnapshot(state.nodes(), pods(), state)))


def _array(rows: Iterable[Any]) -> Iterator[bytes]:
    opening = b"["
    for row in rows:
        yield opening + msgspec.json.encode(row)
        opening = b","
    yield b"]" if opening == b"," else b"[]"
