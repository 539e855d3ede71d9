"""Answers which requests would start on a cluster if programs ended or cards were added.

Its queue is scheduled once on a copy.
"""

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from fenka.cluster.objects import Node
from fenka.cluster.queue_snapshot import SchedulerOptions
from fenka.cluster.state import ClusterSnapshot
from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.inventory import WHOLE_COMPUTE, Card, DeviceId
from fenka.core.units import card_units
from fenka.dialects import ack, base, gpushare, nodes
from fenka.dialects.base import SharedNode
from fenka.views.board import WhatIf, WhatIfAnswer
from fenka.views.board_sums import MAX_ADDED, what_if_sentence
from fenka.views.cluster_queue import schedule_queue
from fenka.views.unqueued_rows import unqueued_steps


class InvalidClusterQuestion(FenkaError):
    """The question names something that does not exist."""

    exit_code = INVALID_INPUT


def what_if(
    snapshot: ClusterSnapshot, options: SchedulerOptions, question: WhatIf, now: float
) -> WhatIfAnswer:
    """Return which pending requests would be placed, and why the others would not.

    Added cards come as one node of each model, like the first node that has it.

    Args:
        snapshot: the cluster.
        options: the scheduler's.
        question: ends pods by their UIDs, and adds cards by model.
        now: Unix seconds.

    Raises:
        InvalidClusterQuestion: a pod or a model is not there, or there are too many cards.
    """
    known = {pod.metadata.uid for pod in snapshot.pods}
    if gone := [uid for uid in question.end if uid not in known]:
        raise InvalidClusterQuestion(f"no pod has the id {gone[0][:80]}: it has ended")
    pods = [pod for pod in snapshot.pods if pod.metadata.uid not in question.end]
    # Made anew, so that a state that changes meanwhile does no harm.
    own = ClusterSnapshot.of(snapshot.nodes, pods, dialects=snapshot.state.dialects)
    added = list(_nodes(own, question.add))
    for node in added:
        own.state.set_node(node)
    changed = ClusterSnapshot.of([*own.nodes, *added], own.pods, state=own.state)
    queue, scheduled = schedule_queue(changed, options, now)
    starts = [entry.pending.name for entry in scheduled.entries if entry.placements]
    waits = [(entry.pending.name, entry.why) for entry in scheduled.entries if not entry.placements]
    below = unqueued_steps(changed.pods, scheduled, changed.state, queue.has_nodes, {}, now)
    waits += [(row.name, row.why) for row in filter(None, below)]
    return WhatIfAnswer(starts, waits, what_if_sentence(starts, waits))


def _nodes(snapshot: ClusterSnapshot, wanted: Mapping[str, int]) -> Iterator[Node]:
    if sum(wanted.values()) > MAX_ADDED or min(wanted.values(), default=0) < 0:
        raise InvalidClusterQuestion(f"a question adds 0 to {MAX_ADDED} cards")
    examples: dict[str, tuple[SharedNode, Card]] = {}
    for shared in snapshot.state.shared_nodes():
        for card in shared.physical_cards:
            examples.setdefault(card.model, (shared, card))
    for number, (model, count) in enumerate(wanted.items()):
        if model not in examples:
            here = ", ".join(sorted(examples)) or "no card"
            raise InvalidClusterQuestion(f"no node has a card {model[:80]!r}: here are {here}")
        shared, card = examples[model]
        node = snapshot.state.node(shared.node.name)
        if node is not None and count:
            yield _another(node, shared, card, count, number)


def _another(node: Node, shared: SharedNode, card: Card, count: int, number: int) -> Node:
    """Return an empty node like this one, with so many cards of a model."""
    name = f"what-if-{number}"
    cards = [
        Card(index, DeviceId(f"GPU-{name}-{index}"), card.model, card.memory_mib)
        for index in range(count)
    ]
    units = card_units(card.memory_mib, shared.unit_mib) * count
    amounts = {gpushare.MEMORY: units, gpushare.COUNT: count, ack.CORE: WHOLE_COMPUTE * count}
    allocatable = {key: amounts.get(key, amount) for key, amount in node.status.allocatable.items()}
    labels = {
        key: value for key, value in node.metadata.labels.items() if key != "kubernetes.io/hostname"
    }
    metadata = replace(
        node.metadata,
        name=name,
        uid=name,
        labels=labels,
        annotations={base.CARDS: nodes.encode_inventory(cards, shared.unit_mib)},
    )
    return replace(
        node,
        metadata=metadata,
        spec=replace(node.spec, unschedulable=False),
        status=replace(node.status, allocatable=allocatable),
    )
