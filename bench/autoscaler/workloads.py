"""Cases to measure the planner by: drawn ones, the openb trace, a large cluster."""

import csv
import gzip
import random
from collections.abc import Sequence
from pathlib import Path

from fenka.core.nodes.case import (
    FORMAT,
    Amount,
    CaseNode,
    CaseRequest,
    Held,
    HeldCard,
    NewCard,
    NodeGroup,
    PlanningCase,
)

T4, A10, A100 = ("Tesla T4", 15079), ("NVIDIA A10", 23028), ("NVIDIA A100 80GB PCIe", 81920)

OFFERS = (
    ("t4", T4, 1, 4, 16, 4.0),
    ("t4x2", T4, 2, 16, 64, 8.6),
    ("t4x4", T4, 4, 32, 128, 17.5),
    ("a10", A10, 1, 8, 32, 7.3),
    ("a10x4", A10, 4, 64, 256, 30.1),
    ("a100", A100, 1, 12, 96, 26.0),
)
"""Name, card, cards, cores, GiB, price."""

OPENB_PRICES = {
    "T4": 5, "P100": 7, "A10": 8, "G2": 10, "V100M16": 11, "V100M32": 14, "G3": 20
}  # fmt: skip


def offers(count: int = len(OFFERS)) -> tuple[NodeGroup, ...]:
    """Return groups of the six offers; more than six repeat them in other zones, a little dearer."""
    groups = []
    for number in range(count):
        name, (model, mib), cards, cores, gib, price = OFFERS[number % len(OFFERS)]
        zone = number // len(OFFERS)
        groups.append(
            NodeGroup(
                name=f"{name}-{zone}",
                zone=f"z{zone}",
                price=round(price * (1 + zone / 50), 2),
                cpu_milli=cores * 1000 - 200,
                memory_mib=gib * 1024 * 9 // 10,
                cards=(NewCard(model=model, memory_mib=mib),) * cards,
            )
        )
    return tuple(groups)


def drawn_requests(seed: int, count: int) -> tuple[CaseRequest, ...]:
    """Return requests of many sizes: slices, slices with compute, several cards, whole cards."""
    draw = random.Random(seed)
    requests = []
    for number in range(count):
        kind = draw.random()
        cores = draw.choice((500, 1000, 1500, 2000, 3000))
        memory, compute, whole, cards = None, 0, False, 1
        if kind < 0.70:
            memory = Amount(units=draw.choice((1, 2, 3, 4, 5, 6, 7, 8, 10, 12)))
        elif kind < 0.80:
            memory = Amount(units=draw.choice((3, 5, 8)))
            compute = draw.choice((20, 30, 50))
        elif kind < 0.88:
            memory = Amount(units=draw.choice((16, 18, 20, 30, 40)))
        elif kind < 0.95:
            memory, cards = Amount(units=draw.choice((4, 6, 9))), 2
        else:
            whole = True
        requests.append(
            CaseRequest(
                name=f"r{number}",
                cards=cards,
                memory=memory,
                compute=compute,
                whole=whole,
                cpu_milli=cores,
                memory_mib=draw.choice((1024, 2048, 4096, 8192)),
            )
        )
    return tuple(requests)


def drawn(seed: int, count: int) -> PlanningCase:
    """Return a case of six offers and no nodes."""
    return PlanningCase(format=FORMAT, groups=offers(), requests=drawn_requests(seed, count))


def large(seed: int = 1, pods: int = 1000, groups: int = 50, nodes: int = 500) -> PlanningCase:
    """Return many pods, many offers, and many nodes there that are mostly full."""
    draw = random.Random(seed)
    there = []
    shapes = offers(groups)
    for number in range(nodes):
        group = shapes[draw.randrange(groups)]
        cards = tuple(
            HeldCard(
                model=card.model,
                memory_mib=card.memory_mib,
                held_mib=draw.choice((3, 3, 4, 4)) * card.memory_mib // 4,
            )
            for card in group.cards
        )
        there.append(
            CaseNode(
                name=f"gpu-{number}",
                group=group.name,
                zone=group.zone,
                cpu_milli=group.cpu_milli,
                memory_mib=group.memory_mib,
                held=Held(cpu_milli=group.cpu_milli // 2, memory_mib=group.memory_mib // 2, pods=9),
                cards=cards,
            )
        )
    requests = drawn_requests(seed, pods)
    return PlanningCase(format=FORMAT, groups=shapes, requests=requests, nodes=tuple(there))


def openb(folder: Path, arrivals: int = 300) -> PlanningCase:
    """Return the first arrivals of the trace, with its node shapes as offers."""
    shapes = sorted(
        {tuple(row.values())[1:] for row in _rows(folder / "openb_node_list_gpu_node.csv")}
    )
    pods = {row["name"]: row for row in _rows(folder / "openb_pod_list_default.csv")}
    with gzip.open(folder / "default.42.arrivals.csv.gz", "rt", newline="") as file:
        names = [row["name"] for row in csv.DictReader(file)][:arrivals]
    return PlanningCase(
        format=FORMAT,
        groups=tuple(_openb_group(shape) for shape in shapes),
        requests=tuple(
            _openb_request(name, number, pods[name]) for number, name in enumerate(names)
        ),
    )


def _openb_group(shape: Sequence[str]) -> NodeGroup:
    cpu, memory, cards, model = int(shape[0]), int(shape[1]), int(shape[2]), shape[3]
    price = cards * OPENB_PRICES[model] + 0.1 * cpu / 1000 + 0.02 * memory / 1024
    return NodeGroup(
        name=f"{model}x{cards}-{cpu // 1000}-{memory // 1024}",
        price=round(price, 4),
        cpu_milli=cpu,
        memory_mib=memory,
        cards=(NewCard(model=model, memory_mib=1000),) * cards,
    )


def _openb_request(name: str, number: int, pod: dict[str, str]) -> CaseRequest:
    cards, milli = int(pod["num_gpu"]), int(pod["gpu_milli"])
    return CaseRequest(
        name=f"{name}-{number}",
        cards=cards,
        memory=Amount(mib=milli) if cards else None,
        models=tuple(filter(None, pod["gpu_spec"].split("|"))),
        cpu_milli=int(pod["cpu_milli"]),
        memory_mib=int(pod["memory_mib"]),
    )


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
