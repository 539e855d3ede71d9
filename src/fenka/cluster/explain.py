"""Explains the state of one pod: why it is pending, where it is, and what would help."""

import re
from collections.abc import Iterable

import msgspec

from fenka.cluster.node_verdicts import COUNTED, NodeVerdict, explain_nodes, of_instance
from fenka.cluster.objects import QUEUE_GATE, Event, Pod
from fenka.cluster.snapshot import ClusterSnapshot
from fenka.core.request import ANY_INSTANCE, ComputeMode
from fenka.dialects import ack, base, gpushare
from fenka.dialects.base import InvalidRecord, driver_uuid

MAX_EVENTS = 5
"""The newest warnings to show."""

SCHEDULING = ("FailedScheduling", "FenkaUnschedulable")
"""Reasons of events that are outdated once the pod is on a node."""

NOT_READ = (
    "nodes and other users' pods may not be read without the ClusterRole fenka-viewer, so their cards "
    "are not explained"
)

EXTENDER_PHRASES = ("GPUs fit", "Insufficient GPU Memory in one device", "is not for GPU share")
"""What fenka's extender, or gpushare's, writes into kube-scheduler's message."""


class PodExplanation(msgspec.Struct):
    """What fenka knows of a pod.

    Attributes:
        scale_out: the new node that it waits for, or why none is bought; empty without an autoscaler.
        state: gated, pending, starting, running, succeeded, failed or terminating.
        message: the scheduler's own.
        extender: whether the extender was called, as far as the message shows.
        slices: what the pod holds.
        containers: why containers wait.
        sentence: the counts over all cards.
        hints: what would help.
    """

    namespace: str
    pod: str
    state: str
    summary: str
    scale_out: str = ""
    scheduler: str = ""
    message: str = ""
    extender: str = ""
    slices: list[str] = []
    containers: list[str] = []
    nodes: list[NodeVerdict] = []
    sentence: str = ""
    notes: list[str] = []
    events: list[str] = []
    hints: list[str] = []


def explain(pod: Pod, snapshot: ClusterSnapshot | None, events: Iterable[Event]) -> PodExplanation:
    """Explain a pod from the cluster and from its own events. snapshot: None if it may not be read."""
    state = _state(pod)
    result = PodExplanation(
        pod.metadata.namespace,
        pod.metadata.name,
        state,
        f"{pod.full_name} is {state}: it asks for {_request(pod)}.",
        scheduler=pod.spec.scheduler_name,
        containers=_waiting_containers(pod),
        events=_warnings(events, placed=bool(pod.spec.node_name)),
    )
    if pod.finished:
        reason = " ".join(filter(None, (pod.status.reason, pod.status.message)))
        result.notes = [reason] if reason else []
    elif pod.spec.node_name:
        _explain_placed(result, pod, snapshot or ClusterSnapshot.of([], []))
    else:
        _explain_pending(result, pod, snapshot)
    if snapshot is None:
        result.notes.append(NOT_READ)
    return result


def _state(pod: Pod) -> str:
    if pod.metadata.deletion_timestamp:
        return "terminating"
    if pod.spec.node_name or pod.finished:
        return "starting" if pod.status.phase == "Pending" else pod.status.phase.lower()
    gates = {gate.name for gate in pod.spec.scheduling_gates}
    return "gated" if gates - {QUEUE_GATE} else "pending"


_MODES: dict[ComputeMode, str] = {"soft": "soft share", "weight": "weight"}


def _request(pod: Pod) -> str:
    mode = pod.demand().core_mode
    return _amounts(pod) if mode == "hard" else f"{_amounts(pod)}, as a {_MODES[mode]}"


def _amounts(pod: Pod) -> str:
    try:
        amounts, cards = pod.demand().amounts, gpushare.card_count(pod.metadata.labels)
    except InvalidRecord:
        # The hints say why.
        return "cards in a way that cannot be read"
    whole = amounts.get(base.NVIDIA_GPU)
    if whole and len(amounts) == 1:
        return f"{whole} whole card{'s' if whole > 1 else ''} ({base.NVIDIA_GPU})"
    if not amounts:
        return f"no GPU ({gpushare.MEMORY} in no container's limits)"
    if gpushare.MEMORY not in amounts:
        return " and ".join(f"{amount} of {name}" for name, amount in amounts.items())
    where = "one card" if cards == 1 else f"{cards} cards of one node"
    if instance := pod.demand().instance:
        kind = "a MIG instance" if instance == ANY_INSTANCE else f"an instance {instance}"
        where = f"{kind} of {where}"
    core = amounts.get(ack.CORE)
    percent = f", and {core} of {ack.CORE}" if core else ""
    return f"{amounts[gpushare.MEMORY]} units of {gpushare.MEMORY} on {where}{percent}"


def _waiting_containers(pod: Pod) -> list[str]:
    return [
        ": ".join(filter(None, (status.name, waiting.reason, waiting.message)))
        for status in (*pod.status.init_container_statuses, *pod.status.container_statuses)
        if (waiting := status.state.waiting) is not None
    ]


def _warnings(events: Iterable[Event], *, placed: bool) -> list[str]:
    """Return the newest of each reason, the newest first; a placed pod's scheduling is over."""
    newest: dict[str, Event] = {}
    for event in sorted(events, key=lambda event: event.at):
        if event.type == "Warning" and not (placed and event.reason in SCHEDULING):
            newest[event.reason] = event
    ordered = sorted(newest.values(), key=lambda event: event.at, reverse=True)
    return [f"{event.reason}: {event.message}" for event in ordered[:MAX_EVENTS]]


def _explain_placed(result: PodExplanation, pod: Pod, snapshot: ClusterSnapshot) -> None:
    shared = snapshot.state.shared_node(pod.spec.node_name)
    held = snapshot.state.allocation(pod.metadata.uid)
    if shared is not None and held is not None:
        if held.error:
            result.notes.append(held.error)
            result.hints.append(
                "delete the pod once kube-scheduler asks the extender (docs/kubernetes.md): its "
                "successor gets a card"
            )
        else:
            units = gpushare.shown_units(shared, held.slices)
            result.slices = [
                (
                    of_instance(piece)
                    or f"{units[piece.card]:g} units ({piece.memory_mib} MiB) of card {piece.card}"
                )
                + f" on {held.node}"
                + (f", {uuid}" if (uuid := driver_uuid(piece.uuid)) else "")
                for piece in held.slices
            ]
    _explain_refusals(result, pod, snapshot)
    if not result.slices:
        result.notes.insert(0, f"it is on node {pod.spec.node_name}")
    if result.containers and result.state == "starting":
        result.hints.append("it starts by itself once what its containers wait for is there")


def _explain_refusals(result: PodExplanation, pod: Pod, snapshot: ClusterSnapshot) -> None:
    """Add what the node reports of pods that it does not start: this one, and those that it blocks."""
    refusals = snapshot.state.refusals(pod.spec.node_name)
    own = refusals.get(pod.metadata.uid)
    if own is not None:
        result.notes.append(f"its node has refused it for more than a minute: {own.sentence}")
        if own.movable:
            result.hints.append(
                "it is evicted if a controller makes another; else delete it and create it again"
            )
    mentions_pod = re.compile(rf"(?<![\w./-]){re.escape(pod.full_name)}(?![\w./-])")
    names = {other.metadata.uid: other.full_name for other in snapshot.pods}
    result.notes += [
        f"{names[uid]} was placed on the same card and does not start: {refusal.sentence}"
        for uid, refusal in sorted(refusals.items())
        if uid in names and uid != pod.metadata.uid and mentions_pod.search(refusal.sentence)
    ]


def _explain_pending(result: PodExplanation, pod: Pod, snapshot: ClusterSnapshot | None) -> None:
    scheduled = pod.condition("PodScheduled")
    queued = pod.gated_by(QUEUE_GATE)
    result.message = scheduled.message if scheduled and not queued else ""
    if result.message:
        result.events = [event for event in result.events if not event.endswith(result.message)]
    if result.state == "gated":
        gates = (gate.name for gate in pod.spec.scheduling_gates if gate.name != QUEUE_GATE)
        result.hints = [f"its scheduling gates must be removed by their owner: {', '.join(gates)}"]
        return
    if queued:
        result.notes.append(
            f"the scheduling gate {QUEUE_GATE} keeps it from kube-scheduler until its turn comes: "
            "fenka queue shows its position"
        )
    elif not result.message:
        result.notes.append(
            f"{pod.spec.scheduler_name or 'the scheduler'} has not reported on it yet: it has "
            "just been created, or no scheduler of that name runs"
        )
    result.extender = _extender(result.message)
    try:
        if not pod.demand().amounts:
            result.hints = ["nothing of fenka's keeps it: the scheduler's message has the reason"]
            return
        if snapshot is None:
            return
        verdicts = explain_nodes(pod, snapshot)
    except InvalidRecord as why:
        result.hints = [f"it can never start as it is: {why}"]
        return
    result.nodes, result.sentence = verdicts.nodes, verdicts.sentence
    result.notes += verdicts.notes
    result.hints = verdicts.hints


def _extender(message: str) -> str:
    if any(phrase in message for phrase in EXTENDER_PHRASES):
        return "the extender was asked, and says no"
    if any(f"Insufficient {name}" in message for name in COUNTED):
        return (
            "kube-scheduler says no by itself, from the units of whole nodes; for those nodes the extender "
            "was not asked"
        )
    return ""
