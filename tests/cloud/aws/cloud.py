"""AWS as the contract's tests see it: two offers, of Auto Scaling groups or of fleets."""

from typing import Any

from fenka.cloud.aws.boto import Calls
from fenka.cloud.aws.group_settings import AwsConfig, AwsGroup, AwsProviderConfig
from fenka.cloud.aws.provider import AwsProvider
from fenka.cloud.config import SpotRules
from fenka.cloud.port import OfferKey
from tests.cloud.aws.fake import Aws
from tests.cloud.aws.proxy import REGION
from tests.cloud.contract import SPOT_CAP, Cloud

TYPE, ZONE, OTHER_ZONE = "g4dn.xlarge", "us-east-1a", "us-east-1b"
ON_DEMAND = OfferKey("t4", TYPE, ZONE, "on-demand")
SPOT = OfferKey("t4-spot", TYPE, ZONE, "spot")
SPOT_POLICY = {
    "LaunchTemplate": {
        "LaunchTemplateSpecification": {"LaunchTemplateName": "asg-spot", "Version": "$Default"}
    },
    "InstancesDistribution": {
        "OnDemandBaseCapacity": 0,
        "OnDemandPercentageAboveBaseCapacity": 0,
        "SpotMaxPrice": str(SPOT_CAP),
    },
}


def configuration(*groups: AwsGroup, cluster: str = "demo") -> AwsConfig:
    """Return a configuration."""
    return AwsConfig(
        cluster=cluster, provider=AwsProviderConfig(kind="aws", region=REGION), groups=groups
    )


def group(key: OfferKey, **more: Any) -> AwsGroup:
    """Return the group of an offer."""
    rules = SpotRules(cap=SPOT_CAP) if key.capacity == "spot" else SpotRules()
    price = None if key.capacity == "spot" else 11.63
    fields = {"types": (key.type,), "zones": (key.zone,), "spot": rules, "price": price} | more
    return AwsGroup(name=key.group, capacity=key.capacity, **fields)  # type: ignore[arg-type]


class AwsCloud(Cloud):
    """The proxy with two groups. grouped: whether they are Auto Scaling groups."""

    on_demand, spot = ON_DEMAND, SPOT
    tells_stock = False

    def __init__(self, aws: Aws, calls: Calls, grouped: bool) -> None:
        self.aws, self.calls, self.grouped = aws, calls, grouped
        aws.prices[TYPE, ZONE] = 3.49
        tags = {"fenka.io/cluster": "demo"}
        if grouped:
            aws.make_group("asg", TYPE, [ZONE], tags)
            aws.make_group("asg-spot", TYPE, [ZONE], tags, MixedInstancesPolicy=SPOT_POLICY)
            self.config = configuration(group(ON_DEMAND, id="asg"), group(SPOT, id="asg-spot"))
        else:
            aws.make_template("node", TYPE)
            self.config = configuration(
                group(ON_DEMAND, launch_template="node"), group(SPOT, launch_template="node")
            )
        self.provider = self.provider_of(self.config)

    def provider_of(self, config: AwsConfig) -> AwsProvider:
        """Return a provider for other groups."""
        return AwsProvider(config, self.calls, self.aws.clock)

    @property
    def launching(self) -> str:
        """Return the action that launches."""
        return "LaunchInstances" if self.grouped else "CreateFleet"

    def stock(self, offer: OfferKey, count: int) -> None:
        """See `Cloud`."""
        self.aws.stock[offer.type, offer.zone, offer.capacity] = count

    def price(self, offer: OfferKey, price: float) -> None:
        """See `Cloud`."""
        self.aws.prices[offer.type, offer.zone] = price

    def lose_answer(self, method: str) -> None:
        """See `Cloud`."""
        self.aws.faults[self._action(method)] = ["lose answer"]

    def lose_call(self, method: str) -> None:
        """See `Cloud`."""
        self.aws.faults[self._action(method)] = ["lose call"]

    def wait(self, seconds: float) -> None:
        """See `Cloud`."""
        self.aws.wait(seconds)

    def _action(self, method: str) -> str:
        return {"launch": self.launching, "instances": "DescribeInstances"}[method]
