"""Plans for pending pods, writes orders, and asks the cloud for them."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import itemgetter

from fenka.autoscaler.asker import Asker
from fenka.autoscaler.backoff import next_try, pauses
from fenka.autoscaler.demand import Demand, demand
from fenka.autoscaler.hands import Hands
from fenka.autoscaler.metrics import Counts
from fenka.autoscaler.objects import ElasticPod
from fenka.autoscaler.plan_case import (
    PlanCase,
    case_of,
    is_below_min,
    unplanned,
    unserved_pods,
    within_most,
)
from fenka.autoscaler.planner import PlanFailed, Planner
from fenka.autoscaler.purchases import purchases, summary, without_stale
from fenka.autoscaler.view import View
from fenka.autoscaler.windows import Windows
from fenka.cloud.config import Config
from fenka.cluster.autoscaling import NodeStatus, OrderRecord, encode_time
from fenka.core.planning.case import Case
from fenka.core.planning.plan import Plan

log = logging.getLogger(__name__)

SCALE_OUT, NO_SCALE_OUT = "FenkaScaleOut", "FenkaNoScaleOut"

REPLAN_S = 1.0
"""Between two plans, whatever changes."""
RETRY_MOST_S = 60.0
"""After a plan that failed. The first retry is after REPLAN_S; the pause doubles."""
REFUSAL_SETTLES_S = 3.0
"""Refusals are posted after this time: a gang's members are created one after the other, for example."""


class Buyer:
    """The part of a pass that buys.

    Attributes:
        unserved: why no node is bought for pods, by UID.
        problem: why no plan was made the last time, empty if one was.
    """

    def __init__(self, config: Config, planner: Planner, counts: Counts) -> None:
        self._planner, self._counts = planner, counts
        self._windows = Windows(config.scale_out)
        self._delay = config.scale_out.delay
        self._planned: Case | None = None
        self._planned_at = self._retry_at = float("-inf")
        self._retry_s = REPLAN_S
        self._hindered = False
        self._told: dict[str, str] = {}
        self._refused_at: dict[str, float] = {}
        self._told_at = float("-inf")
        self._asker = Asker()
        self.unserved: Mapping[str, str] = {}
        self.problem = ""

    def forget(self) -> None:
        """Plan again: another replica was the leader, or the clock was set back."""
        self._planned, self._planned_at = None, float("-inf")
        self._plan_again()
        self._windows.forget()
        self._asker.forget()

    def stop(self) -> None:
        """End what runs beside the passes."""
        self._asker.stop()

    def due_at(self, now: float) -> float | None:
        """Return when the next pass must be made, None if nothing waits for one."""
        times = [time for time in (self._windows.due_at(), *self._asker.due_at(now)) if time]
        if self._delay:
            # A pod counts from a time on at which nothing else happens.
            times.append(now + 1)
        settled = (at + REFUSAL_SETTLES_S for at in self._refused_at.values())
        times += [time for time in settled if time > self._told_at]
        return max(min(times), now) if times else None

    async def act(self, hands: Hands) -> Mapping[str, NodeStatus]:
        """Ask for written orders, plan, and ask for what was bought."""
        await self._asker.act(hands)
        view = hands.view()
        line = demand(view)
        requests = unplanned(view, line)
        if self._is_hindered(hands, view, line, requests):
            return {}
        self._windows.see(requests, view.now)
        if not requests and not is_below_min(view):
            # Most of the time: nodes need not be looked at.
            self._plan_again()
            self._tell(hands, view, line.unserved)
            return {}
        case = case_of(view, requests, line)
        if self._is_due(view, case):
            await self._plan(hands, case)
            await self._asker.act(hands)
        elif self.problem:
            self._tell_of_problem(hands, view, case)
        else:
            self._tell(hands, view, self.unserved)
        return {}

    def hinder(self, hands: Hands, why: str) -> None:
        """Tell people that a pass failed, and why: it is nothing that planning or the cloud has said."""
        view = hands.view()
        line = demand(view)
        self._hindered = True
        told = _nothing_is_bought(unplanned(view, line), why)
        self._tell(hands, view, {**told, **line.unserved})

    def _is_hindered(self, hands: Hands, view: View, line: Demand, requests: Iterable[str]) -> bool:
        """Return whether something that cannot be read forbids to buy, and tell people.

        requests: UIDs of the pods that would be planned for.
        """
        unread = next(iter(hands.orders.unreadable.values()), "")
        was_hindered = self._hindered
        self._hindered = bool(unread) or view.instances_at is None or not view.offers
        if self._hindered:
            # What cannot be read is never none. People have to know.
            why = f"{unread}: remove or mend it" if unread else view.cloud_problem
            told = _nothing_is_bought(requests, why) if why else {}
            self._tell(hands, view, {**told, **line.unserved})
        elif was_hindered:
            # That is over; the next plan says what is true now.
            self._tell(hands, view, line.unserved)
        return self._hindered

    def _tell_of_problem(self, hands: Hands, view: View, case: PlanCase) -> None:
        told = _nothing_is_bought(case.pods.values(), self.problem)
        self._tell(hands, view, {**told, **case.unserved})

    def _plan_again(self) -> None:
        """Take planning for possible: at once, and without a problem."""
        self.problem, self._retry_at, self._retry_s = "", float("-inf"), REPLAN_S

    def _is_due(self, view: View, case: PlanCase) -> bool:
        if view.now < self._retry_at:
            return False
        due_at = self._windows.due_at()
        if due_at is not None:
            return view.now >= due_at
        return view.now >= self._planned_at + REPLAN_S and _lasting(case.case) != self._planned

    async def _plan(self, hands: Hands, case: PlanCase) -> None:
        limit = hands.view().config.scale_out.time_limit
        try:
            plan, seconds = await self._planner.plan(case.case, limit)
            for _ in case.most:
                narrower = within_most(case, plan)
                if narrower is None:
                    break
                plan, seconds = await self._planner.plan(narrower, limit)
        except PlanFailed as why:
            # The loop logs it, when it changes.
            self.problem = str(why)
            view = hands.view()
            self._retry_at = view.now + self._retry_s
            self._retry_s = min(2 * self._retry_s, RETRY_MOST_S)
            self._tell_of_problem(hands, view, case)
            return
        self._plan_again()
        self._counts.planned(plan, seconds)
        view = hands.view()
        if not hands.leading():
            self._planned = None
            return
        current = without_stale(view, case, plan)
        orders = purchases(view, case, current)
        await hands.orders.save(orders)
        # Not before: a plan that could not be written is made again.
        self._windows.planned()
        self._planned = _lasting(case.case) if current is plan else None
        self._planned_at = view.now
        self._report(hands, case, current, orders)

    def _report(
        self, hands: Hands, case: PlanCase, plan: Plan, orders: Mapping[str, OrderRecord]
    ) -> None:
        view = hands.view()
        for name, record in orders.items():
            if record.state == "written":
                log.info("order %s: %d x %s", name, len(record.slots), record.type)
        for request, sentence in summary(case, plan).items():
            pod = view.pods.get(case.pods[request])
            if pod is not None:
                hands.recorder.record_on_pod(pod, SCALE_OUT, sentence, normal=True)
        self._tell(
            hands, view, {**_with_next_try(view, unserved_pods(case, plan)), **case.unserved}
        )

    def _tell(self, hands: Hands, view: View, unserved: Mapping[str, str]) -> None:
        """Post why no node is bought for pods, once for each change, if it lasts."""
        self.unserved = dict(unserved)
        self._told_at = view.now
        self._refused_at = {uid: self._refused_at.get(uid, view.now) for uid in unserved}
        told = self._told
        self._told = {uid: why for uid, why in unserved.items() if told.get(uid) == why}
        untold = [
            view.pods[uid]
            for uid, at in self._refused_at.items()
            if uid not in self._told and uid in view.pods and view.now >= at + REFUSAL_SETTLES_S
        ]
        for pod in _in_turn(untold):
            uid = pod.metadata.uid
            if not hands.recorder.record_on_pod(pod, NO_SCALE_OUT, unserved[uid]):
                # So many events are not written at once. The next pass goes on.
                break
            self._told[uid] = unserved[uid]


def _in_turn(pods: Iterable[ElasticPod]) -> list[ElasticPod]:
    """Return the pods with namespaces in turns, so that none keeps others out."""
    number = Counter[str]()
    turns = []
    for pod in pods:
        turns.append((number[pod.metadata.namespace], pod))
        number[pod.metadata.namespace] += 1
    return [pod for _, pod in sorted(turns, key=itemgetter(0))]


def _nothing_is_bought(uids: Iterable[str], why: str) -> dict[str, str]:
    return dict.fromkeys(uids, f"nothing is bought: {why}")


def _with_next_try(view: View, sentences: Mapping[str, str]) -> dict[str, str]:
    """Return the sentences with when offers that failed are tried again."""
    paused = pauses(view)
    again = next_try(paused)
    suffix = ""
    if again is not None:
        # Only the cloud's own sentence says what an operator has to change.
        denied = sorted({each.why for each in paused.values() if each.failure == "denied"})
        suffix = "".join(f"; {why}" for why in denied)
        suffix += f"; the next try is at {encode_time(again)}"
    return {uid: f"{sentence}{suffix}" for uid, sentence in sentences.items()}


def _lasting(case: Case) -> Case:
    """Return the case without what changes by itself as time passes."""
    nodes = tuple(replace(node, protected_s=0.0) for node in case.nodes)
    return replace(case, nodes=nodes)
