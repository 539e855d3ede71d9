"""The provider `karpenter` on a fake API server, with a Karpenter that answers while the provider waits."""

from typing import Any

import pytest

from fenka.autoscaler.providers import CLAIMS, ApiNodeClaims
from fenka.cloud.config import (
    InvalidConfig,
    ProviderConfig,
    SpotRules,
)
from fenka.cloud.karpenter import (
    LOOK_S,
    LOOKS,
    KarpenterConfig,
    KarpenterGroup,
    KarpenterProvider,
    NodeClass,
)
from fenka.cloud.port import (
    Denied,
    InstanceState,
    OfferKey,
    Order,
    OutOfStock,
    ProviderError,
    Throttled,
    Unknown,
)
from fenka.core.inventory import Taint
from fenka.kubernetes.api_client import ApiError, ApiUnreachable
from tests.cloud.contract import ON_DEMAND, SPOT, Cloud, ProviderContract
from tests.fakes.in_process import FakeApi

NODE_CLASS = {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "gpu"}


class FlakyApi(FakeApi):
    """An API server whose next calls fail, by their method: before anything is done, or after it."""

    def __init__(self) -> None:
        super().__init__()
        self.lost_calls: dict[str, Exception] = {}
        self.lost_answers: dict[str, Exception] = {}

    def _call(self, method: str, *arguments: Any) -> Any:
        if method in self.lost_calls:
            raise self.lost_calls.pop(method)
        answer = super()._call(method, *arguments)
        if method in self.lost_answers:
            raise self.lost_answers.pop(method)
        return answer


class KarpenterCloud(Cloud):
    """Karpenter: launches claims while there is stock, and deletes the others with an event."""

    tells_stock = False

    def __init__(self) -> None:
        self.api = FlakyApi()
        self.left: dict[OfferKey, int] = {}
        self.event = "InsufficientCapacityError"
        self.asleep = False
        self.pauses = 0
        self.config = configuration(group(ON_DEMAND, 11.63), group(SPOT, 3.49))
        self.provider = self.provider_of(self.config)

    def provider_of(self, config: KarpenterConfig) -> KarpenterProvider:
        """Return a provider, as after a restart."""
        return KarpenterProvider(config, ApiNodeClaims(self.api), self._pause)  # type: ignore[arg-type]

    def stock(self, offer: OfferKey, count: int) -> None:
        """See `Cloud`."""
        self.left[offer] = count

    def price(self, offer: OfferKey, price: float) -> None:
        """See `Cloud`."""

    def lose_answer(self, method: str) -> None:
        """See `Cloud`."""
        self.api.lost_answers[{"launch": "POST"}[method]] = ApiUnreachable("lost")

    def lose_call(self, method: str) -> None:
        """See `Cloud`."""
        self.api.lost_calls[{"launch": "POST", "instances": "GET"}[method]] = ApiUnreachable("lost")

    def wait(self, seconds: float) -> None:
        """See `Cloud`."""

    async def _pause(self, seconds: float) -> None:
        assert seconds == LOOK_S
        self.pauses += 1
        for claim in [] if self.asleep else self.api.server.all("nodeclaims"):
            if "status" not in claim:
                self._launch(claim)

    def _launch(self, claim: dict[str, Any]) -> None:
        name, wanted = (
            claim["metadata"]["name"],
            {each["key"]: each["values"][0] for each in claim["spec"]["requirements"]},
        )
        key = OfferKey(
            claim["metadata"]["labels"]["fenka.io/group"],
            wanted["node.kubernetes.io/instance-type"],
            wanted["topology.kubernetes.io/zone"],
            wanted["karpenter.sh/capacity-type"],
        )
        if self.left.get(key, 1) < 1:
            self.api.drop(f"{CLAIMS}/{name}")
            self.api.put(
                f"/api/v1/namespaces/default/events/{name}.1",
                {
                    "involvedObject": {"kind": "NodeClaim", "name": name},
                    "reason": self.event,
                    "message": "no g5 today",
                },
            )
            return
        if key in self.left:
            self.left[key] -= 1
        launched = {"type": "Launched", "status": "True"}
        claim["status"] = {"providerID": f"aws:///a/i-{name}", "conditions": [launched]}


def group(key: OfferKey, price: float | None, **more: Any) -> KarpenterGroup:
    """Return the group of an offer."""
    fields: dict[str, Any] = {
        "types": (key.type,),
        "zones": (key.zone,),
        "node_class": NodeClass(**NODE_CLASS),
    }
    return KarpenterGroup(name=key.group, capacity=key.capacity, price=price, **fields | more)


def configuration(*groups: KarpenterGroup) -> KarpenterConfig:
    """Return a configuration."""
    return KarpenterConfig(cluster="demo", provider=ProviderConfig(kind="karpenter"), groups=groups)


@pytest.fixture
def cloud() -> KarpenterCloud:
    """A cluster without claims."""
    return KarpenterCloud()


class TestContract(ProviderContract):
    """The port's promises, except that NodeClaims have no maximum price."""

    test_launch_is_refused_when_the_market_is_above_the_cap = None  # type: ignore[assignment]


async def test_claim_says_what_karpenter_must_launch_and_nothing_about_cards(
    cloud: KarpenterCloud,
) -> None:
    """No node pool, no gpu-mem, no end; the group's labels and taints."""
    taints = (Taint(key="nvidia.com/gpu", value="true", effect="NoSchedule"),)
    labelled = group(SPOT, 3.49, labels={"gpushare": "true"}, taints=taints)
    await cloud.provider_of(configuration(labelled)).launch(Order("demo-t4-1-0", SPOT, 1))
    (claim,) = cloud.api.server.all("nodeclaims")
    assert claim["metadata"]["name"] == "demo-t4-1-0-0"
    assert claim["metadata"]["labels"] == {
        "gpushare": "true",
        "fenka.io/cluster": "demo",
        "fenka.io/group": "t4-spot",
        "fenka.io/capacity": "spot",
    }
    assert claim["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
    assert claim["spec"] == {
        "nodeClassRef": NODE_CLASS,
        "requirements": [
            {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": ["gn6i"]},
            {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["g"]},
            {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["spot"]},
        ],
        "expireAfter": "Never",
        "resources": {"requests": {}},
        "taints": [{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}],
    }


async def test_launch_returns_claims_that_karpenter_has_not_answered_for(
    cloud: KarpenterCloud,
) -> None:
    """It may take minutes; they are starting, and have no providerID yet."""
    cloud.asleep = True
    assert await cloud.provider.launch(Order("a-1", ON_DEMAND, 2)) == ["a-1-0", "a-1-1"]
    listed = await cloud.provider.instances()
    assert [(it.state, it.provider_id) for it in listed] == [(InstanceState.STARTING, "")] * 2
    assert cloud.pauses == LOOKS - 1


async def test_out_of_stock_is_the_answer_again_when_the_same_order_is_repeated(
    cloud: KarpenterCloud,
) -> None:
    """Its claims are not created a second time."""
    cloud.stock(ON_DEMAND, 0)
    for _ in range(2):
        with pytest.raises(OutOfStock):
            await cloud.provider.launch(Order("a-1", ON_DEMAND, 1))
    assert sum(path == CLAIMS for path, _ in cloud.api.server.writes) == 1


async def test_claim_of_a_node_class_that_is_not_ready_is_denied(cloud: KarpenterCloud) -> None:
    """That is no matter of stock; the event's sentence is passed on."""
    cloud.stock(ON_DEMAND, 0)
    cloud.event = "NodeClassNotReady"
    with pytest.raises(Denied, match="deleted NodeClaim a-1-0: no g5 today"):
        await cloud.provider.launch(Order("a-1", ON_DEMAND, 1))


async def test_order_is_one_set_when_a_restarted_provider_repeats_it(cloud: KarpenterCloud) -> None:
    """The names are made of the token."""
    cloud.lose_answer("launch")
    with pytest.raises(Unknown):
        await cloud.provider.launch(Order("a-1", ON_DEMAND, 3))
    restarted = cloud.provider_of(cloud.config)
    assert len(await restarted.launch(Order("a-1", ON_DEMAND, 3))) == 3
    assert len(await restarted.instances()) == 3


async def test_token_of_another_order_is_denied(cloud: KarpenterCloud) -> None:
    """It is that of another offer."""
    await cloud.provider.launch(Order("a-1", ON_DEMAND, 1))
    with pytest.raises(Denied, match="that of another order"):
        await cloud.provider_of(cloud.config).launch(Order("a-1", SPOT, 1))


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_launch_is_unknown_when_a_part_of_its_claims_is_there(
    cloud: KarpenterCloud, method: str
) -> None:
    """Any other error would say that nothing was done, and the next token would double them."""
    first = cloud.api.create

    async def fail_later(*arguments: Any, **more: Any) -> Any:
        answer = await first(*arguments, **more)
        cloud.api.lost_calls[method] = ApiError(429, "TooManyRequests", "later")
        return answer

    cloud.api.create = fail_later  # type: ignore[method-assign]
    with pytest.raises(Unknown):
        await cloud.provider.launch(Order("a-1", ON_DEMAND, 2))
    cloud.api.create = first  # type: ignore[method-assign]
    cloud.api.lost_calls.clear()
    assert len(await cloud.provider.launch(Order("a-1", ON_DEMAND, 2))) == 2
    assert len(await cloud.provider.instances()) == 2


async def test_claims_of_node_pools_and_other_clusters_are_left_alone(
    cloud: KarpenterCloud,
) -> None:
    """Neither listed nor deleted."""
    for name, labels in (("pool-1", {}), ("other-1", {"fenka.io/cluster": "other"})):
        cloud.api.put(f"{CLAIMS}/{name}", {"metadata": {"labels": labels}, "spec": {}})
    await cloud.provider.end(["pool-1", "other-1"])
    assert not await cloud.provider.instances()
    assert len(cloud.api.server.all("nodeclaims")) == 2


async def test_states_are_those_of_the_claim(cloud: KarpenterCloud) -> None:
    """Running once the Node is registered, ending once it is deleted."""
    (name,) = await cloud.provider.launch(Order("a-1", ON_DEMAND, 1))
    claim = cloud.api.server.get("nodeclaims", name)
    claim["status"]["conditions"].append({"type": "Registered", "status": "True"})
    assert (await cloud.provider.instances())[0].state == InstanceState.RUNNING
    claim["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert (await cloud.provider.instances())[0].state == InstanceState.ENDING
    cloud.api.server.writes.clear()
    await cloud.provider.end([name])
    assert not cloud.api.server.writes


async def test_instances_are_those_of_all_pages(cloud: KarpenterCloud) -> None:
    """A server gives them in parts."""
    await cloud.provider.launch(Order("a-1", ON_DEMAND, 5))
    cloud.api.server.max_page = 2
    assert len(await cloud.provider.instances()) == 5


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ApiUnreachable("down"), Unknown),
        (ApiError(500, "InternalError", "etcd"), Unknown),
        (ApiError(0, "Unreadable", "not JSON"), Unknown),
        (ApiError(429, "TooManyRequests", "later"), Throttled),
        (ApiError(403, "Forbidden", "no"), Denied),
        (ApiError(404, "NotFound", "no such resource"), Denied),
        (ApiError(422, "Invalid", "spec"), Denied),
    ],
)
async def test_api_servers_error_is_the_ports(
    cloud: KarpenterCloud, raised: Exception, expected: type[ProviderError]
) -> None:
    """Nothing was done, or nobody knows."""
    cloud.api.lost_calls["POST"] = raised
    with pytest.raises(expected):
        await cloud.provider.launch(Order("a-1", ON_DEMAND, 1))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (group(SPOT, 3.49, spot=SpotRules(cap=4.0)), "has a `cap`"),
        (group(SPOT, None), "has no `price`"),
        (group(SPOT, 3.49, node_class=None), "needs `nodeClass"),
    ],
)
def test_group_that_karpenter_cannot_serve_is_an_error_at_the_start(
    cloud: KarpenterCloud, wrong: KarpenterGroup, sentence: str
) -> None:
    """A limit that nobody enforces is an error."""
    with pytest.raises(InvalidConfig, match=sentence):
        cloud.provider_of(configuration(wrong))
