"""The fake as a cloud of the port's contract: two offers, a clock that stands, providers of it."""

from collections.abc import Mapping
from typing import Any

import msgspec
from alibabacloud_credentials.client import Client as Credentials
from alibabacloud_credentials.models import Config as CredentialsConfig

from fenka.cloud.alibaba.ess import EssProvider
from fenka.cloud.alibaba.sdk import open_clients
from fenka.cloud.alibaba.settings import EssConfig, EssGroup, EssProviderConfig
from fenka.cloud.port import OfferKey
from fenka.cloud.simulated_cloud import Prices, SimulatedOffer
from tests.cloud.alibaba.state import Fault, FaultKind, Folder, Landscape, ScalingGroup, State
from tests.cloud.contract import ON_DEMAND, SPOT, SPOT_CAP, Cloud

REGION, START = "cn-beijing", 1_800_000_000.0
ACTIONS = {
    "launch": ("RunInstances", "ScaleWithAdjustment"),
    "instances": ("DescribeInstances",),
}


def tags(group: str) -> dict[str, str]:
    """Return the tags of a group's instances."""
    return {"fenka.io/cluster": "demo", "fenka.io/group": group}


def landscape() -> Landscape:
    """Return the contract's two offers, each with a scaling group."""
    return Landscape(
        region=REGION,
        secrets={"key": "secret"},
        offers=tuple(
            SimulatedOffer("", key.type, key.zone, (Prices(price),), key.capacity)
            for key, price in ((ON_DEMAND, 11.63), (SPOT, 3.49))
        ),
        groups=(
            ScalingGroup("asg-t4", ("gn6i",), ("g",), tags=tags("t4")),
            ScalingGroup("asg-spot", ("gn6i",), ("g",), "spot", SPOT_CAP, tags=tags("t4-spot")),
        ),
        templates={"lt-1": {}},
        vswitches={"vsw-g": "g"},
    )


EXACT = {"launch_template": "lt-1", "v_switches": {"g": "vsw-g"}}


class AlibabaCloud(Cloud):
    """The fake with a clock that stands, and a provider of it."""

    provider: EssProvider
    address: str
    tells_stock = False

    def __init__(self, folder: Folder) -> None:
        self.folder, self.now = folder, START
        self.wait(0)
        folder.change(landscape())
        folder.keep(folder.state(START))

    def stock(self, offer: OfferKey, count: int) -> None:
        """See `Cloud`."""
        self._change(offer, stock=count)

    def price(self, offer: OfferKey, price: float) -> None:
        """See `Cloud`."""
        self._change(offer, price=price)

    def _change(self, offer: OfferKey, **fields: float) -> None:
        land = self.folder.landscape()
        offers = []
        for each in land.offers:
            if (each.type, each.zone, each.capacity) == (offer.type, offer.zone, offer.capacity):
                changed = msgspec.structs.replace(each.market[-1], at=self.now - START, **fields)
                offers.append(msgspec.structs.replace(each, market=(*each.market, changed)))
            else:
                offers.append(each)
        self.folder.change(msgspec.structs.replace(land, offers=tuple(offers)))

    def lose_answer(self, method: str) -> None:
        """See `Cloud`."""
        self.fail(method, "lose-answer")

    def lose_call(self, method: str) -> None:
        """See `Cloud`."""
        self.fail(method, "lose-call")

    def fail(self, method: str, kind: FaultKind, seconds: float = 0.0) -> None:
        """Let the next call of a method fail."""
        for action in ACTIONS[method]:
            self.folder.add_fault(Fault(action, kind, seconds))

    def wait(self, seconds: float) -> None:
        """See `Cloud`."""
        self.now += seconds
        self.folder.set_clock(str(self.now))

    def change(self, **fields: Any) -> None:
        """Change the landscape."""
        self.folder.change(msgspec.structs.replace(self.folder.landscape(), **fields))

    def change_group(self, name: str, **fields: Any) -> None:
        """Change a scaling group."""
        groups = [
            msgspec.structs.replace(group, **fields) if group.id == name else group
            for group in self.folder.landscape().groups
        ]
        self.change(groups=tuple(groups))

    def sell(self, kind: str, zone: str, price: float = 11.63) -> None:
        """Let another type or zone be had on demand too."""
        land = self.folder.landscape()
        offer = SimulatedOffer("", kind, zone, (Prices(price),))
        self.change(offers=(*land.offers, offer), vswitches={**land.vswitches, f"vsw-{zone}": zone})

    @property
    def state(self) -> State:
        """What the fake remembers."""
        return self.folder.state(self.now)

    def open(
        self, settings: Mapping[str, Any], secret: str = "secret", ecs: Any = None, **fields: Any
    ) -> EssProvider:
        """Return a provider.

        Args:
            settings: of its groups.
            secret: of its key.
            ecs: a client in place of the SDK's.
            fields: of its groups' configuration.
        """
        opened = config(self.address, settings, **fields)
        ess, real = self.clients(secret)
        return EssProvider(opened, (ess, ecs or real), lambda: self.now, self.pause)

    def clients(self, secret: str = "secret") -> tuple[Any, Any]:
        """Return the SDK's clients of ESS and ECS."""
        credentials = Credentials(
            CredentialsConfig(type="access_key", access_key_id="key", access_key_secret=secret)
        )
        return open_clients(config(self.address, {}).provider, credentials)

    async def pause(self, seconds: float) -> None:
        """Let time pass while the provider waits."""
        self.wait(seconds)


def config(address: str, group_settings: Mapping[str, Any], **fields: Any) -> EssConfig:
    """Return the configuration of the contract's two groups. fields: more of both groups."""
    groups = [
        EssGroup(name="t4", id="asg-t4", types=("gn6i",), zones=("g",)),
        EssGroup(name="t4-spot", id="asg-spot", types=("gn6i",), zones=("g",), capacity="spot"),
    ]
    return EssConfig(
        cluster="demo",
        provider=EssProviderConfig(
            kind="ess", region=REGION, ess_endpoint=address, ecs_endpoint=address, protocol="HTTP"
        ),
        groups=tuple(
            msgspec.structs.replace(group, **group_settings, **fields) for group in groups
        ),
    )
