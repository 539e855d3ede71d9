"""Plans for pending pods, writes the plan's answer as orders, and launches these.

Pods that come together are planned for together. A launch that takes long holds back nothing else of a pass.
"""

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from msgspec.structs import replace as structs_replace

from fenka.autoscaler import plan_case
from fenka.autoscaler.actor_context import ActorContext
from fenka.autoscaler.demand import Demand, pending_demand
from fenka.autoscaler.metrics import ActivityCounts
from fenka.autoscaler.orders import answered, launchable, refused
from fenka.autoscaler.planner import PlanFailed, Planner
from fenka.autoscaler.snapshot import Snapshot, planned_cards
from fenka.autoscaler.stores import new_name, order_for
from fenka.autoscaler.supply import next_try, pauses
from fenka.autoscaler.watch import ElasticPod
from fenka.cloud.config import AutoscalerConfig, ScaleOut
from fenka.cloud.port import Order, Provider, ProviderError, Throttled, Unknown, in_parts
from fenka.cluster.autoscaling import ElasticNodeStatus, OrderRecord, Slot, encode_time
from fenka.core.nodes.case import PRICE_DECIMALS, PlanningCase
from fenka.core.nodes.plan import NewNodes, NodePlan

log = logging.getLogger(__name__)

SCALE_OUT, NO_SCALE_OUT = "FenkaScaleOut", "FenkaNoScaleOut"

REPLAN_S = 1.0
"""Between two plans, whatever changes."""
RETRY_MOST_S = 60.0
"""After a plan that failed. The first retry is after REPLAN_S; the pause doubles."""
REFUSAL_SETTLES_S = 3.0
"""Refusals are posted after this time: a gang's members are created one after the other, for example."""
REPEAT_S = 2.0
"""Between two requests for the same order, while the answer is lost."""
LAUNCH_TIMEOUT_S = 60.0
"""After this time without an answer the cloud is called again with the same token."""
WAIT_S = 1.0
"""Time in which a pass waits for answers; later ones are for the next passes."""
LOOK_S = 0.5
"""Between two passes while a call runs."""


class LaunchCalls:
    """Keeps the calls that run from one pass to the next."""

    def __init__(self) -> None:
        self._calls: dict[str, tuple[Order, asyncio.Task[Sequence[str] | ProviderError]]] = {}
        self._again_at: dict[str, float] = {}
        """When orders may be asked for again."""

    def forget(self) -> None:
        """Ask at once for what is not answered: another replica was the leader."""
        self._again_at.clear()

    def stop(self) -> None:
        """Cancel the calls. The next leader repeats them."""
        for _, call in self._calls.values():
            call.cancel()
        self._calls.clear()

    def due_at(self, now: float) -> Iterable[float]:
        """Return when the next pass must be made."""
        return (*self._again_at.values(), *([now + LOOK_S] if self._calls else ()))

    async def act(self, context: ActorContext) -> None:
        """Ask for written orders, and write what the cloud has answered by now."""
        snapshot = context.snapshot()
        unanswered = {
            name: launchable(snapshot.config.cluster, name, record)
            for name, record in context.orders.records.items()
            if any(slot.state == "written" for slot in record.slots)
        }
        self._again_at = {name: at for name, at in self._again_at.items() if name in unanswered}
        for name, order in unanswered.items():
            due = snapshot.now >= self._again_at.get(name, snapshot.now)
            if due and name not in self._calls and context.leading():
                self._calls[name] = order, asyncio.create_task(_launch(context.provider, order))
        if not self._calls:
            return
        await asyncio.wait([call for _, call in self._calls.values()], timeout=WAIT_S)
        if context.leading():
            await context.orders.save(self._answers(context))

    def _answers(self, context: ActorContext) -> dict[str, OrderRecord]:
        """Return the orders that are answered. An answer to another attempt counts for nothing."""
        snapshot, changed = context.snapshot(), dict[str, OrderRecord]()
        for name in [name for name, (_, call) in self._calls.items() if call.done()]:
            order, call = self._calls.pop(name)
            record, answer = context.orders.records.get(name), call.result()
            if (
                record is None
                or launchable(snapshot.config.cluster, name, record).token != order.token
            ):
                continue
            self._again_at.pop(name, None)
            if not isinstance(answer, ProviderError):
                changed[name] = answered(record, answer, snapshot.now)
                continue
            context.warnings.warn(f"order {name}", str(answer))
            changed[name] = refused(record, answer, snapshot.now)
            if changed[name].failure is None:
                pause = answer.after_s if isinstance(answer, Throttled) else REPEAT_S
                self._again_at[name] = snapshot.now + pause
        return changed


async def _launch(provider: Provider, order: Order) -> Sequence[str] | ProviderError:
    """Return the ids that are known by now, or why there are none."""
    try:
        async with asyncio.timeout(LAUNCH_TIMEOUT_S):
            return await provider.launch(order)
    except ProviderError as why:
        return why
    except TimeoutError:
        return Unknown("the cloud did not answer")


class Windows:
    """Follows which pods are pending and not planned for."""

    def __init__(self, settings: ScaleOut) -> None:
        self._settings = settings
        self._considered: set[str] = set()
        """Pods that a plan was made for."""
        self._new: set[str] = set()
        self._first_at = self._last_at = 0.0

    def see(self, uids: Collection[str], now: float) -> None:
        """Take these as all pods that are pending and not planned for."""
        self._considered.intersection_update(uids)
        self._new.intersection_update(uids)
        fresh = set(uids) - self._considered - self._new
        if not fresh:
            return
        if not self._new:
            self._first_at = now
        self._last_at = now
        self._new |= fresh

    def forget(self) -> None:
        """Take all pods as new ones at the next look."""
        self._considered.clear()
        self._new.clear()

    def due_at(self) -> float | None:
        """Return when to plan for the new pods, None if there are none."""
        if not self._new:
            return None
        settings = self._settings
        return min(self._last_at + settings.window, self._first_at + settings.window_most)

    def planned(self) -> None:
        """Note that a plan was made for all that were seen."""
        self._considered |= self._new
        self._new.clear()


MAX_NODES = 100
"""Of one order: what clouds accept in one call."""


def purchases(
    snapshot: Snapshot, case: plan_case.PlanCase, plan: NodePlan
) -> dict[str, OrderRecord]:
    """Return the new orders of a plan, and those whose coming nodes get more pods."""
    placed = plan_case.planned_by_node(plan)
    gang_members = {request.name for request in case.case.requests if request.gang is not None}
    changed: dict[str, OrderRecord] = {}
    for new in plan.nodes:
        offer = case.offers[new.group]
        config = snapshot.group(offer.group)
        price = next(group.price for group in case.case.groups if group.name == new.group)
        for names in in_parts(list(plan_case.new_slots(new.group, new.count)), MAX_NODES):
            pods = [placed.get(name, []) for name in names]
            in_gang = any(request in gang_members for of_node in pods for request, _ in of_node)
            name = new_name(offer.group, snapshot.now, {*snapshot.orders, *changed})
            changed[name] = order_for(
                offer,
                slots=tuple(_with_pods(snapshot, Slot(), case, of_node) for of_node in pods),
                state="written",
                price=price,
                written_at=snapshot.now,
                changed_at=snapshot.now,
                whole=in_gang,
                cap=config.spot.cap if config is not None and offer.capacity == "spot" else None,
            )
    for node, (name, number) in case.slots.items():
        if node in placed and name in snapshot.orders:
            record = changed.get(name, snapshot.orders[name])
            slots = list(record.slots)
            slots[number] = _with_pods(snapshot, slots[number], case, placed[node])
            changed[name] = structs_replace(record, slots=tuple(slots))
    return changed


def _with_pods(
    snapshot: Snapshot,
    slot: Slot,
    case: plan_case.PlanCase,
    pods: Iterable[tuple[str, tuple[int, ...]]],
) -> Slot:
    """Return the slot with these pods more, and without those that are gone: there is room for few."""
    added = [(case.pods[name], cards) for name, cards in pods]
    there = [(uid, cards) for uid, cards in planned_cards(slot) if uid in snapshot.pods]
    both = [*there, *added]
    return structs_replace(
        slot, pods=tuple(uid for uid, _ in both), cards=tuple(cards for _, cards in both)
    )


def without_stale(snapshot: Snapshot, case: plan_case.PlanCase, plan: NodePlan) -> NodePlan:
    """Return the plan without pods that were bound or deleted since, and without the nodes for them alone.

    Pods come and go all the time, and a plan takes seconds: what concerns the others is still right. A gang
    of which a member is gone is left out whole.
    """
    gone = {name for name, uid in case.pods.items() if not _is_pending(snapshot, uid)}
    gang_of = {
        request.name: request.gang for request in case.case.requests if request.gang is not None
    }
    broken = {gang_of[name] for name in gone if name in gang_of}
    live = tuple(
        pod
        for pod in plan.placements
        if pod.request not in gone
        and gang_of.get(pod.request) not in broken
        and _is_there(snapshot, case.slots.get(pod.node))
    )
    if len(live) == len(plan.placements):
        return plan
    idle = {pod.node for pod in plan.placements} - {pod.node for pod in live}
    names, nodes = dict[str, str](), list[NewNodes]()
    for new in plan.nodes:
        left = [name for name in plan_case.new_slots(new.group, new.count) if name not in idle]
        names |= zip(left, plan_case.new_slots(new.group, len(left)), strict=True)
        nodes += [NewNodes(new.group, len(left))] if left else []
    placements = tuple(dataclasses.replace(pod, node=names.get(pod.node, pod.node)) for pod in live)
    return dataclasses.replace(plan, nodes=tuple(nodes), placements=placements)


def _is_pending(snapshot: Snapshot, uid: str) -> bool:
    pod = snapshot.pods.get(uid)
    return uid in snapshot.evicted or (pod is not None and pod.is_pending)


def _is_there(snapshot: Snapshot, slot: tuple[str, int] | None) -> bool:
    """Return whether a node that is coming is still expected. None: any other node."""
    if slot is None:
        return True
    name, number = slot
    return name in snapshot.orders and number < len(snapshot.orders[name].slots)


def summary(case: plan_case.PlanCase, plan: NodePlan) -> dict[str, str]:
    """Return by pod's request a sentence about the nodes that are asked for, for events."""
    counts = {node.group: node.count for node in plan.nodes}
    prices = {group.name: group.price for group in case.case.groups}
    sentences = {}
    for pod in plan.placements:
        kind, _, rest = pod.node.partition(":")
        group = rest.rpartition(":")[0]
        if kind == "new" and group in counts:
            count, name = counts[group], case.offers[group].group
            noun = "node" if count == 1 else "nodes"
            price = round(count * prices[group], PRICE_DECIMALS)
            sentences[pod.request] = f"{count} {noun} of {name} asked for, {price:g} an hour"
    return sentences


class Buyer:
    """The part of a pass that buys.

    Attributes:
        unserved: why no node is bought for pods, by UID.
        problem: why no plan was made the last time, empty if one was.
    """

    def __init__(self, config: AutoscalerConfig, planner: Planner, counts: ActivityCounts) -> None:
        self._planner, self._counts = planner, counts
        self._windows = Windows(config.scale_out)
        self._delay = config.scale_out.delay
        self._planned: PlanningCase | None = None
        self._planned_at = self._retry_at = float("-inf")
        self._retry_s = REPLAN_S
        self._hindered = False
        self._told: dict[str, str] = {}
        self._refused_at: dict[str, float] = {}
        self._told_at = float("-inf")
        self._launch_calls = LaunchCalls()
        self.unserved: Mapping[str, str] = {}
        self.problem = ""

    def forget(self) -> None:
        """Plan again: another replica was the leader, or the clock was set back."""
        self._planned, self._planned_at = None, float("-inf")
        self._plan_again()
        self._windows.forget()
        self._launch_calls.forget()

    def stop(self) -> None:
        """End what runs beside the passes."""
        self._launch_calls.stop()

    def due_at(self, now: float) -> float | None:
        """Return when the next pass must be made, None if nothing waits for one."""
        times = [time for time in (self._windows.due_at(), *self._launch_calls.due_at(now)) if time]
        if self._delay:
            # A pod counts from a time on at which nothing else happens.
            times.append(now + 1)
        settled = (at + REFUSAL_SETTLES_S for at in self._refused_at.values())
        times += [time for time in settled if time > self._told_at]
        return max(min(times), now) if times else None

    async def act(self, context: ActorContext) -> Mapping[str, ElasticNodeStatus]:
        """Ask for written orders, plan, and ask for what was bought."""
        await self._launch_calls.act(context)
        snapshot = context.snapshot()
        demand = pending_demand(snapshot)
        requests = plan_case.unplanned(snapshot, demand)
        if self._is_hindered(context, snapshot, demand, requests):
            return {}
        self._windows.see(requests, snapshot.now)
        if not requests and not plan_case.is_below_min(snapshot):
            # Most of the time: nodes need not be looked at.
            self._plan_again()
            self._tell(context, snapshot, demand.unserved)
            return {}
        case = plan_case.case_of(snapshot, requests, demand)
        if self._is_due(snapshot, case):
            await self._plan(context, case)
            await self._launch_calls.act(context)
        elif self.problem:
            self._tell_of_problem(context, snapshot, case)
        else:
            self._tell(context, snapshot, self.unserved)
        return {}

    def hinder(self, context: ActorContext, why: str) -> None:
        """Tell people that a pass failed, and why: it is nothing that planning or the cloud has said."""
        snapshot = context.snapshot()
        demand = pending_demand(snapshot)
        self._hindered = True
        told = _nothing_is_bought(plan_case.unplanned(snapshot, demand), why)
        self._tell(context, snapshot, {**told, **demand.unserved})

    def _is_hindered(
        self, context: ActorContext, snapshot: Snapshot, demand: Demand, requests: Iterable[str]
    ) -> bool:
        """Return whether something that cannot be read forbids to buy, and tell people.

        requests: UIDs of the pods that would be planned for.
        """
        unread = next(iter(context.orders.unreadable.values()), "")
        was_hindered = self._hindered
        self._hindered = bool(unread) or snapshot.instances_at is None or not snapshot.offers
        if self._hindered:
            # A failed reading is never taken for none. People have to know.
            why = f"{unread}: remove or mend it" if unread else snapshot.cloud_problem
            told = _nothing_is_bought(requests, why) if why else {}
            self._tell(context, snapshot, {**told, **demand.unserved})
        elif was_hindered:
            # That is over; the next plan says what is true now.
            self._tell(context, snapshot, demand.unserved)
        return self._hindered

    def _tell_of_problem(
        self, context: ActorContext, snapshot: Snapshot, case: plan_case.PlanCase
    ) -> None:
        told = _nothing_is_bought(case.pods.values(), self.problem)
        self._tell(context, snapshot, {**told, **case.unserved})

    def _plan_again(self) -> None:
        """Take planning for possible: at once, and without a problem."""
        self.problem, self._retry_at, self._retry_s = "", float("-inf"), REPLAN_S

    def _is_due(self, snapshot: Snapshot, case: plan_case.PlanCase) -> bool:
        if snapshot.now < self._retry_at:
            return False
        due_at = self._windows.due_at()
        if due_at is not None:
            return snapshot.now >= due_at
        return snapshot.now >= self._planned_at + REPLAN_S and _lasting(case.case) != self._planned

    async def _plan(self, context: ActorContext, case: plan_case.PlanCase) -> None:
        limit = context.snapshot().config.scale_out.time_limit
        try:
            plan, seconds = await self._planner.plan(case.case, limit)
            for _ in case.most:
                narrower = plan_case.within_most(case, plan)
                if narrower is None:
                    break
                plan, seconds = await self._planner.plan(narrower, limit)
        except PlanFailed as why:
            # The loop logs it, when it changes.
            self.problem = str(why)
            snapshot = context.snapshot()
            self._retry_at = snapshot.now + self._retry_s
            self._retry_s = min(2 * self._retry_s, RETRY_MOST_S)
            self._tell_of_problem(context, snapshot, case)
            return
        self._plan_again()
        self._counts.planned(plan, seconds)
        snapshot = context.snapshot()
        if not context.leading():
            self._planned = None
            return
        current = without_stale(snapshot, case, plan)
        orders = purchases(snapshot, case, current)
        await context.orders.save(orders)
        # Not before: a plan that could not be written is made again.
        self._windows.planned()
        self._planned = _lasting(case.case) if current is plan else None
        self._planned_at = snapshot.now
        self._report(context, case, current, orders)

    def _report(
        self,
        context: ActorContext,
        case: plan_case.PlanCase,
        plan: NodePlan,
        orders: Mapping[str, OrderRecord],
    ) -> None:
        snapshot = context.snapshot()
        for name, record in orders.items():
            if record.state == "written":
                log.info("order %s: %d x %s", name, len(record.slots), record.type)
        for request, sentence in summary(case, plan).items():
            pod = snapshot.pods.get(case.pods[request])
            if pod is not None:
                context.recorder.record_on_pod(pod, SCALE_OUT, sentence, normal=True)
        self._tell(
            context,
            snapshot,
            {**_with_next_try(snapshot, plan_case.unserved_pods(case, plan)), **case.unserved},
        )

    def _tell(self, context: ActorContext, snapshot: Snapshot, unserved: Mapping[str, str]) -> None:
        """Post why no node is bought for pods, once for each change, if it lasts."""
        self.unserved = dict(unserved)
        self._told_at = snapshot.now
        self._refused_at = {uid: self._refused_at.get(uid, snapshot.now) for uid in unserved}
        told = self._told
        self._told = {uid: why for uid, why in unserved.items() if told.get(uid) == why}
        untold = [
            snapshot.pods[uid]
            for uid, at in self._refused_at.items()
            if uid not in self._told
            and uid in snapshot.pods
            and snapshot.now >= at + REFUSAL_SETTLES_S
        ]
        for pod in _in_order(untold):
            uid = pod.metadata.uid
            if not context.recorder.record_on_pod(pod, NO_SCALE_OUT, unserved[uid]):
                # So many events are not written at once. The next pass goes on.
                break
            self._told[uid] = unserved[uid]


def _in_order(pods: Iterable[ElasticPod]) -> list[ElasticPod]:
    """Return the pods with namespaces in turns, so that none keeps others out."""
    number = Counter[str]()
    turns = []
    for pod in pods:
        turns.append((number[pod.metadata.namespace], pod))
        number[pod.metadata.namespace] += 1
    return [pod for _, pod in sorted(turns, key=itemgetter(0))]


def _nothing_is_bought(uids: Iterable[str], why: str) -> dict[str, str]:
    return dict.fromkeys(uids, f"nothing is bought: {why}")


def _with_next_try(snapshot: Snapshot, sentences: Mapping[str, str]) -> dict[str, str]:
    """Return the sentences with when offers that failed are tried again."""
    paused = pauses(snapshot)
    again = next_try(paused)
    suffix = ""
    if again is not None:
        # Only the cloud's own sentence says what an operator has to change.
        denied = sorted({pause.why for pause in paused.values() if pause.failure == "denied"})
        suffix = "".join(f"; {why}" for why in denied)
        suffix += f"; the next try is at {encode_time(again)}"
    return {uid: f"{sentence}{suffix}" for uid, sentence in sentences.items()}


def _lasting(case: PlanningCase) -> PlanningCase:
    """Return the case without what changes by itself as time passes."""
    nodes = tuple(replace(node, protected_s=0.0) for node in case.nodes)
    return replace(case, nodes=nodes)
