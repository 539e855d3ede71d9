"""The page of a cluster for viewers of some of its namespaces: slices of other namespaces have no name."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from fenka.views.board import CardTile, SliceTile, World

OTHER = "other"
"""The name of a slice that another namespace has."""

_FULL_NAME = re.compile(r"(?<![\w./-])([a-z0-9-]+)/[a-z0-9][a-z0-9.-]*")


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which of a cluster's namespaces a viewer sees.

    Attributes:
        known: All namespaces with pods.
        namespaces: Those that the viewer sees; None for all.
        acts: Whether the viewer may change what they see, with their own rights.
    """

    known: Collection[str]
    namespaces: frozenset[str] | None = None
    acts: bool = False

    def sees(self, namespace: str) -> bool:
        """Return whether the viewer sees a namespace."""
        return self.namespaces is None or namespace in self.namespaces

    def sentence(self, text: str) -> str:
        """Return a sentence without the names of pods of other namespaces."""

        def hide(found: re.Match[str]) -> str:
            hidden = found[1] in self.known and not self.sees(found[1])
            return "a pod of another namespace" if hidden else found[0]

        return _FULL_NAME.sub(hide, text)

    def tiles(self, tiles: Sequence[CardTile]) -> list[CardTile]:
        """Return cards, on which others' slices show their size only."""
        return [self._tile(tile) for tile in tiles]

    def _tile(self, tile: CardTile) -> CardTile:
        if self.namespaces is None:
            return tile
        slices = [
            piece
            if self.sees(piece.user)
            else SliceTile("", OTHER, "", piece.held_mib, profile=piece.profile, start=piece.start)
            for piece in tile.slices
        ]
        # Programs without a lease are named.
        return replace(tile, slices=slices, unleased="", note=self.sentence(tile.note))

    def world(self, world: World) -> World:
        """Return a cluster as the viewer sees it. Requests of others keep their place in the queue."""
        programs = [
            replace(line, own=self.acts, starts=[*filter(self._sees_pod, line.starts)])
            for line in world.programs
            if self.sees(line.user)
        ]
        waiting = [
            replace(
                line,
                own=self.acts,
                why=self.sentence(line.why),
                helps=[self.sentence(text) for text in line.helps],
            )
            for line in world.waiting
            if self.sees(line.user)
        ]
        everything = self.namespaces is None
        return replace(
            world,
            cards=self.tiles(world.cards),
            programs=programs,
            programs_total=world.programs_total if everything else len(programs),
            waiting=waiting,
            workloads=[line for line in world.workloads if self.sees(line.user)],
            people=[line for line in world.people if self.sees(line.user)],
            nodes=[replace(line, note=self.sentence(line.note)) for line in world.nodes],
            problems=[self.sentence(text) for text in world.problems],
            actions=self.acts,
        )

    def _sees_pod(self, name: str) -> bool:
        return self.sees(name.partition("/")[0])
