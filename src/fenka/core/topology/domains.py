"""Topology domains, such as racks and zones: which nodes are close together, and how a gang gets few of them.

Node labels name the domains, as in Kueue's topologies. `gangs.place_all` tries the sets of nodes that
`DomainSearch` yields. Room is a bound here, so a set may turn out to be too small.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add, ge
from typing import NamedTuple

from fenka.core.request import Request

Domain = tuple[str, ...]
"""Values of a node's labels, the outermost level first. Racks of equal names in two zones are two domains."""

MAX_TRIED = 16
"""Domains of one level that are tried: this number of the tightest, and of those with the most room.

It is divided by the number of different requests, of which each costs time in each domain.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """The domains of nodes. Two of them are equal only if they are the same object.

    Attributes:
        levels: node labels, the outermost level first.
        domains: by node, the values of its labels, up to the first one that it lacks.
    """

    levels: tuple[str, ...]
    domains: Mapping[str, Domain]

    @classmethod
    def of(
        cls, levels: tuple[str, ...], nodes: Iterable[tuple[str, Mapping[str, str]]]
    ) -> "Topology":
        """Return the topology of nodes. nodes: names and labels."""
        return cls(levels, {name: _domain(levels, labels) for name, labels in nodes})

    def domain(self, node: str, level: int) -> Domain | None:
        """Return the domain of a node on this level; None if a label is missing."""
        domain = self.domains.get(node, ())
        return domain[: level + 1] if len(domain) > level else None

    def order(self, node: str) -> tuple[tuple[bool, str], ...]:
        """Return what sorts nodes by their domains and names. Those without a label come last."""
        values = ((False, value) for value in self.domains.get(node, ()))
        return (*values, (True, node))

    def nodes_of(self, domain: Domain) -> frozenset[str]:
        """Return the nodes of a domain."""
        size = len(domain)
        return frozenset(name for name, path in self.domains.items() if path[:size] == domain)


def _domain(levels: Sequence[str], labels: Mapping[str, str]) -> Domain:
    values = []
    for level in levels:
        if not (value := labels.get(level)):
            break
        values.append(value)
    return tuple(values)


@dataclass(frozen=True, slots=True)
class Proximity:
    """How close together the members of a gang are placed.

    Attributes:
        topology: the domains of nodes.
        level: the number of the level on which one domain is wanted for all.
        required: whether no other placement is possible. Otherwise fewer domains are better.
        beside: nodes of members that have started.
    """

    topology: Topology
    level: int
    required: bool = False
    beside: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        topology: Topology,
        wanted: Iterable[tuple[bool, int]],
        beside: frozenset[str] = frozenset(),
    ) -> "Proximity":
        """Return what the members of a gang want together.

        A required level counts before a preferred one, and of several the innermost. Without any the
        innermost level is preferred.

        Args:
            topology: the domains of nodes.
            wanted: whether a level is required, and its number.
            beside: nodes of members that have started.
        """
        required, level = max(wanted, default=(False, len(topology.levels) - 1))
        return cls(topology, level, required, beside)

    @property
    def label(self) -> str:
        """Return the label of the level."""
        return self.topology.levels[self.level]

    @property
    def possible(self) -> bool:
        """Return whether members that have started leave a domain for the others."""
        domains = self.domains_beside
        return not self.required or (len(domains) <= 1 and None not in domains)

    @property
    def domains_beside(self) -> set[Domain | None]:
        """Return the domains of members that have started; None for nodes that are in none."""
        return set(map(self.domain, self.beside))

    def domain(self, node: str) -> Domain | None:
        """Return the domain of a node on the level; None if it is in none."""
        return self.topology.domain(node, self.level)


_Room = tuple[int, ...]
"""How many requests of each kind have room at most."""


_Key = tuple[str, Domain]
"""The name of a node without the label, else an empty one; and the domain."""


class _Group(NamedTuple):
    """Nodes of one domain.

    Attributes:
        far: whether no member that has started is there.
        slack: the room for requests of all kinds, as a sum.
        key: orders equal groups.
    """

    far: bool
    slack: int
    key: _Key
    room: _Room
    nodes: list[str]


class DomainSearch:
    """Finds sets of nodes for a gang, the closest together first."""

    def __init__(
        self,
        proximity: Proximity,
        wanted: Mapping[Request, int],
        rooms: Mapping[Request, Mapping[str, int]],
    ) -> None:
        """Args:
        proximity: how close together the members are wanted.
        wanted: the number of members by request.
        rooms: by request and node, how many such members have room on the node alone, at most.
        """
        self._topology, self._proximity = proximity.topology, proximity
        self._wanted = tuple(wanted.values())
        names = sorted(set[str]().union(*rooms.values()))
        self._rooms: dict[str, _Room] = {
            name: tuple(rooms[kind].get(name, 0) for kind in wanted) for name in names
        }

    def candidates(self) -> Iterator[frozenset[str]]:
        """Yield sets of nodes that may have room for all members.

        The domains of the wanted level come first. If one domain is not required, the outer levels follow,
        and then the fewest domains of the outermost level. Domains of members that have started come before
        all others.
        """
        level, required = self._proximity.level, self._proximity.required
        levels = [level] if required else range(level, -1, -1)
        for far in (False, True) if self._proximity.beside else (True,):
            for outer in levels:
                for group in self._sufficient(self._domains(outer)):
                    if group.far == far:
                        yield from self._narrowed(group.nodes, outer + 1)
                        yield frozenset(group.nodes)
        if not required:
            yield from self._narrowed(list(self._rooms), 0)

    def required_domains(self) -> list[frozenset[str]]:
        """Return the nodes of each domain of the wanted level that may have room for all members."""
        groups = self._sufficient(self._domains(self._proximity.level))
        return [frozenset(group.nodes) for group in groups]

    def roomiest(self) -> Domain | None:
        """Return the domain of the wanted level with room for the most members; None if there is none."""
        level = self._proximity.level
        usable = {
            group.key[1]: sum(map(min, group.room, self._wanted)) for group in self._domains(level)
        }
        if not usable:
            usable = {
                domain: 0
                for name in self._topology.domains
                if (domain := self._topology.domain(name, level)) is not None
                and self._may_use(domain)
            }
        return min(usable, key=lambda domain: (-usable[domain], domain), default=None)

    # ---- groups of nodes ----

    def _domains(self, level: int) -> list[_Group]:
        """Return the domains of a level that have room for a member, and that the gang may use."""
        names = [name for name in self._rooms if self._topology.domain(name, level) is not None]
        groups = self._groups(names, level)
        if not self._proximity.required:
            return groups
        return [group for group in groups if self._may_use(group.key[1])]

    def _may_use(self, domain: Domain) -> bool:
        """Return whether all members that have started are in the domain."""
        return all(
            self._topology.domain(name, len(domain) - 1) == domain
            for name in self._proximity.beside
        )

    def _groups(self, names: Iterable[str], level: int) -> list[_Group]:
        """Return the nodes by their domains of a level. A node without the label is a group by itself."""
        by_key: dict[_Key, list[str]] = {}
        for name in names:
            domain = self._topology.domain(name, level)
            by_key.setdefault((name, ()) if domain is None else ("", domain), []).append(name)
        beside = self._proximity.beside
        near = {self._topology.domain(name, level) for name in beside}
        groups = []
        for key, members in by_key.items():
            room = self._rooms[members[0]]
            for name in members[1:]:
                room = tuple(map(add, room, self._rooms[name]))
            far = key[0] not in beside and key[1] not in near
            groups.append(_Group(far, sum(room), key, room, members))
        return groups

    def _sufficient(self, groups: Iterable[_Group]) -> list[_Group]:
        """Return the groups with room for all members, those beside others and then the tightest first."""
        sufficient = sorted(group for group in groups if _covers(group.room, self._wanted))
        tried = max(MAX_TRIED // max(len(self._wanted), 1), 1)
        return sufficient[:tried] + sufficient[tried:][-tried:]

    # ---- few domains ----

    def _narrowed(self, names: list[str], level: int) -> Iterator[frozenset[str]]:
        """Yield the nodes of the fewest domains of a level and of those inside, if that leaves some out."""
        chosen = self._fewest(names, level, self._wanted)
        if len(chosen) < len(names):
            yield frozenset(chosen)

    def _fewest(self, names: list[str], level: int, wanted: _Room) -> list[str]:
        """Return nodes of few domains that have room for what is wanted; all of them if they do not have it.

        The domains with the most room come first, and the last one is the tightest that has room for the
        rest. That is how Kueue chooses them.
        """
        if level >= len(self._topology.levels):
            return names
        groups = self._groups(names, level)
        if len(groups) == 1:
            return self._fewest(names, level + 1, wanted)
        order = sorted(
            groups,
            key=lambda group: (group.far, -sum(map(min, group.room, wanted)), *group[1:3]),
        )
        chosen: list[str] = []
        left = wanted
        for position, group in enumerate(order):
            if _covers(group.room, left):
                last = min(other for other in order[position:] if _covers(other.room, left))
                return chosen + self._fewest(last.nodes, level + 1, left)
            taken = tuple(map(min, group.room, left))
            if any(taken):
                chosen += self._fewest(group.nodes, level + 1, taken)
                left = tuple(rest - part for rest, part in zip(left, taken, strict=True))
        return names


def _covers(room: _Room, wanted: _Room) -> bool:
    return all(map(ge, room, wanted))
