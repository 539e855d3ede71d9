"""A cloud for scenarios: the strict fake of Alibaba Cloud, whose instances are machines of the cluster."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from e2e.cluster import Cluster, wait_until
from e2e.elastic import Group, Instances
from e2e.supervisor import REPOSITORY
from fenka.cloud.simulated_cloud import Prices, SimulatedOffer
from tests.cloud.alibaba.state import Fault, Folder, Landscape, ScalingGroup, State

REGION, CLUSTER, PORT = "cn-e2e", "e2e", 8099
TYPE, TEMPLATE = "ecs.gn6i-c4g1.xlarge", "lt-e2e"
ZONES = {"g": "vsw-g", "h": "vsw-h"}
KEY, SECRET = "key", "secret"
T4 = {"model": "Tesla T4", "memory": "15079MiB"}
CARDS = {"t4": 1, "four": 4}
"""The number of cards by the value of the label fenka.io/simulated."""


@dataclass(frozen=True)
class Offer:
    """A group of the configuration, and what the cloud has of it.

    Attributes:
        cards: a key of CARDS.
        scaled: its scaling group launches; else each launch is of one zone, and exact.
        more: further fields of the group in the configuration.
    """

    name: str
    cards: str = "t4"
    zones: tuple[str, ...] = ("g",)
    price: float = 11.63
    capacity: str = "on-demand"
    mode: str = "gpushare=true"
    joins: bool = True
    scaled: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def type(self) -> str:
        """The instance type: each group has its own, so that it has its own stock."""
        return f"{TYPE}-{self.name}"

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its nodes."""
        key, _, value = self.mode.partition("=")
        return {key: value, "fenka.io/simulated": self.cards}

    def configuration(self) -> dict[str, Any]:
        """Return the group as an operator writes it."""
        launch: dict[str, Any] = {"launchTemplate": TEMPLATE, "vSwitches": ZONES}
        return {
            "name": self.name,
            "types": [self.type],
            "zones": list(self.zones),
            "capacity": self.capacity,
            "price": self.price,
            "labels": self.labels,
            "startup": "10s",
            "shape": {
                "cpu": "1500m",
                "memory": "8GiB",
                "pods": 110,
                "cards": [{**T4, "count": CARDS[self.cards]}],
            },
            **({"id": f"asg-{self.name}"} if self.scaled else launch),
            **self.more,
        }


@dataclass(frozen=True)
class Launch:
    """A call that launches, as the fake remembers it."""

    action: str
    given: Mapping[str, Any]
    status: int

    @property
    def amount(self) -> int:
        """How many instances it asks for."""
        return int(self.given.get("Amount") or self.given["AdjustmentValue"])


class FakeCloud:
    """The fake, over HTTP in the control plane's network."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folder = Folder(self.cluster.state / "cloud")
        self.instances = Instances(self.cluster.state)
        self.address = f"{self.cluster.control_plane.address}:{PORT}"

    def sell(self, offers: Sequence[Offer]) -> None:
        """Set what can be had, of which any number is in stock."""
        self.folder.change(
            Landscape(
                region=REGION,
                secrets={KEY: SECRET},
                offers=tuple(
                    SimulatedOffer("", it.type, zone, (Prices(it.price),), it.capacity)  # type: ignore[arg-type]
                    for it in offers
                    for zone in it.zones
                ),
                groups=tuple(
                    ScalingGroup(
                        f"asg-{it.name}",
                        (it.type,),
                        it.zones,
                        tags={"fenka.io/cluster": CLUSTER, "fenka.io/group": it.name},
                    )
                    for it in offers
                    if it.scaled
                ),
                templates={TEMPLATE: {}},
                vswitches={switch: zone for zone, switch in ZONES.items()},
            )
        )
        self.instances.configure(
            {it.name: Group(it.labels, it.joins) for it in offers}, REGION + ".{id}"
        )

    def change(self, offer: Offer, zone: str = "g", **fields: float | None) -> None:
        """Change price or stock of an offer in a zone, from the beginning of time."""
        land = self.folder.landscape()
        offers = [
            msgspec.structs.replace(it, market=(msgspec.structs.replace(it.market[-1], **fields),))
            if (it.type, it.zone) == (offer.type, zone)
            else it
            for it in land.offers
        ]
        self.folder.change(msgspec.structs.replace(land, offers=tuple(offers)))

    def hold(self, action: str, seconds: float) -> None:
        """Let the answer to the next call of an action come so much later than the deed."""
        self.folder.add_fault(Fault(action, "hold", seconds))

    def let_pass(self, seconds: int) -> None:
        """Set the cloud's clock so much ahead."""
        self.folder.set_clock(f"+{seconds}")

    @property
    def state(self) -> State:
        """What the fake remembers."""
        return self.folder.state(0.0)

    @property
    def machines(self) -> list[str]:
        """The IDs of the instances that are not gone."""
        return sorted(self.state.cloud.machines)

    def launches(self) -> list[Launch]:
        """Return the distinct calls that launch, in their order. A repeated token is one call."""
        spent = self.state.tokens.values()
        calls = [(*call.parameters.partition(" "), call.status) for call in spent]
        return [
            Launch(action, json.loads(given), status)
            for action, _, given, status in calls
            if action in ("RunInstances", "ScaleWithAdjustment")
        ]

    def address_of(self, name: str) -> str:
        """Return the address of an instance."""
        instance = self.instances.read(name)
        assert instance is not None
        return self.cluster.layout.spare_address(instance.number)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Answer calls."""
        program = (sys.executable, "-m", "tests.cloud.alibaba.server", str(self.folder.path))
        listening = ("--host", self.cluster.control_plane.address, "--port", str(PORT))
        command = ("--command", sys.executable, "-m", "e2e.elastic", str(self.cluster.state))
        with (self.cluster.state / "logs" / "cloud.log").open("ab") as log:
            server = subprocess.Popen(
                self.cluster.command(*program, *listening, *command),
                cwd=REPOSITORY,
                env=self.cluster.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield
        finally:
            server.terminate()
            server.wait()

    def end_all(self) -> None:
        """End all instances, and delete their Nodes."""
        names = [it.id for it in self.instances.all()]
        for name in names:
            subprocess.run(
                [sys.executable, "-m", "e2e.elastic", str(self.cluster.state), "end", name],
                cwd=REPOSITORY,
                check=True,
            )
        wait_until("the end of all instances", lambda: not self.instances.all())
        if names:
            self.cluster.kubectl("delete", "node", *names, "--ignore-not-found")
