"""Brings running pods to the sizes that their users have wished for by annotation (dialects/resize.py).

Level-triggered as the agent is: each pass compares what is wished, what is in force (the control page), what
the store says and what is recorded on the pod, and does what is missing. What grows is recorded first on the
pod, then in the store and in the node's report, and then put in force; what shrinks is put in force first.
So a program killed at any moment leaves records of at least what programs may use, and the next pass
completes it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from fenka.cluster.objects import Pod
from fenka.cluster.state import read_allocation
from fenka.core.errors import FenkaError
from fenka.core.inventory import Card
from fenka.core.request import Slice
from fenka.dialects import gpushare
from fenka.dialects.base import ContainerKind, ContainerUnits, InvalidRecord, SharedNode
from fenka.dialects.resize import (
    REFUSED,
    REQUEST,
    STATUS,
    ResizeRequest,
    ResizeStatus,
    decode_request,
    decode_status,
    encode_status,
)
from fenka.isolation import control, resize
from fenka.isolation.account import InvalidAccount
from fenka.isolation.control import InvalidControl, Limit
from fenka.isolation.files import MIB, card_limits
from fenka.isolation.resize import InUse
from fenka.kubernetes.client import ApiError, ApiUnreachable
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.resolve import MEMORY, shortages
from fenka.node.lease.store import Lease, LeaseStore, Token
from fenka.node.node_api import NodeApi

_LOG = logging.getLogger(__name__)

NAMES = 3
"""Pods to name of those that hold a card."""

Parts = dict[str, list[Slice]]
"""What containers hold, by token; in the order of their control page."""


class ResizeRejected(FenkaError):
    """Nothing is changed; one sentence for the pod's user. kind: the same while only its numbers change."""

    def __init__(self, sentence: str, kind: str = "") -> None:
        super().__init__(sentence)
        self.kind = kind or sentence


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """Of the node. others: what pods hold, by UID, as long as anything of them lives. names: theirs."""

    share: SharedNode
    others: Mapping[str, Sequence[Slice]]
    names: Mapping[str, str]


class Resizer:
    """One pass after the other. binding: held by whoever gives slices away. report: tells the scheduler what
    the store says."""

    def __init__(
        self,
        cluster: NodeApi,
        store: LeaseStore,
        leases: LeaseFiles,
        contexts_mib: Mapping[str, int],
        binding: asyncio.Lock,
        report: Callable[[], Awaitable[None]],
    ) -> None:
        self._cluster, self._store, self._leases = cluster, store, leases
        self._contexts_mib, self._binding, self.report = contexts_mib, binding, report
        self._refused: dict[str, tuple[str, str]] = {}
        """Wish and kind of refusal, by UID: what was said already."""

    async def look(self, room: Callable[[], NodeCapacity]) -> None:
        """One pass. room: as it is whenever asked."""
        tokens: dict[str, list[Token]] = {}
        for token in self._store.tokens.values():
            if token.lease is not None:
                tokens.setdefault(token.lease.uid, []).append(token)
        for uid in self._refused.keys() - tokens.keys():
            del self._refused[uid]
        for uid, own in tokens.items():
            pod = self._cluster.pods.get(uid)
            # While containers are still to come, nobody knows all that the pod holds.
            if pod is None or pod.status.phase != "Running" or not _touched(pod, own):
                continue
            try:
                await PodResize(self, pod, own, room).run()
            except (ApiError, ApiUnreachable, OSError, InvalidControl, InvalidAccount) as why:
                _LOG.warning("%s is resized later: %s", pod.full_name, why)

    # ---- for PodResize ----

    async def write(self, pod: Pod, annotations: Mapping[str, str | None]) -> None:
        """On the pod. Raises ApiError, ApiUnreachable."""
        await self._cluster.annotate(pod, annotations)

    def in_force(self, token: Token) -> list[Slice]:
        """What its programs may use now. Raises OSError, InvalidControl."""
        assert token.lease is not None
        if token.lease.limits_mib:  # its node does not isolate
            return list(token.lease.slices)
        page = self._leases.control(token.name)
        limits = control.read_interrupted(page).limits
        if [it.uuid for it in limits] != [it.uuid for it in token.lease.slices]:
            raise InvalidControl(f"{page}: has other cards than its lease")
        return [_of_limit(*it) for it in zip(token.lease.slices, limits, strict=True)]

    async def keep(self, names: Collection[str], parts: Parts, holds: Sequence[Slice]) -> None:
        """The store has these; the lock is held. Raises OSError."""
        for name in names:
            token = self._store.tokens.get(name)
            if token is None or token.lease is None:
                continue
            resized = token.lease.resized or parts[name] != token.lease.slices
            lease = msgspec.structs.replace(
                token.lease, slices=list(parts[name]), holds=list(holds), resized=resized
            )
            if lease != token.lease:
                changed = msgspec.structs.replace(token, lease=lease)
                await asyncio.to_thread(self._store.put, changed)

    def check_use(self, token: Token, before: Sequence[Slice], after: Sequence[Slice]) -> None:
        """Raises InUse, OSError, InvalidAccount."""
        limits = self._limits(token, before), self._limits(token, after)
        resize.check(self._leases.slots(token.name), *limits)

    def put_in_force(self, token: Token, slices: Sequence[Slice]) -> None:
        """For its programs. Raises InUse, OSError, InvalidControl, InvalidAccount."""
        page, slots = self._leases.control(token.name), self._leases.slots(token.name)
        resize.resize(page, slots, self._limits(token, slices))

    def _limits(self, token: Token, slices: Sequence[Slice]) -> tuple[Limit, ...]:
        assert token.lease is not None
        lease = msgspec.structs.replace(token.lease, slices=list(slices))
        return card_limits(slices, self._contexts_mib, lease.compute)

    @property
    def binding(self) -> asyncio.Lock:
        """Held while slices are given away."""
        return self._binding

    def pods(self) -> Collection[Pod]:
        """Of this node."""
        return self._cluster.pods.values()

    def refuse(self, pod: Pod, why: ResizeRejected) -> bool:
        """Say it in an event, unless it was said; whether it was not."""
        said = pod.metadata.annotations.get(REQUEST, ""), why.kind
        again = self._refused.get(pod.metadata.uid) == said
        self._refused[pod.metadata.uid] = said
        if not again:
            self._cluster.pod_event(pod.metadata.uid, "FenkaNotResized", str(why))
        return not again

    def granted(self, pod: Pod) -> None:
        """What was refused before may be refused anew."""
        self._refused.pop(pod.metadata.uid, None)


class PodResize:
    """One pod in one pass."""

    def __init__(
        self, resizer: Resizer, pod: Pod, tokens: Sequence[Token], room: Callable[[], NodeCapacity]
    ) -> None:
        self._resizer, self._pod, self._room = resizer, pod, room
        self._annotations = dict(pod.metadata.annotations)
        cards = room().share.node.cards
        self._tokens = {it.name: it for it in tokens if not is_whole(it, cards)}

    async def run(self) -> None:
        """Raises ApiError, ApiUnreachable, OSError, InvalidControl,
        InvalidAccount: then the next pass goes on."""
        before = {
            name: await asyncio.to_thread(self._resizer.in_force, token)
            for name, token in self._tokens.items()
        }
        wish = self._annotations.get(REQUEST)
        refusal = None
        try:
            after = before if wish is None else self._wanted(wish, before)
            await self._transition(before, after, wish)
        except ResizeRejected as why:
            refusal = why
            await self._transition(before, before, None)
        if refusal is None:
            self._resizer.granted(self._pod)
            await self._write({REFUSED: None})
        elif self._resizer.refuse(self._pod, refusal) or REFUSED not in self._annotations:
            await self._write({REFUSED: str(refusal)})

    def _wanted(self, text: str, before: Parts) -> Parts:
        share = self._room().share
        try:
            wishes = decode_request(text, share.unit_mib)
        except InvalidRecord as why:
            raise ResizeRejected(str(why)) from None
        if not self._tokens:
            raise ResizeRejected("the pod holds whole cards: there is nothing to resize")
        after = dict(before)
        for name, token in named(wishes, self._tokens.values(), self._pod).items():
            assert token.lease is not None
            if token.lease.limits_mib:
                raise ResizeRejected(
                    f"nothing limits container {token.lease.container}, since its node does not isolate: "
                    f"there is nothing to resize"
                )
            after[token.name] = changed(before[token.name], wishes[name], share.node.cards)
        return after

    async def _transition(self, before: Parts, after: Parts, wish: str | None) -> None:
        """From what is in force to what shall be. Raises ResizeRejected: then what was in force
        is, and what is recorded may be more."""
        larger = {name: _larger(before[name], after[name]) for name in before}
        if larger != before:
            self._check_room(before, larger)
            await self._check_use(before, after)
            await self._record(larger, None)
            async with self._resizer.binding:
                # Others may have come while the API server was asked.
                self._check_room(before, larger)
                await self._resizer.keep(larger, larger, self._peak(larger))
            await self._resizer.report()
        async with self._resizer.binding:
            await self._put_in_force(before, after)
            await self._resizer.keep(after, after, self._peak(after))
        await self._record(after, wish)

    async def _check_use(self, before: Parts, after: Parts) -> None:
        """So that a wish that can only be refused writes nothing."""
        try:
            for name in after:
                await self._do(self._resizer.check_use, name, before[name], after[name])
        except (InUse, InvalidAccount) as why:
            raise ResizeRejected(str(why), "in use") from None

    async def _put_in_force(self, before: Parts, after: Parts) -> None:
        # What can be refused comes first: then only what has shrunk must be undone, for which there is room.
        names = [name for name in after if after[name] != before[name]]
        names.sort(key=lambda name: not _shrinks(before[name], after[name]))
        done: list[str] = []
        try:
            for name in names:
                await self._do(self._resizer.put_in_force, name, after[name])
                done.append(name)
        except (InUse, InvalidAccount) as why:
            for name in done:
                await self._do(self._resizer.put_in_force, name, before[name])
            raise ResizeRejected(str(why), "in use") from None

    async def _do(self, work: Callable[..., None], name: str, *parts: Sequence[Slice]) -> None:
        await asyncio.to_thread(work, self._tokens[name], *parts)

    async def _record(self, parts: Parts, wish: str | None) -> None:
        """Say on the pod what it holds; nothing where that is what its scheduler has written."""
        uid = self._pod.metadata.uid
        try:
            former = decode_status(self._annotations, uid)
        except InvalidRecord:
            former = None
        as_placed = parts == {name: it.slices for name, it in self._leases() if not it.resized}
        if as_placed and wish is None and STATUS not in self._annotations:
            return
        record = ResizeStatus(
            uid,
            tuple(self._peak(parts)),
            {self._container(name): tuple(part) for name, part in parts.items()},
            wish if wish is not None else former.request if former else "",
        )
        await self._write({STATUS: encode_status(record)})

    async def _write(self, annotations: Mapping[str, str | None]) -> None:
        different = {
            key: value for key, value in annotations.items() if self._annotations.get(key) != value
        }
        if not different:
            return
        await self._resizer.write(self._pod, different)
        for key, value in different.items():
            if value is None:
                self._annotations.pop(key, None)
            else:
                self._annotations[key] = value

    def _leases(self) -> Iterator[tuple[str, Lease]]:
        """As they were when the pass began."""
        return ((name, it.lease) for name, it in self._tokens.items() if it.lease)

    def _container(self, name: str) -> str:
        lease = self._tokens[name].lease
        assert lease is not None
        return lease.container

    def _peak(self, parts: Parts) -> list[Slice]:
        return peak({self._container(name): part for name, part in parts.items()}, self._pod)

    def _check_room(self, before: Parts, after: Parts) -> None:
        room = self._room()
        others = {uid: it for uid, it in room.others.items() if uid != self._pod.metadata.uid}
        names = dict(room.names)
        for pod in self._resizer.pods():
            # Placed here, with no lease yet.
            uid = pod.metadata.uid
            if uid in room.others or uid == self._pod.metadata.uid or pod.finished:
                continue
            holding = read_allocation(room.share, pod)
            if holding is not None and holding.error is None:
                others[uid] = holding.slices
                names[uid] = pod.full_name
        check_room(self._peak(before), self._peak(after), others, room.share.node.cards, names)


# ---- values in, values out ----


def as_in_force(lease: Lease, limits: Sequence[Limit], cards: Collection[Card]) -> Lease:
    """A lease that is made anew although its control page is there: the store was lost.

    The page says what its programs may use, and not the pod's record, which its owner can write.
    Raises InvalidControl.
    """
    placed: dict[str, Slice] = {it.uuid: it for it in lease.slices}
    by_uuid: dict[str, Card] = {card.uuid: card for card in cards}
    slices = []
    for limit in limits:
        card = by_uuid.get(limit.uuid)
        if card is None:
            raise InvalidControl(
                f"the control page of {lease.pod} has card {limit.uuid}, which is not here"
            )
        piece = placed.get(limit.uuid, Slice(card.index, card.uuid, 0, 0))
        slices.append(_of_limit(piece, limit))
    there = {it.uuid for it in slices}
    return msgspec.structs.replace(
        lease,
        slices=slices,
        holds=[it for it in lease.holds if it.uuid in there],
        resized=slices != lease.slices,
    )


def with_peak(lease: Lease, siblings: Iterable[Lease], pod: Pod) -> Lease:
    """The lease, whose pod holds at least what its containers may use at its peak."""
    parts: dict[str, Sequence[Slice]] = {it.container: it.slices for it in siblings}
    needed = {it.uuid: it for it in peak({**parts, lease.container: lease.slices}, pod)}
    holds = {it.uuid: it for it in lease.holds}
    for uuid, piece in needed.items():
        (holds[uuid],) = _larger([holds.get(uuid, piece)], [piece])
    return msgspec.structs.replace(lease, holds=sorted(holds.values(), key=lambda it: it.card))


def is_whole(token: Token, cards: Collection[Card]) -> bool:
    """Whether it has its cards for itself: no part of them was asked for."""
    lease, sizes = token.lease, {card.uuid: card.memory_mib for card in cards}
    if lease is None or token.resource == gpushare.MEMORY:
        return False
    return all(
        it.memory_mib >= sizes.get(it.uuid, 0) and it.compute in (0, 100) for it in lease.slices
    )


def named(wishes: Iterable[str], tokens: Collection[Token], pod: Pod) -> dict[str, Token]:
    """Whose token each wish is for. Raises ResizeRejected.

    One without a name is for the only container that has a lease; init containers, which have ended when the
    others run, only if there is no other.
    """
    by_name = {it.lease.container: it for it in tokens if it.lease}
    kinds = _kinds(pod)
    running = [name for name in by_name if kinds.get(name) is not ContainerKind.INIT] or list(
        by_name
    )
    found = {}
    for name in wishes:
        if not name and len(running) > 1:
            first = running[0]
            raise ResizeRejected(
                f"the pod has {len(running)} containers with a slice ({', '.join(running)}): say which, "
                f"as {first}: gpu-mem=6"
            )
        if name and name not in by_name:
            raise ResizeRejected(f"the pod has no container {name} with a slice of a card")
        found[name] = by_name[name or running[0]]
    return found


def changed(slices: Sequence[Slice], wish: ResizeRequest, cards: Collection[Card]) -> list[Slice]:
    """The slices as they are wished for. Raises ResizeRejected."""
    sizes = {card.uuid: card.memory_mib for card in cards}

    def one(piece: Slice) -> Slice:
        mib: int | None = piece.memory_mib
        if wish.memory is not None:
            mib = wish.memory.mib_on(sizes.get(piece.uuid, 0))
        if mib is None:
            size = sizes.get(piece.uuid, 0)
            raise ResizeRejected(
                f"card {piece.card} has {size} MiB: {wish.memory.nominal_mib if wish.memory else 0} MiB "
                f"are more than all of it"
            )
        return replace(
            piece,
            memory_mib=mib,
            compute=piece.compute if wish.compute is None else wish.compute,
        )

    return [one(piece) for piece in slices]


def peak(parts: Mapping[str, Sequence[Slice]], pod: Pod) -> list[Slice]:
    """What the pod holds of each card at its peak. parts: by container."""
    kinds = _kinds(pod)
    order = {name: number for number, name in enumerate(kinds)}
    of_card: dict[str, list[tuple[str, Slice]]] = {}
    for name in sorted(parts, key=lambda it: order.get(it, len(order))):
        for piece in parts[name]:
            of_card.setdefault(piece.uuid, []).append((name, piece))

    def most(held: Sequence[tuple[str, Slice]], amount: Callable[[Slice], int]) -> int:
        return gpushare.peak_units(
            ContainerUnits(name, amount(piece), kinds.get(name, ContainerKind.APP))
            for name, piece in held
        )

    found = (
        replace(
            held[0][1],
            memory_mib=most(held, lambda it: it.memory_mib),
            compute=most(held, lambda it: it.compute),
        )
        for held in of_card.values()
    )
    return sorted(found, key=lambda it: it.card)


def _kinds(pod: Pod) -> dict[str, ContainerKind]:
    """Of its containers, in the order in which they run."""
    inits = {
        it.name: ContainerKind.SIDECAR if it.restart_policy == "Always" else ContainerKind.INIT
        for it in pod.spec.init_containers
    }
    return inits | dict.fromkeys((it.name for it in pod.spec.containers), ContainerKind.APP)


def check_room(
    before: Sequence[Slice],
    after: Sequence[Slice],
    others: Mapping[str, Sequence[Slice]],
    cards: Collection[Card],
    names: Mapping[str, str],
) -> None:
    """Whether a pod may grow beside others, which are known by UID. Raises ResizeRejected."""
    known, had = {card.uuid: card for card in cards}, {it.uuid: it for it in before}
    for piece in after:
        card, former = known.get(piece.uuid), had.get(piece.uuid)
        if former == piece:
            continue
        if card is None or not card.healthy:
            raise ResizeRejected(
                f"card {piece.card} does not work now: nothing grows on it", "sick"
            )
        for it in shortages(piece, card, others, names):
            if former is None or _amount(piece, it.of) > _amount(former, it.of):
                by = f", of which {_listed(it.by)} hold {it.held}" if it.held else ""
                raise ResizeRejected(
                    f"card {piece.card} has {it.total} {it.of}{by}: {it.wanted} do not fit",
                    f"room {it.of}",
                )


def _amount(piece: Slice, of: str) -> int:
    return piece.memory_mib if of == MEMORY else piece.compute


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMES
    return ", ".join(names[:NAMES]) + (f" and {more} more" if more > 0 else "")


def _touched(pod: Pod, tokens: Iterable[Token]) -> bool:
    return any(it in pod.metadata.annotations for it in (REQUEST, STATUS, REFUSED)) or any(
        it.lease.resized for it in tokens if it.lease
    )


def _of_limit(piece: Slice, limit: Limit) -> Slice:
    """What the page says of a slice; 100 % there is what the slice says, or no limit."""
    same = limit.compute_percent == (piece.compute or 100)
    compute = piece.compute if same else limit.compute_percent % 100
    return replace(piece, memory_mib=limit.memory_bytes // MIB, compute=compute)


def _larger(one: Sequence[Slice], other: Sequence[Slice]) -> list[Slice]:
    return [
        replace(a, memory_mib=max(a.memory_mib, b.memory_mib), compute=max(a.compute, b.compute))
        for a, b in zip(one, other, strict=True)
    ]


def _shrinks(before: Sequence[Slice], after: Sequence[Slice]) -> bool:
    return any(b.memory_mib < a.memory_mib for a, b in zip(before, after, strict=True))
