"""What the extender answers, as functions of the world: filter, prioritize and preempt. No I/O, no clock."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from fenka.core.cards import Card, Node
from fenka.core.evaluate import Empty, Fit, Policy, View, evaluate, never_fits
from fenka.core.ledger import Tally
from fenka.core.reasons import Rejected, Rejection, Why
from fenka.core.requests import Placement, Request
from fenka.dialects import gpushare
from fenka.dialects.gpushare import Share, Unreadable
from fenka.kubernetes.objects import Pod
from fenka.kubernetes.world import Holding, World

BEST, REST = 10, 8
"""Scores that kube-scheduler takes are 0 to 10. The best node alone has 10, and two points before the next
outweigh all of kube-scheduler's own scores at the weight that the documentation names."""

TOO_LITTLE = "Insufficient GPU Memory in one device"
"""gpushare's words, which people search for."""

_SHAPES = 64
"""Requests of so many different sizes are remembered."""


@dataclass(frozen=True, slots=True)
class No:
    """Why a node does not do. hopeless: nor would it if nothing were held there."""

    sentence: str
    hopeless: bool
    rejection: Rejection | None = None
    """Card by card, where that is the reason."""


@dataclass(frozen=True, slots=True)
class Filtered:
    """Nodes that fit, in the order in which they were named; and sentences for those that do not."""

    fitting: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    hopeless: dict[str, str] = field(default_factory=dict)


class Judge:
    """Judges nodes for pods, and remembers the verdicts until the node changes.

    A cluster's pods come in few sizes: of a thousand nodes those few are judged again that changed.
    """

    def __init__(self, world: World, policy: Policy) -> None:
        self._world, self._policy = world, policy
        self._memory: OrderedDict[Request, dict[str, tuple[int, Fit | No]]] = OrderedDict()

    def filter(self, pod: Pod, names: Iterable[str]) -> Filtered:
        """Which of the nodes the pod fits. Nothing is reserved: the pod may yet go nowhere."""
        answer = Filtered()
        for name, verdict in self.judge(pod, names):
            if isinstance(verdict, No):
                (answer.hopeless if verdict.hopeless else answer.failed)[name] = verdict.sentence
            else:
                answer.fitting.append(name)
        return answer

    def prioritize(self, pod: Pod, names: Sequence[str]) -> list[tuple[str, int]]:
        """A score for each node, in the order given: 10 for the best one, 8 down to 0 for the others.

        Equal nodes: the first by name, so that it is certain. 0 for all where nothing is asked for.
        """
        fits = [
            (verdict.score, name)
            for name, verdict in self.judge(pod, names)
            if isinstance(verdict, Fit)
        ]
        ranked = [name for _, name in sorted(fits)]
        scores = {
            name: BEST if rank == 0 else REST * (len(ranked) - 1 - rank) // max(len(ranked) - 2, 1)
            for rank, name in enumerate(ranked)
        }
        return [(name, scores.get(name, 0)) for name in names]

    def placement(self, pod: Pod, name: str) -> Placement | No | None:
        """Where on this node the pod goes; None if it asks for nothing."""
        ((_, verdict),) = self.judge(pod, (name,))
        return verdict.placement if isinstance(verdict, Fit) else verdict

    def judge(self, pod: Pod, names: Iterable[str]) -> list[tuple[str, Fit | No | None]]:
        """A verdict for each node; None where the pod asks for nothing."""
        world, wanted = self._world, _Wanted(pod)
        known: dict[int, tuple[Request, dict[str, tuple[int, Fit | No]]]] = {}
        verdicts: list[tuple[str, Fit | No | None]] = []
        for name in names:
            share = world.share(name)
            if share is None or wanted.trouble is not None or wanted.nothing:
                verdicts.append((name, self._without_request(wanted, name)))
                continue
            found = known.get(share.unit_mib)
            if found is None:
                try:
                    request = wanted.request(share.unit_mib)
                except Unreadable as why:
                    verdicts.append((name, No(str(why), hopeless=True)))
                    continue
                found = known[share.unit_mib] = request, self._of_shape(request)
            request, memory = found
            generation = world.generation(name)
            remembered = memory.get(name)
            if remembered is None or remembered[0] != generation:
                remembered = memory[name] = generation, self._judge(request, share)
            verdicts.append((name, remembered[1]))
        return verdicts

    def why(self, pod: Pod) -> str | None:
        """One sentence over all sharing nodes, for a pod that waits; None where one fits."""
        names = [share.node.name for share in self._world.shares()]
        verdicts = [verdict for _, verdict in self.judge(pod, names)]
        noes = [verdict for verdict in verdicts if isinstance(verdict, No)]
        if len(noes) < len(verdicts):
            return None
        rejections = tuple(no.rejection for no in noes if no.rejection is not None)
        if noes and not rejections:
            return noes[0].sentence
        hint = ""
        if all(no.hopeless for no in noes) and not (wanted := _Wanted(pod)).nothing:
            # Nothing that is held is to blame: say what could ever be had.
            usable = [
                it for it in self._world.shares() if not self._world.node_trouble(it.node.name)
            ]
            for unit in {share.unit_mib for share in usable}:
                nodes = [share.node for share in usable if share.unit_mib == unit]
                never = never_fits(wanted.request(unit), nodes)
                hint = never.hint if never else hint
        return Rejected(rejections, hint).sentence()

    def preempt(
        self, pod: Pod, node: str, victims: Collection[str], pods: Mapping[str, Pod]
    ) -> list[str] | None:
        """UIDs of the pods that must go so that this one fits on the node's cards; None where none help.

        victims: whom kube-scheduler would evict for its own reasons; they all stay victims. Others of lower
        priority are added where the cards need it: those of the least priority, and as few as do.
        pods: all, by UID.
        """
        if any(uid in pods and _priority(pods[uid]) >= _priority(pod) for uid in victims):
            return None
        wanted = _Wanted(pod)
        if wanted.nothing:
            return list(victims)
        share = self._world.share(node)
        if share is None or wanted.trouble or self._world.node_trouble(node):
            return None
        try:
            request = wanted.request(share.unit_mib)
        except Unreadable:
            return None
        held = [it for it in self._world.holdings(node) if it.pod.metadata.uid not in victims]
        weaker = sorted(
            (it for it in held if _priority(it.pod) < _priority(pod)),
            key=lambda it: (_priority(it.pod), _size(it), it.pod.metadata.uid),
        )
        # With one card: the cheapest card. With several: any of the node's, together.
        scopes = [replace(share.node, cards=(card,)) for card in share.node.cards]
        if request.cards > 1:
            scopes = [share.node]
        choices = []
        for scope in scopes:
            indexes = {card.index for card in scope.cards}
            near = [it for it in weaker if any(s.card in indexes for s in it.placement.slices)]
            extra = _fewest(held, near, request, scope)
            if extra is not None:
                choices.append((_cost(extra), [it.pod.metadata.uid for it in extra]))
        if not choices:
            return None
        return [*victims, *min(choices)[1]]

    def _of_shape(self, request: Request) -> dict[str, tuple[int, Fit | No]]:
        memory = self._memory.setdefault(request, {})
        self._memory.move_to_end(request)
        if len(self._memory) > _SHAPES:
            self._memory.popitem(last=False)
        return memory

    def _without_request(self, wanted: "_Wanted", name: str) -> No | None:
        if wanted.nothing:
            return None
        if wanted.trouble is not None:
            return No(wanted.trouble, hopeless=True)
        trouble = self._world.node_trouble(name)
        if trouble is not None:
            return No(trouble, hopeless=True)
        if self._world.node(name) is None:
            return No(f'node "{name}" not found', hopeless=True)
        return No(f"The node {name} is not for GPU share, need skip", hopeless=True)

    def _judge(self, request: Request, share: Share) -> Fit | No:
        node = share.node
        trouble = self._world.node_trouble(node.name)
        if trouble is not None:
            return No(trouble, hopeless=True)
        (verdict,) = evaluate(self._world, request, self._policy, (node,))
        if isinstance(verdict, Rejection):
            return No(sentence(verdict), _hopeless(request, tuple(map(_kind, node.cards))), verdict)
        policy = self._card_policy(node.name)
        if policy == self._policy:
            return verdict
        # Nodes are compared by one policy, cards chosen by the node's own.
        (own,) = evaluate(self._world, request, policy, (node,))
        return replace(own, score=verdict.score) if isinstance(own, Fit) else verdict

    def _card_policy(self, name: str) -> Policy:
        node = self._world.node(name)
        asked = node.metadata.labels.get(gpushare.PLACEMENT_LABEL) if node else None
        return asked if asked in ("binpack", "spread") else self._policy


def sentence(rejection: Rejection) -> str:
    """gpushare's words where they are true, and the counts."""
    counts = Rejected((rejection,)).sentence()
    memory = any(reason.why is Why.MEMORY for reason in rejection.reasons)
    return f"{TOO_LITTLE}: {counts}" if memory else counts


_Kind = tuple[int, int, str, bool, bool]


def _kind(card: Card) -> _Kind:
    return card.memory_mib, card.compute, card.model, card.healthy, card.cordoned


@lru_cache(maxsize=1024)
def _hopeless(request: Request, kinds: tuple[_Kind, ...]) -> bool:
    """Whether a node with such cards would not do even if it were empty. A cluster has few kinds of nodes."""
    cards = (
        Card(index, "", model, memory_mib, compute, healthy=healthy, cordoned=cordoned)
        for index, (memory_mib, compute, model, healthy, cordoned) in enumerate(kinds)
    )
    node = Node("any", tuple(cards))
    (verdict,) = evaluate(Empty(), request, "binpack", (node,))
    return isinstance(verdict, Rejection)


class _Wanted:
    """What a pod asks for, read once."""

    def __init__(self, pod: Pod) -> None:
        self._labels = pod.metadata.labels
        self.trouble: str | None = None
        self.nothing = False
        try:
            self._asks = pod.asks
            self.nothing = gpushare.demand(self._asks) == 0
        except Unreadable as why:
            self.trouble = str(why)

    def request(self, unit_mib: int) -> Request:
        """On nodes of this unit. Raises Unreadable."""
        request = gpushare.read_request(self._asks, self._labels, unit_mib)
        assert request is not None
        return request


def _priority(pod: Pod) -> int:
    return pod.spec.priority or 0


def _size(holding: Holding) -> int:
    return -sum(it.memory_mib for it in holding.placement.slices)


def _cost(victims: Sequence[Holding]) -> tuple[int, int, int, list[str]]:
    """The least important first, then the fewest, then the sum; ties by name."""
    priorities = [_priority(it.pod) for it in victims]
    return (
        max(priorities, default=-(2**31)),
        len(victims),
        sum(priorities),
        [it.pod.full_name for it in victims],
    )


def _fits(view: View, request: Request, node: Node) -> bool:
    (verdict,) = evaluate(view, request, "binpack", (node,))
    return isinstance(verdict, Fit)


def _fewest(
    held: Sequence[Holding], weaker: Sequence[Holding], request: Request, node: Node
) -> list[Holding] | None:
    """Of the weaker ones, who must go at least: all go, then the most important come back while it fits."""
    tally = Tally()
    going = {it.pod.metadata.uid for it in weaker}
    for it in held:
        if it.pod.metadata.uid not in going:
            tally.add(it.placement)
    if not _fits(tally, request, node):
        return None
    must_go = []
    for it in reversed(weaker):
        tally.add(it.placement)
        if not _fits(tally, request, node):
            tally.remove(it.placement)
            must_go.append(it)
    return must_go
