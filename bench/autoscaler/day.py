"""Simulate one day of arrivals: what fenka's plans and two baselines buy, what it costs, how long pods wait.

    .venv/bin/python bench/autoscaler/day.py [SVG]

Everybody has the same arrivals, offers, start-up time, and delay before an idle node ends, and fenka's own
scheduler places the pods. Nobody moves running pods, and nothing is taken back. The planner looks every ten
seconds. Simulated: time, pods and nodes. Real: the planner, the scheduler's decisions, the algorithms.
"""

import math
import random
import statistics
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.autoscaler.baselines import (
    Baseline,
    Space,
    World,
    cluster_autoscaler,
    karpenter,
    new_node,
    sums_of,
)
from bench.autoscaler.workloads import drawn_requests, offers
from bench.commands import machine
from bench.plot import Panel, Point, draw, stairs
from fenka.autoscaler.solver.solve import improve
from fenka.core.evaluate import place
from fenka.core.inventory import Node
from fenka.core.nodes.case import (
    FORMAT,
    CaseNode,
    CaseRequest,
    Held,
    HeldCard,
    NodeGroup,
    PlanningCase,
)
from fenka.core.nodes.plan import make_plan
from fenka.core.nodes.problem import ineligible
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement
from fenka.core.usage import UsageTotals

DAY_S, TICK_S, HOUR_S = 86_400, 10, 3600
PODS = 1500
STARTUP_S, IDLE_S, PIN_S = 120, 600, 60
SPOT_SHARE, INTERRUPTIBLE_SHARE = 0.35, 0.4
PLAN_S = 0.5
MEAN_RUN_S, RUN_SIGMA = 1500.0, 1.0
UNIT_MIB = 1024
HOURLY = (2, 1, 1, 1, 1, 1, 2, 4, 8, 12, 12, 10, 8, 10, 12, 12, 10, 8, 6, 5, 4, 4, 3, 3)
"""How many pods arrive in each hour, in proportion."""


@dataclass(frozen=True)
class Arrival:
    """A pod: when it comes, and how long it runs."""

    at: int
    run_s: int
    request: CaseRequest


def arrivals(seed: int) -> list[Arrival]:
    """Return a day's pods in the order of their arrival."""
    draw_from = random.Random(seed)
    hours = draw_from.choices(range(len(HOURLY)), HOURLY, k=PODS)
    times = sorted(hour * HOUR_S + draw_from.randrange(HOUR_S) for hour in hours)
    # The logarithm of the run time is normal; its mean is that of the run time.
    location = math.log(MEAN_RUN_S) - RUN_SIGMA**2 / 2
    return [
        Arrival(
            at,
            max(TICK_S, round(draw_from.lognormvariate(location, RUN_SIGMA))),
            replace(request, interruptible=draw_from.random() < INTERRUPTIBLE_SHARE),
        )
        for at, request in zip(times, drawn_requests(seed, PODS), strict=True)
    ]


def groups() -> tuple[NodeGroup, ...]:
    """Return the six offers on demand, and the same as spot."""
    spot = (
        replace(
            group,
            name=f"{group.name}-spot",
            capacity="spot",
            price=round(group.price * SPOT_SHARE, 2),
        )
        for group in offers()
    )
    return (*offers(), *spot)


@dataclass
class Machine:
    """A node. planned: the placements for which alone it is at first."""

    node: Node
    group: int
    launched: int
    pods: set[str] = field(default_factory=set)
    planned: dict[str, Placement] = field(default_factory=dict)
    idle_since: int = 0

    @property
    def ready(self) -> int:
        """When it admits pods."""
        return self.launched + STARTUP_S


@dataclass
class Pod:
    """A pod and what becomes of it."""

    arrival: Arrival
    started: int | None = None
    placement: Placement | None = None
    groups: frozenset[int] = frozenset()
    """Those whose labels, taints and capacity admit it."""


class Autoscaler(Protocol):
    """Decides what is bought for the pending pods."""

    def __call__(self, day: "Day", pending: Sequence[Pod]) -> None:
        """Buy by `day.launch`."""


@dataclass(frozen=True)
class Sample:
    """What there is at one time."""

    at: int
    pending: int
    nodes: int
    price: float


class Day:
    """One day with one autoscaler."""

    def __init__(self, comers: Sequence[Arrival], autoscaler: Autoscaler) -> None:
        self.groups, self._autoscaler = groups(), autoscaler
        self.pods = {arrival.request.name: Pod(arrival) for arrival in comers}
        for pod in self.pods.values():
            pod.groups = frozenset(
                number
                for number, group in enumerate(self.groups)
                if not ineligible(pod.arrival.request, group)
            )
        self._coming = list(self.pods.values())
        self.pending: list[Pod] = []
        self._running: list[Pod] = []
        self.machines: dict[str, Machine] = {}
        self.usage = UsageTotals()
        self.reserved = UsageTotals()
        """What is planned on nodes and not there yet."""
        self.now, self.cost, self.launched = 0, 0.0, 0
        self.samples: list[Sample] = []

    def run(self) -> None:
        """Run the day."""
        arrived = 0
        times = [pod.arrival.at for pod in self._coming]
        for self.now in range(0, DAY_S, TICK_S):
            due = bisect_right(times, self.now)
            self.pending += self._coming[arrived:due]
            arrived = due
            self._finish()
            self._end_pins()
            self._schedule()
            unplanned = [pod for pod in self.pending if not self.is_planned(pod)]
            if unplanned:
                self._autoscaler(self, unplanned)
            self._scale_in()
            price = sum(self.groups[it.group].price for it in self.machines.values())
            self.cost += price * TICK_S / HOUR_S
            self.samples.append(Sample(self.now, len(self.pending), len(self.machines), price))

    def launch(self, group: int) -> Machine:
        """Launch a node."""
        self.launched += 1
        name = f"{self.groups[group].name}-{self.launched}"
        launched = Machine(new_node(self.groups[group], name), group, self.now)
        launched.idle_since = launched.ready
        self.machines[name] = launched
        return launched

    def plan(self, pod: Pod, on: Machine, placement: Placement) -> None:
        """Reserve a place on a node that comes."""
        on.planned[pod.arrival.request.name] = placement
        self.reserved.add(placement)

    def is_planned(self, pod: Pod) -> bool:
        """Return whether a node is coming for it."""
        name = pod.arrival.request.name
        return any(name in each.planned for each in self.machines.values())

    def _finish(self) -> None:
        still = []
        for pod in self._running:
            assert pod.started is not None
            assert pod.placement is not None
            if pod.started + pod.arrival.run_s > self.now:
                still.append(pod)
                continue
            self.usage.remove(pod.placement)
            on = self.machines[pod.placement.node]
            on.pods.remove(pod.arrival.request.name)
            on.idle_since = self.now
        self._running = still

    def _end_pins(self) -> None:
        for each in self.machines.values():
            if each.planned and self.now >= each.ready + PIN_S:
                for placement in each.planned.values():
                    self.reserved.remove(placement)
                each.planned.clear()

    def _schedule(self) -> None:
        """Place the pending pods that fit, in the order of their arrival."""
        ready = [each for each in self.machines.values() if each.ready <= self.now]
        self.pending = [pod for pod in self.pending if not self._start(pod, ready)]

    def _start(self, pod: Pod, ready: Sequence[Machine]) -> bool:
        request = pod.arrival.request
        asked = request.card_request()
        assert asked is not None
        mine = [each for each in self.machines.values() if request.name in each.planned]
        for each in mine:
            if each in ready:
                pod.placement = each.planned[request.name]
                break
        else:
            free = [it.node for it in ready if it.group in pod.groups and not it.planned]
            placed = place(self.usage, asked, "binpack", free)
            if isinstance(placed, Unschedulable):
                return False
            pod.placement = placed
        for each in mine:
            self.reserved.remove(each.planned.pop(request.name))
        self.usage.add(pod.placement)
        self.machines[pod.placement.node].pods.add(request.name)
        pod.started = self.now
        self._running.append(pod)
        return True

    def _scale_in(self) -> None:
        for name, each in list(self.machines.items()):
            idle = not each.pods and not each.planned and each.ready <= self.now
            if idle and self.now >= each.idle_since + IDLE_S:
                del self.machines[name]

    def waits(self) -> list[int]:
        """Return how long each pod waited; those that still wait have waited until the end of the day."""
        return [
            (DAY_S if pod.started is None else pod.started) - pod.arrival.at
            for pod in self.pods.values()
        ]


def fenka(day: Day, pending: Sequence[Pod]) -> None:
    """Buy what `make_plan` says, and reserve each pod's place."""
    names = list(day.machines)
    case = PlanningCase(
        format=FORMAT,
        groups=tuple(
            replace(group, size=sum(it.group == number for it in day.machines.values()))
            for number, group in enumerate(day.groups)
        ),
        nodes=tuple(_case_node(day, day.machines[name]) for name in names),
        requests=tuple(pod.arrival.request for pod in pending),
    )
    # Processor time, so that other programs do not change the day.
    end = time.process_time() + PLAN_S
    plan = make_plan(case, lambda: end - time.process_time(), improve)
    by_name = {group.name: number for number, group in enumerate(day.groups)}
    bought = {
        f"new:{each.group}:{number}": day.launch(by_name[each.group])
        for each in plan.nodes
        for number in range(each.count)
    }
    for planned in plan.placements:
        on = bought.get(planned.node) or day.machines[planned.node]
        pod = day.pods[planned.request]
        # What runs already takes the pod at the next moment; what is coming keeps a place.
        if on.ready > day.now:
            day.plan(pod, on, _placement(day, pod, on, planned.cards))


def _placement(day: Day, pod: Pod, on: Machine, cards: tuple[int, ...]) -> Placement:
    asked = pod.arrival.request.card_request()
    assert asked is not None
    only = replace(on.node, cards=tuple(card for card in on.node.cards if card.index in cards))
    placed = place(day.reserved, asked, "binpack", (only,))
    assert not isinstance(placed, Unschedulable), placed
    return placed


def _case_node(day: Day, each: Machine) -> CaseNode:
    group, name = day.groups[each.group], each.node.name
    hosts = [view.host_usage(name) for view in (day.usage, day.reserved)]
    cards = []
    for card in each.node.cards:
        used = [view.card_usage(name, card.uuid) for view in (day.usage, day.reserved)]
        cards.append(
            HeldCard(
                model=card.model,
                memory_mib=card.memory_mib,
                held_mib=sum(it.memory_mib for it in used),
                held_compute=sum(it.compute for it in used),
                whole=any(it.whole for it in used),
                # A ready node with a pin is for others.
                closed=bool(each.planned) and each.ready <= day.now,
            )
        )
    return CaseNode(
        name=name,
        group=group.name,
        zone=group.zone,
        capacity=group.capacity,
        cpu_milli=group.cpu_milli,
        memory_mib=group.memory_mib,
        held=Held(
            cpu_milli=sum(cpu for cpu, _ in hosts),
            memory_mib=sum(memory for _, memory in hosts),
            pods=len(each.pods) + len(each.planned),
        ),
        cards=tuple(cards),
    )


def by_sums(algorithm: Baseline) -> Autoscaler:
    """Return an autoscaler that buys what a baseline says."""

    def buy(day: Day, pending: Sequence[Pod]) -> None:
        requests = tuple(pod.arrival.request for pod in pending)
        world = World(
            PlanningCase(format=FORMAT, groups=day.groups, requests=requests), exact=False
        )
        nodes = [
            Space(
                world,
                each.group,
                sum(
                    (sums_of(day.pods[name].arrival.request, UNIT_MIB) for name in each.pods),
                    Counter(),
                ),
            )
            for each in day.machines.values()
        ]
        for group, count in algorithm(world, nodes).nodes.items():
            for _ in range(count):
                day.launch(group)

    return buy


AUTOSCALERS: dict[str, Callable[[], Autoscaler]] = {
    "fenka": lambda: fenka,
    "cluster-autoscaler": lambda: by_sums(cluster_autoscaler),
    "Karpenter": lambda: by_sums(karpenter),
}


def row(name: str, day: Day, ours: float) -> str:
    """Return a day's row of the table."""
    waits = sorted(day.waits())
    p95 = waits[len(waits) * 95 // 100]
    never = sum(pod.started is None for pod in day.pods.values())
    return (
        f"| {name} | {day.cost:.0f} | {day.cost / ours:.2f} | {day.launched} "
        f"| {max(it.nodes for it in day.samples)} | {statistics.mean(waits):.0f} | {waits[len(waits) // 2]} "
        f"| {p95} | {waits[-1]} | {never} |"
    )


def panels(days: Sequence[Day]) -> Iterator[Panel]:
    """Yield the diagrams: pending pods, nodes and price over time."""
    measures: tuple[tuple[str, Callable[[Sample], float]], ...] = (
        ("pending pods", lambda sample: sample.pending),
        ("nodes", lambda sample: sample.nodes),
        ("price per hour", lambda sample: sample.price),
    )
    for title, value in measures:
        lines = [list(_changes(day.samples, value)) for day in days]
        most = max(value for line in lines for _, value in line)
        step = 10 ** math.floor(math.log10(most))
        top = math.ceil(most / step) * step
        yield Panel(title, (0, top / 2, top), [stairs(line, DAY_S / HOUR_S) for line in lines])


def _changes(samples: Sequence[Sample], value: Callable[[Sample], float]) -> Iterator[Point]:
    last = None
    for sample in samples:
        if value(sample) != last:
            last = value(sample)
            yield sample.at / HOUR_S, last


def main(arguments: Sequence[str]) -> int:
    """Print the table, draw the day; return 1 if a baseline is cheaper with no longer waits."""
    days = {}
    for name, make in AUTOSCALERS.items():
        days[name] = day = Day(arrivals(seed=1), make())
        day.run()
    ours = days["fenka"]
    print(
        "| autoscaler | cost of the day | by fenka's | nodes launched | most at once | wait: mean s | p50 s "
        "| p95 s | longest s | not started |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for name, day in days.items():
        print(row(name, day, ours.cost))
    print(f"\n{machine()}")
    if arguments:
        title = ", ".join(
            f"{name} ({colour})"
            for name, colour in zip(days, ("blue", "orange", "green"), strict=True)
        )
        first, *rest = panels(list(days.values()))
        drawn = draw([replace(first, title=f"{first.title}: {title}"), *rest], (), 24, 2, "h")
        Path(arguments[0]).write_text(drawn)
    wait = statistics.mean(ours.waits())
    better = [
        name
        for name, day in days.items()
        if day is not ours and day.cost < ours.cost and statistics.mean(day.waits()) <= wait
    ]
    return 1 if better else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
