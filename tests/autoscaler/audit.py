"""Checks plans and finds best ones by plain arithmetic on JSON, without fenka's code.

It follows the format's description: sizes, taints, spot, gangs, bounds. `best` tries everything, so it is
for tiny cases.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

JSON = dict[str, Any]
Key = tuple[tuple[int, ...], float, int]


def audit(case: JSON, plan: JSON) -> None:
    """Raise AssertionError for the first thing that is wrong with a plan."""
    assert plan["format"] == "fenka.plan/1"
    groups = {group["name"]: group for group in case["groups"]}
    requests = {request["name"]: request for request in case["requests"]}
    new = {each["group"]: each["count"] for each in plan["nodes"]}
    assert all(count > 0 for count in new.values())
    assert within_bounds(case, new), "bounds of groups or limits"
    slots = {node["name"]: Slot(node, node["name"]) for node in case.get("nodes", [])}
    for name, count in new.items():
        slots |= {f"new:{name}:{it}": Slot(groups[name], None) for it in range(count)}
    served: Counter[str] = Counter()
    zones: dict[str, set[str]] = {}
    for placement in plan["placements"]:
        request, slot = requests[placement["request"]], slots[placement["node"]]
        assert slot.take(request, tuple(placement["cards"])), placement
        served[request["name"]] += 1
        zones.setdefault(request.get("gang") or "", set()).add(slot.place)
    assert gangs_whole(case, served, zones)
    unserved = {each["request"]: each["count"] for each in plan["unserved"]}
    for request in case["requests"]:
        count = request.get("count", 1)
        assert served[request["name"]] + unserved.get(request["name"], 0) == count
    assert all(each["count"] > 0 and each["why"] for each in plan["unserved"])
    cost = sum(count * groups[name]["price"] for name, count in new.items())
    assert abs(cost - plan["cost"]) < 1e-6
    assert plan["bound"] <= plan["cost"] + 1e-6
    assert not plan["optimal"] or abs(plan["bound"] - plan["cost"]) < 1e-6


def key_of(case: JSON, plan: JSON) -> Key:
    """Return what sorts plans: served by priority, the price, the number of nodes."""
    served = Counter(placement["request"] for placement in plan["placements"])
    nodes = {each["group"]: each["count"] for each in plan["nodes"]}
    return _key(case, served, nodes)


def _key(case: JSON, served: Counter[str], nodes: dict[str, int]) -> Key:
    prices = {group["name"]: group["price"] for group in case["groups"]}
    levels = sorted({request.get("priority", 0) for request in case["requests"]}, reverse=True)
    by_level: Counter[int] = Counter()
    for request in case["requests"]:
        by_level[request.get("priority", 0)] += served[request["name"]]
    cost = round(sum(count * prices[name] for name, count in nodes.items()), 4)
    return tuple(-by_level[level] for level in levels), cost, sum(nodes.values())


def within_bounds(case: JSON, new: dict[str, int]) -> bool:
    """Return whether groups and limits allow these new nodes."""
    limits = case.get("limits", {})
    price, cards = 0.0, Counter[str]()
    for group in case["groups"]:
        count, size = new.get(group["name"], 0), group.get("size", 0)
        if count and size + count > group.get("max", 1000):
            return False
        stock = group.get("stock")
        if size + count < group.get("min", 0) or (stock is not None and count > stock):
            return False
        price += count * group["price"]
        for card in group.get("cards", []):
            cards[card.get("model", "")] += count
    if limits.get("nodes") is not None and sum(new.values()) > limits["nodes"]:
        return False
    if limits.get("price") is not None and price > limits["price"] + 1e-9:
        return False
    return all(cards[model] <= most for model, most in limits.get("cards", {}).items())


def gangs_whole(case: JSON, served: Counter[str], zones: dict[str, set[str]]) -> bool:
    """Return whether each gang has all its members or none, in one zone or domain if it wants that.

    zones: of each gang the zones of its nodes, with the values of their label `disk` after a slash.
    """
    members: dict[str, list[JSON]] = {}
    for request in case["requests"]:
        if request.get("gang") is not None:
            members.setdefault(request["gang"], []).append(request)
    for name, of_gang in members.items():
        counts = [served[it["name"]] for it in of_gang]
        whole = [it.get("count", 1) for it in of_gang]
        if any(counts) and counts != whole:
            return False
        rule, places = case.get("gangs", {}).get(name, {}), zones.get(name, set())
        if rule.get("zone") == "same" and len({it.partition("/")[0] for it in places}) > 1:
            return False
        if rule.get("same"):
            assert rule["same"] == ["disk"], "the only label that cases have"
            disks = {it.partition("/")[2] for it in places}
            if len(disks) > 1 or "" in disks:
                return False
    return True


class Slot:
    """A node with what is free of it."""

    def __init__(self, node: JSON, name: str | None) -> None:
        self.node, self.name = node, name
        self.zone = node.get("zone", "")
        self.place = f"{self.zone}/{node.get('labels', {}).get('disk', '')}"
        held = node.get("held", {})
        self.host = Counter({"cpu": node["cpu_milli"], "memory": node["memory_mib"]})
        self.host["pods"] = node.get("pods", 110)
        self.host.update({f"r/{it}": count for it, count in node.get("resources", {}).items()})
        used = {"cpu": held.get("cpu_milli", 0), "memory": held.get("memory_mib", 0)}
        used["pods"] = held.get("pods", 0)
        used |= {f"r/{it}": count for it, count in held.get("resources", {}).items()}
        self.host.subtract(used)
        self.cards = [dict(card) for card in node.get("cards", [])]
        for card in self.cards:
            card["free"] = max(card["memory_mib"] - card.get("held_mib", 0), 0)
            card["compute"] = max(100 - card.get("held_compute", 0), 0)
            card["shut"] = card.get("closed", False) or card.get("whole", False)
            card["idle"] = not (
                card.get("held_mib", 0) or card.get("held_compute", 0) or card["shut"]
            )

    def may(self, request: JSON) -> bool:
        """Return whether labels, taints and the kind of capacity allow it."""
        implied = {
            "topology.kubernetes.io/zone": self.zone,
            "fenka.io/capacity": self.node.get("capacity", "on-demand"),
            "fenka.io/group": self.node["name"]
            if self.name is None
            else self.node.get("group", ""),
        }
        labels = {**self.node.get("labels", {}), **implied}
        if any(labels.get(key) != value for key, value in request.get("selector", {}).items()):
            return False
        for taint in self.node.get("taints", []):
            if taint["effect"] == "PreferNoSchedule":
                continue
            if not any(_tolerates(it, taint) for it in request.get("tolerations", [])):
                return False
        if self.node.get("capacity", "on-demand") == "on-demand" or request.get("interruptible"):
            return True
        safe = self.node.get("protection_s" if self.name is None else "protected_s", 0)
        return request.get("duration_s") is not None and request["duration_s"] <= safe

    def take(self, request: JSON, cards: tuple[int, ...]) -> bool:
        """Take it on these cards if that is possible; return whether it was."""
        wanted = _host(request)
        if not self.may(request) or any(it > self.host[name] for name, it in wanted.items()):
            return False
        if len(cards) != request.get("cards", 1) or len(set(cards)) != len(cards):
            return False
        sizes = [self.size(request, card) for card in cards]
        if any(size is None for size in sizes):
            return False
        for card, size in zip(cards, sizes, strict=True):
            self.cards[card]["free"] -= size
            self.cards[card]["compute"] -= (
                100 if request.get("whole") else request.get("compute", 0)
            )
            self.cards[card]["idle"] = False
            self.cards[card]["shut"] |= request.get("whole", False)
        self.host.subtract(wanted)
        return True

    def give(self, request: JSON, cards: tuple[int, ...], before: list[JSON]) -> None:
        """Take it back."""
        self.host.update(_host(request))
        for card, state in zip(cards, before, strict=True):
            self.cards[card] = state

    def size(self, request: JSON, number: int) -> int | None:
        """Return the MiB that it takes of a card, None if it does not fit."""
        card = self.cards[number]
        models = request.get("models", [])
        if card["shut"] or (models and card.get("model", "") not in models):
            return None
        if request.get("whole"):
            return int(card["memory_mib"]) if card["idle"] else None
        if request.get("compute", 0) > card["compute"]:
            return None
        memory = request.get("memory") or {}
        size = int(memory.get("mib", 0))
        if memory.get("units"):
            units = card["memory_mib"] // memory["unit_mib"]
            if memory["units"] > units:
                return None
            size = int(card["memory_mib"] * memory["units"] // units)
        return size if size <= card["free"] else None

    def state(self) -> tuple[object, ...]:
        """Return what makes slots equal for what comes."""
        cards = tuple(tuple(sorted((k, str(v)) for k, v in card.items())) for card in self.cards)
        return self.place, self.node["name"], tuple(sorted(self.host.items())), cards


def _host(request: JSON) -> dict[str, int]:
    wanted = {"cpu": request.get("cpu_milli", 0), "memory": request.get("memory_mib", 0), "pods": 1}
    wanted |= {f"r/{it}": count for it, count in request.get("resources", {}).items()}
    return {name: count for name, count in wanted.items() if count}


def _tolerates(toleration: JSON, taint: JSON) -> bool:
    if toleration.get("effect", "") not in ("", taint["effect"]):
        return False
    if toleration.get("key", "") not in ("", taint["key"]):
        return False
    equal = toleration.get("value", "") == taint.get("value", "")
    return bool(equal or toleration.get("operator", "Equal") == "Exists")


def best(case: JSON) -> Key:
    """Return the key of the best plan there is."""
    pods = [request for request in case["requests"] for _ in range(request.get("count", 1))]
    choices = [range(_most(case, group, len(pods)) + 1) for group in case["groups"]]
    names = [group["name"] for group in case["groups"]]
    top: Key | None = None
    ordered = sorted(
        itertools.product(*choices),
        key=lambda it: (
            sum(n * g["price"] for n, g in zip(it, case["groups"], strict=True)),
            sum(it),
        ),
    )
    for counts in ordered:
        nodes = {name: count for name, count in zip(names, counts, strict=True) if count}
        if not within_bounds(case, nodes):
            continue
        for served in _served(case, nodes, pods):
            key = _key(case, served, nodes)
            if top is None or key < top:
                top = key
        if top is not None and -sum(top[0]) == len(pods):
            break
    assert top is not None, "no plan keeps the bounds"
    return top


def _most(case: JSON, group: JSON, pods: int) -> int:
    wanted = max(group.get("min", 0) - group.get("size", 0), 0) + pods
    room = max(group.get("max", 1000) - group.get("size", 0), 0)
    stock = group.get("stock")
    return int(min(wanted, room, wanted if stock is None else stock))


def _served(case: JSON, nodes: dict[str, int], pods: list[JSON]) -> Iterator[Counter[str]]:
    """Yield what can be served on these nodes; at least the sets that are not part of others."""
    groups = {group["name"]: group for group in case["groups"]}
    slots = [Slot(node, node["name"]) for node in case.get("nodes", [])]
    slots += [Slot(groups[name], None) for name, count in nodes.items() for _ in range(count)]
    seen: set[object] = set()

    def search(
        number: int, served: Counter[str], zones: dict[str, list[str]]
    ) -> Iterator[Counter[str]]:
        if number == len(pods):
            if gangs_whole(case, served, {gang: set(it) for gang, it in zones.items()}):
                yield +served
            return
        state = (
            number,
            tuple(sorted(+served)),
            tuple(sorted((+served).items())),
            tuple(sorted(((gang, tuple(sorted(set(it)))) for gang, it in zones.items()))),
            tuple(sorted(map(str, (slot.state() for slot in slots)))),
        )
        if state in seen:
            return
        seen.add(state)
        request = pods[number]
        gang = request.get("gang") or ""
        for slot in slots:
            for cards in itertools.combinations(range(len(slot.cards)), request.get("cards", 1)):
                before = [dict(slot.cards[card]) for card in cards]
                if slot.take(request, cards):
                    served[request["name"]] += 1
                    zones.setdefault(gang, []).append(slot.place)
                    yield from search(number + 1, served, zones)
                    zones[gang].pop()
                    served[request["name"]] -= 1
                    slot.give(request, cards, before)
        yield from search(number + 1, served, zones)

    yield from search(0, Counter(), {})
