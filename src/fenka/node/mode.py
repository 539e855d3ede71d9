"""Selects whether the node shares its cards, from the node's labels."""

from fenka.dialects import node_modes
from fenka.dialects.base import InvalidRecord
from fenka.dialects.mig_names import RESOURCE_PREFIX
from fenka.node.lease.allocations import Allocations
from fenka.node.node_api import NodeApi


class ModeSelector:
    """The node's mode. A node whose labels stop sharing stays shared until its pods have ended."""

    def __init__(self, api: NodeApi, allocations: Allocations) -> None:
        self._api, self._allocations = api, allocations
        self.mode = node_modes.EXCLUSIVE
        self.sharing: bool | None = None
        """Whether slices are offered, or only whole cards; None until the labels were read once."""
        self.draining = False
        """Whether the node is shared only because pods still hold slices."""

    @property
    def labelled(self) -> bool:
        """Whether the node has any of the labels that select a mode."""
        return node_modes.has_mode_label(self._api.node.metadata.labels if self._api.node else {})

    def select(self) -> None:
        """Read the labels."""
        if self._api.node is None:
            return
        try:
            mode = node_modes.node_mode(self._api.node.metadata.labels)
        except InvalidRecord as error:
            self._api.node_event("FenkaLabels", f"{error}; the node's mode stays as it is")
            return
        tokens = [
            token
            for token in self._allocations.sharing_tokens()
            # Instances are given by nodes that share nothing else, too.
            if not token.resource.startswith(RESOURCE_PREFIX)
        ]
        self.draining = not mode.memory and bool(tokens)
        if self.draining:
            pods = sorted({token.lease.pod_name for token in tokens if token.lease})
            self._api.node_event(
                "FenkaStillShared",
                f"the node stays shared while {', '.join(pods) or 'pods'} hold slices of its cards; "
                f"no new ones are given",
            )
        self.mode = node_modes.SHARED if self.draining else mode
        self.sharing = self.mode.memory

    def isolates(self) -> bool:
        """Return whether limits are enforced. A label that disables that is reported on the Node."""
        if self.mode.isolated:
            return True
        self._api.node_event(
            "FenkaNotIsolated",
            "isolation is disabled by the node's labels: containers that start here may use all of their "
            "card's memory and time, whatever they requested",
        )
        return False
