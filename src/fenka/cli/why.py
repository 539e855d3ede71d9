"""`fenka why POD`: the whole answer to "why is it pending?"."""

import asyncio
import re
from collections.abc import Iterable, Sequence

import msgspec

from fenka.cli import cluster, pending, tables
from fenka.cli.cluster import Cluster, Target
from fenka.cli.pending import FullPod, NodeVerdict
from fenka.cluster.objects import QUEUE_GATE, Object, ObjectMeta, pod_path
from fenka.dialects import ack, base, gpushare
from fenka.dialects.base import InvalidRecord
from fenka.kubernetes.client import Api

NAMES = 3
"""Nodes to name of those that have the same reasons."""

EVENTS = 5
"""The newest warnings to show."""

SCHEDULING = ("FailedScheduling", "FenkaUnschedulable")
"""Reasons of events that are over once the pod is on a node."""

EXTENDERS_WORDS = ("GPUs fit", "Insufficient GPU Memory in one device", "is not for GPU share")
"""What fenka's extender, or gpushare's, says in kube-scheduler's message."""


class Series(Object):
    """Of an event that happened again."""

    last_observed_time: str = ""


class Event(Object):
    """Of an object."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    type: str = ""
    reason: str = ""
    message: str = ""
    last_timestamp: str | None = None
    event_time: str | None = None
    series: Series | None = None

    @property
    def at(self) -> str:
        """When it happened last: ISO 8601, so that it sorts."""
        again = self.series.last_observed_time if self.series else ""
        return again or self.last_timestamp or self.event_time or self.metadata.creation_timestamp


class Answer(msgspec.Struct):
    """What `fenka why` knows of a pod."""

    namespace: str
    pod: str
    state: str
    """gated, pending, starting, running, succeeded, failed or terminating."""
    summary: str
    scheduler: str = ""
    said: str = ""
    """The scheduler's own message."""
    asked: str = ""
    """Whether the extender was in the path, as far as that shows."""
    slices: list[str] = []
    containers: list[str] = []
    """Why containers wait."""
    nodes: list[NodeVerdict] = []
    sentence: str = ""
    notes: list[str] = []
    events: list[str] = []
    help: list[str] = []


def explain(target: Target, name: str, namespace: str, *, output: str) -> None:
    """Print the answer. Raises UserError where there is no such pod."""
    before, slash, after = name.partition("/")
    if slash:
        namespace, name = before, after
    namespace = namespace or cluster.namespace(target)

    async def question(api: Api) -> Answer:
        return await _ask(api, namespace, name)

    answer = cluster.ask(target, question)
    if not tables.show(answer, output):
        tables.put(screen(answer))


async def _ask(api: Api, namespace: str, name: str) -> Answer:
    # The pod first: for one that is not there, nothing else needs to be asked.
    pod = await api.get(pod_path(namespace, name), FullPod)
    waits = not pod.spec.node_name and not pod.finished
    told = api.list(
        f"/api/v1/namespaces/{namespace}/events",
        Event,
        fieldSelector=f"involvedObject.name={name},involvedObject.uid={pod.metadata.uid}",
    )
    around = cluster.nodes_and_pods(api, None if waits else pod.spec.node_name or None)
    if pod.finished:
        around.close()
        (events, _) = await told
        return answer(pod, cluster.gathered([], []), events)
    (events, _), (nodes, pods), sick = await asyncio.gather(told, around, cluster.sick(api))
    return answer(pod, cluster.gathered(nodes, pods, sick), events)


def answer(pod: FullPod, around: Cluster, events: Iterable[Event]) -> Answer:
    """From the pod, what is around it, and its events."""
    state, asks = _state(pod), _asks(pod)
    result = Answer(
        pod.metadata.namespace,
        pod.metadata.name,
        state,
        f"{pod.full_name} is {state}: it asks for {asks}.",
        scheduler=pod.spec.scheduler_name,
        containers=_containers(pod),
        events=_warnings(events, placed=bool(pod.spec.node_name)),
    )
    if pod.finished:
        said = " ".join(filter(None, (pod.status.reason, pod.status.message)))
        result.notes = [said] if said else []
    elif pod.spec.node_name:
        _add_place(result, pod, around)
    else:
        _add_wait(result, pod, around)
    return result


def _state(pod: FullPod) -> str:
    if pod.metadata.deletion_timestamp:
        return "terminating"
    if pod.spec.node_name or pod.finished:
        return "starting" if pod.status.phase == "Pending" else pod.status.phase.lower()
    gates = {it.name for it in pod.spec.scheduling_gates}
    return "gated" if gates - {QUEUE_GATE} else "pending"


def _asks(pod: FullPod) -> str:
    try:
        amounts, cards = pending.amounts(pod), gpushare.card_count(pod.metadata.labels)
    except InvalidRecord:
        # Why is among what helps.
        return "cards in a way that cannot be read"
    if pod.whole and len(amounts) == 1:
        return f"{pod.whole} whole card{'s' if pod.whole > 1 else ''} ({base.NVIDIA_GPU})"
    if not amounts:
        return f"no GPU ({gpushare.MEMORY} in no container's limits)"
    if gpushare.MEMORY not in amounts:
        return " and ".join(f"{amount} of {name}" for name, amount in amounts.items())
    where = "one card" if cards == 1 else f"{cards} cards of one node"
    core = amounts.get(ack.CORE)
    percent = f", and {core} of {ack.CORE}" if core else ""
    return f"{amounts[gpushare.MEMORY]} units of {gpushare.MEMORY} on {where}{percent}"


def _containers(pod: FullPod) -> list[str]:
    statuses = [*pod.status.init_container_statuses, *pod.status.container_statuses]
    return [
        f"{it.name}: {it.state.waiting.reason}"
        + (f": {it.state.waiting.message}" if it.state.waiting.message else "")
        for it in statuses
        if it.state.waiting is not None
    ]


def _warnings(events: Iterable[Event], *, placed: bool) -> list[str]:
    """The newest first, one of each reason: what the scheduler said before it found a node is over."""
    newest: dict[str, Event] = {}
    for it in sorted(events, key=lambda event: event.at):
        if it.type == "Warning" and not (placed and it.reason in SCHEDULING):
            newest[it.reason] = it
    ordered = sorted(newest.values(), key=lambda event: event.at, reverse=True)
    return [f"{it.reason}: {it.message}" for it in ordered[:EVENTS]]


def _add_place(result: Answer, pod: FullPod, around: Cluster) -> None:
    """The pod is on a node: where, and what that node makes of it."""
    share = around.world.shared_node(pod.spec.node_name)
    held = around.world.allocation(pod.metadata.uid)
    if share is not None and held is not None:
        if held.error:
            result.notes.append(held.error)
            result.help.append(
                "delete the pod once kube-scheduler asks the extender (docs/kubernetes.md): its "
                "successor gets a card"
            )
        else:
            units = gpushare.shown_units(share, held.slices)
            result.slices = [
                f"{units[it.card]:g} units ({it.memory_mib} MiB) of card {it.card} on "
                f"{held.node}" + (f", {it.uuid}" if it.uuid else "")
                for it in held.slices
            ]
    _add_refusals(result, pod, around)
    if not result.slices:
        result.notes.insert(0, f"it is on node {pod.spec.node_name}")
    if result.containers and result.state == "starting":
        result.help.append("it starts by itself once what its containers wait for is there")


def _add_refusals(result: Answer, pod: FullPod, around: Cluster) -> None:
    """What the node reports of pods that it does not start: of this one, and of those that it keeps out."""
    refused = around.world.refusals(pod.spec.node_name)
    mine = refused.get(pod.metadata.uid)
    if mine is not None:
        result.notes.append(f"its node has refused it for more than a minute: {mine.sentence}")
        if mine.movable:
            result.help.append(
                "it is evicted if a controller makes another; else delete it and create it again"
            )
    named = re.compile(rf"(?<![\w./-]){re.escape(pod.full_name)}(?![\w./-])")
    names = {it.metadata.uid: it.full_name for it in around.pods}
    result.notes += [
        f"{names[uid]} was placed on the same card and does not start: {it.sentence}"
        for uid, it in sorted(refused.items())
        if uid in names and uid != pod.metadata.uid and named.search(it.sentence)
    ]


def _add_wait(result: Answer, pod: FullPod, around: Cluster) -> None:
    """The pod is on no node."""
    condition = next((it for it in pod.status.conditions if it.type == "PodScheduled"), None)
    waits_for_turn = pod.gated_by(QUEUE_GATE)
    result.said = condition.message if condition and not waits_for_turn else ""
    result.events = [it for it in result.events if not (result.said and it.endswith(result.said))]
    if result.state == "gated":
        gates = ", ".join(it.name for it in pod.spec.scheduling_gates if it.name != QUEUE_GATE)
        result.help = [f"whoever put its scheduling gates there must take them away: {gates}"]
        return
    if waits_for_turn:
        result.notes.append(
            f"the scheduling gate {QUEUE_GATE} keeps it from kube-scheduler until its turn comes: "
            "fenka queue shows its position"
        )
    elif not result.said:
        result.notes.append(
            f"{pod.spec.scheduler_name or 'the scheduler'} has not said anything of it yet: it has "
            "just been created, or no scheduler of that name runs"
        )
    result.asked = _asked(result.said)
    try:
        if not pending.amounts(pod):
            result.help = ["nothing of fenka's keeps it: the scheduler's message has the reason"]
            return
        judgement = pending.judge(pod, around)
    except InvalidRecord as why:
        result.help = [f"it can never start as it is: {why}"]
        return
    result.nodes, result.sentence = judgement.nodes, judgement.sentence
    result.notes += judgement.notes
    result.help = judgement.help


def _asked(said: str) -> str:
    if any(words in said for words in EXTENDERS_WORDS):
        return "the extender was asked, and says no"
    if any(f"Insufficient {name}" in said for name in pending.COUNTED):
        return (
            "kube-scheduler says no by itself, from the units of whole nodes; for those nodes the extender "
            "was not asked"
        )
    return ""


# ---- the screen ----


def screen(it: Answer) -> list[str]:
    """The answer as text."""
    lines = [it.summary]
    lines += [f"It holds {piece}." for piece in it.slices]
    if it.said:
        lines += ["", f"{it.scheduler} says: {it.said}"]
        lines += [f"That is: {it.asked}."] if it.asked else []
    lines += _section("Its containers wait:", it.containers)
    if it.nodes:
        lines += ["", *tables.fit([("NODE", "VERDICT"), *_grouped(it.nodes)])]
    lines += ["", f"By the cards: {it.sentence}."] if it.sentence else []
    lines += _section("To be known:", it.notes)
    lines += _section("Warnings, the newest first:", it.events)
    return [*lines, *_section("What helps:", it.help)]


def _section(title: str, items: Sequence[str]) -> list[str]:
    return ["", title, *(f"  - {item}" for item in items)] if items else []


def _grouped(nodes: Sequence[NodeVerdict]) -> list[tuple[str, str]]:
    """Nodes with the same reasons share a line; those that have no GPU come last."""
    groups: dict[tuple[bool, str], list[str]] = {}
    for it in sorted(nodes, key=lambda node: not node.gpu):
        verdict = "has room" if it.fits else "; ".join(it.reasons)
        groups.setdefault((it.gpu, verdict), []).append(it.node)
    return [(_names(names), verdict) for (_, verdict), names in groups.items()]


def _names(names: Sequence[str]) -> str:
    more = len(names) - NAMES
    return ", ".join(names[:NAMES]) + (f" and {more} more" if more > 0 else "")
