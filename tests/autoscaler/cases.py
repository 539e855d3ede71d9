"""Cases as JSON: a short form for tables, and tiny random ones with everything that the format has."""

from typing import Any

from hypothesis import strategies as st

JSON = dict[str, Any]

T4 = {"model": "Tesla T4", "memory_mib": 15079}
A10 = {"model": "NVIDIA A10", "memory_mib": 23028}


def case(*requests: JSON, groups: list[JSON], **more: Any) -> JSON:
    """Return a case."""
    return {"format": "fenka.plan/1", "groups": groups, "requests": list(requests), **more}


def group(name: str = "t4", price: float = 4.0, cards: int = 1, **more: Any) -> JSON:
    """Return a group of nodes with T4s."""
    host = {"cpu_milli": 16000, "memory_mib": 65536}
    return {"name": name, "price": price, **host, "cards": [T4] * cards, **more}


def node(name: str = "gpu", *held_mib: int, **more: Any) -> JSON:
    """Return a node with T4s of which so much is held."""
    host = {"cpu_milli": 16000, "memory_mib": 65536}
    return {"name": name, **host, "cards": [{**T4, "held_mib": it} for it in held_mib], **more}


def request(name: str = "r", units: int = 4, count: int = 1, **more: Any) -> JSON:
    """Return a request for units of GiB."""
    return {"name": name, "count": count, "memory": {"units": units, "unit_mib": 1024}, **more}


def _mostly(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    """Draw the usual value in two cases of three, so that most cases can be served."""
    return st.sampled_from([usual] * 2 * len(others) + list(others))


ZONES = st.sampled_from(["a", "b"])
TAINT = {"key": "k", "value": "v", "effect": "NoSchedule"}
TAINTS = _mostly([], [TAINT], [{**TAINT, "effect": "PreferNoSchedule"}])
LABELS = st.sampled_from([{}, {"disk": "ssd"}, {"disk": "hdd"}])
CAPACITY = _mostly("on-demand", "spot")
CARDS: st.SearchStrategy[JSON] = st.sampled_from([T4, A10])


def machine() -> dict[str, st.SearchStrategy[Any]]:
    """Return what groups and nodes have in common."""
    return {
        "zone": ZONES,
        "capacity": CAPACITY,
        "labels": LABELS,
        "taints": TAINTS,
        "cpu_milli": _mostly(8000, 2000, 4000),
        "memory_mib": _mostly(16384, 4096),
        "pods": _mostly(110, 1, 2),
        "resources": st.sampled_from([{}, {"x/mig": 1}, {"x/mig": 2}]),
    }


@st.composite
def groups(draw: st.DrawFn, name: str) -> JSON:
    """Draw a group."""
    least = draw(st.sampled_from([0, 0, 0, 0, 1]))
    size = draw(st.sampled_from([0, 0, 1]))
    return {
        "name": name,
        "price": draw(st.sampled_from([0.5, 1, 1.5, 2.25, 4, 4, 0])),
        **draw(st.fixed_dictionaries(machine())),
        "protection_s": draw(st.sampled_from([0, 3600])),
        "min": least,
        "size": size,
        "max": least + size + draw(st.sampled_from([0, 1, 2, 1000])),
        "stock": draw(st.sampled_from([None, None, least, least + 2])),
        "cards": draw(st.lists(CARDS, min_size=draw(_mostly(2, 0, 1)), max_size=2)),
    }


@st.composite
def held_cards(draw: st.DrawFn) -> JSON:
    """Draw a card of a node there."""
    card = draw(CARDS)
    held = draw(st.sampled_from([0, 0, card["memory_mib"] // 2, card["memory_mib"], 20000]))
    return {
        **card,
        "held_mib": held,
        "held_compute": draw(st.sampled_from([0, 0, 60, 100])),
        "whole": draw(st.sampled_from([False, False, False, True])),
        "closed": draw(st.sampled_from([False, False, False, True])),
    }


@st.composite
def nodes(draw: st.DrawFn, name: str) -> JSON:
    """Draw a node there."""
    return {
        "name": name,
        **draw(st.fixed_dictionaries(machine())),
        "group": draw(st.sampled_from(["", "g0"])),
        "protected_s": draw(st.sampled_from([0, 1500])),
        "held": {
            "cpu_milli": draw(st.sampled_from([0, 1500, 9000])),
            "pods": draw(st.sampled_from([0, 1])),
            "resources": draw(st.sampled_from([{}, {"x/mig": 1}])),
        },
        "cards": draw(st.lists(held_cards(), max_size=2)),
    }


@st.composite
def requests(draw: st.DrawFn, name: str) -> JSON:
    """Draw a request."""
    asks: JSON = draw(
        st.sampled_from(
            [
                {"memory": {"units": 3, "unit_mib": 1024}},
                {"memory": {"units": 8, "unit_mib": 1024}},
                {"memory": {"units": 15, "unit_mib": 1024}},
                {"memory": {"units": 60, "unit_mib": 256}, "compute": 30},
                {"memory": {"mib": 7539}},
                {"memory": {"mib": 7539}, "cards": 2},
                {"memory": {"units": 5, "unit_mib": 1024}, "compute": 60},
                {"compute": 40},
                {"compute": 50, "cards": 2},
                {"whole": True},
                {"whole": True, "cards": 2},
                {"cards": 0},
            ]
        )
    )
    return {
        "name": name,
        **asks,
        "count": draw(_mostly(1, 2)),
        "priority": draw(_mostly(0, 5)),
        "gang": draw(_mostly(None, "g", "h")),
        "models": draw(_mostly([], ["Tesla T4"])),
        "cpu_milli": draw(_mostly(500, 0, 1500, 3000)),
        "memory_mib": draw(_mostly(1024, 0, 5000)),
        "resources": draw(_mostly({}, {"x/mig": 1})),
        "selector": draw(
            _mostly(
                {},
                {"disk": "ssd"},
                {"topology.kubernetes.io/zone": "a"},
                {"fenka.io/group": "g0"},
                {"fenka.io/capacity": "spot"},
            )
        ),
        "tolerations": draw(
            st.sampled_from(
                [[], [{"operator": "Exists"}], [{"key": "k", "value": "v", "effect": "NoSchedule"}]]
            )
        ),
        "interruptible": draw(_mostly(True, False)),
        "duration_s": draw(st.sampled_from([None, 1000, 2000])),
    }


LIMITS = _mostly(
    {},
    {"nodes": 2},
    {"nodes": 3, "price": 4},
    {"price": 5.5},
    {"cards": {"Tesla T4": 1}},
    {"cards": {"Tesla T4": 2, "NVIDIA A10": 0}},
)


@st.composite
def cases(draw: st.DrawFn, most_groups: int = 2, most_nodes: int = 1, most: int = 3) -> JSON:
    """Draw a tiny case. most: requests, of one or two pods."""
    return {
        "format": "fenka.plan/1",
        "groups": [draw(groups(f"g{it}")) for it in range(draw(_mostly(most_groups, 0, 1)))],
        "nodes": [draw(nodes(f"n{it}")) for it in range(draw(_mostly(most_nodes, 0)))],
        "requests": [draw(requests(f"r{it}")) for it in range(draw(_mostly(most, 1, 2)))],
        "gangs": draw(
            st.sampled_from(
                [
                    {},
                    {"g": {"zone": "same"}},
                    {"g": {}, "h": {"zone": "same"}},
                    {"g": {"same": ["disk"]}},
                    {"g": {"zone": "same", "same": ["disk"]}},
                ]
            )
        ),
        "limits": draw(LIMITS),
    }
