"""What a pod requests of GPUs, parsed once and kept with the pod (`Pod.demand`)."""

from collections.abc import Mapping
from functools import cached_property, lru_cache

import msgspec

from fenka.cluster.recent import SharedValues
from fenka.core.request import ComputeMode
from fenka.core.units import mib_to_units
from fenka.dialects import gpushare, nvidia
from fenka.dialects.base import Dialect, InvalidRecord, PodRequest, SharedNode, SliceRequest
from fenka.dialects.mig_records import INSIDE
from fenka.dialects.placements import nominal_mib
from fenka.dialects.registry import detect, names_any, option_names


class PodDemand:
    """What a pod requests in the first dialect that matches it.

    Attributes:
        dialects: those that were tried.
        dialect: None if the pod requests nothing, or `error` says why it cannot be read.
        refused: whether the pod is not served in any dialect, for what else it has.
    """

    refused = False

    def __init__(self, request: PodRequest, dialects: tuple[Dialect, ...]) -> None:
        self._request, self.dialects = request, dialects
        self._result: tuple[tuple[SliceRequest, ...], str | None] | None = None
        self._inside: tuple[str, PodDemand] | None = None
        """The same inside instances of a profile; nearly all nodes have the same."""
        self.error: str | None = None
        self.dialect: Dialect | None = None
        try:
            self.dialect = detect(request, dialects)
        except InvalidRecord as why:
            self.error = str(why)

    @property
    def requests_gpu(self) -> bool:
        """Return whether the pod requests anything of a card, readable or not."""
        return self.dialect is not None or self.error is not None

    @property
    def parts(self) -> tuple[SliceRequest, ...]:
        """Return what the pod requests; empty for nothing. Raises InvalidRecord."""
        parts, invalid = self._parsed
        if invalid is not None:
            raise InvalidRecord(invalid)
        return parts

    @property
    def invalid(self) -> str | None:
        """Return why `parts` cannot be read; None if they can."""
        return self._parsed[1]

    @property
    def in_instances(self) -> bool:
        """Return whether the pod requests instances of divided cards, or slices in them."""
        return bool(self.instance)

    @property
    def instance(self) -> str:
        """Return the first profile of which the pod requests instances, ANY_INSTANCE; empty for cards."""
        parts = self._parsed[0]
        return parts[0].request.instance if parts else ""

    @property
    def of_single_cards(self) -> bool:
        """Return whether the pod requests slices of one card each, and nothing else of cards or instances."""
        requests = [part.request for part in self._parsed[0]]
        return bool(requests) and not any(
            it.whole or it.instance or it.cards > 1 for it in requests
        )

    def inside(self, profile: str) -> "PodDemand":
        """Return the same request inside instances, as with the annotation. profile: or ANY_INSTANCE."""
        if self._inside is None or self._inside[0] != profile:
            annotations = {**self._request.annotations, INSIDE: profile}
            request = msgspec.structs.replace(self._request, annotations=annotations)
            self._inside = profile, PodDemand(request, self.dialects)
        return self._inside[1]

    @property
    def served_by_kubelet(self) -> bool:
        """Return whether the kubelet of a node that does not share gives what the pod requests, too."""
        whole = all(part.request.whole for part in self._parsed[0])
        return self.dialect is nvidia or (self.in_instances and whole)

    @property
    def weight(self) -> int:
        """Return the sum of the pod's weights of compute; 0 for none."""
        return sum([part.weight * part.request.cards for part in self._parsed[0]])

    @property
    def core_mode(self) -> ComputeMode:
        """Return the meaning of the compute that the pod requests; hard if it requests none."""
        modes = [part.core_mode for part in self._parsed[0]]
        return next((mode for mode in modes if mode != "hard"), "hard")

    @property
    def _parsed(self) -> tuple[tuple[SliceRequest, ...], str | None]:
        # Faster than cached_property, which locks until Python 3.12.
        if self._result is None:
            self._result = self._parse()
        return self._result

    def _parse(self) -> tuple[tuple[SliceRequest, ...], str | None]:
        if self.dialect is None:
            return (), self.error
        try:
            return self.dialect.parse(self._request), None
        except InvalidRecord as why:
            return (), str(why)

    @cached_property
    def amounts(self) -> dict[str, int]:
        """Return the kubelet's amount of each resource of the dialect. Raises InvalidRecord."""
        if self.error is not None:
            raise InvalidRecord(self.error)
        names = self._request.requested_resources(self.dialect.RESOURCES) if self.dialect else ()
        return {name: gpushare.peak_units(self._request.container_units(name)) for name in names}

    def amount(self, resource: str) -> int:
        """Return the amount of one resource; 0 if the request cannot be read."""
        return 0 if self.error is not None else self.amounts.get(resource, 0)

    def units(self, node: SharedNode) -> float:
        """Return the units of the node's memory that the pod requests; 0 if that cannot be read."""
        try:
            if gpushare.MEMORY in self.amounts:
                return self.amounts[gpushare.MEMORY]
            parts = self.parts
        except InvalidRecord:
            return 0
        card = node.node.cards[0]
        return sum(
            part.request.cards
            * mib_to_units(
                nominal_mib(part.request, node.node, card), card.memory_mib, node.unit_mib
            )
            for part in parts
        )


class RefusedDemand(PodDemand):
    """The demand of a pod that requests cards and is not served. error: the sentence for its user."""

    refused = True

    def __init__(self, why: str) -> None:
        super().__init__(PodRequest(()), ())
        self.error = why

    def inside(self, _: str) -> PodDemand:
        """Return the same: it is not served in instances either."""
        return self


def shared_demand(request: PodRequest, dialects: tuple[Dialect, ...]) -> PodDemand:
    """Return what is requested by these dialects' names.

    New versions of a pod, and pods of one workload, share what was parsed for the first of them.
    """
    if not names_any([each.resources for each in request.containers], dialects):
        return _nothing(dialects)
    names = option_names(dialects)
    labels, annotations = _only(request.labels, names), _only(request.annotations, names)
    request = PodRequest(request.containers, labels, annotations)
    key, demands = msgspec.json.encode(request), _recent_demands(dialects)
    demand = demands.get(key)
    if demand is None:
        demand = demands[key] = PodDemand(request, dialects)
    return demand


def _only(given: Mapping[str, str], names: frozenset[str]) -> dict[str, str]:
    # Most pods have none of them.
    return {} if names.isdisjoint(given) else {name: given[name] for name in names if name in given}


@lru_cache(maxsize=8)
def _recent_demands(_: tuple[Dialect, ...]) -> SharedValues[PodDemand]:
    return SharedValues()


@lru_cache(maxsize=8)
def _nothing(dialects: tuple[Dialect, ...]) -> PodDemand:
    return PodDemand(PodRequest(()), dialects)
