"""The autoscaler's loop with the provider `karpenter`."""

from pathlib import Path

import msgspec

from fenka.autoscaler.providers import ApiNodeClaims
from fenka.cloud.config import ProviderConfig
from fenka.cloud.karpenter import KarpenterConfig, KarpenterGroup, KarpenterProvider, NodeClass
from fenka.cluster.autoscaling import ORDER
from tests.autoscaler.harness import World, briefly, scenario
from tests.autoscaler.snapshots import elastic_node, group
from tests.builders import T4_MIB
from tests.coroutines import synchronous
from tests.fakes.api_server import api_server
from tests.fakes.in_process import FakeApi

NODE_CLASS = NodeClass(group="karpenter.k8s.aws", kind="EC2NodeClass", name="gpu")
CONFIG = KarpenterConfig(
    cluster="demo",
    provider=ProviderConfig(kind="karpenter"),
    groups=(KarpenterGroup(**msgspec.structs.asdict(group()), node_class=NODE_CLASS),),
)


class KarpenterWorld(World):
    """A cluster with Karpenter, whose part the test plays."""

    def provider(self) -> KarpenterProvider:  # type: ignore[override]
        """A provider of the cluster's claims."""
        return KarpenterProvider(CONFIG, ApiNodeClaims(FakeApi(self.server)), briefly)  # type: ignore[arg-type]

    def launch(self) -> str:
        """Karpenter launches the one claim, whose node offers its cards. Return its name."""
        (claim,) = self.server.all("nodeclaims")
        name = str(claim["metadata"]["name"])
        conditions = [{"type": it, "status": "True"} for it in ("Launched", "Registered")]
        provider_id = f"aws:///a/{name}"
        status = {"providerID": provider_id, "conditions": conditions}
        self.server.put("nodeclaims", claim | {"status": status})
        self.server.put("nodes", elastic_node(f"node-{name}", T4_MIB, provider_id=provider_id))
        return name


@synchronous
async def test_starting_claim_is_not_taken_for_a_node_without_provider_id(tmp_path: Path) -> None:
    """It has no providerID yet, as nodes of other origin never have one. Its own node is marked."""
    async with api_server() as server:
        there = KarpenterWorld(server, tmp_path, scenario(), CONFIG)
        server.put("nodes", elastic_node("node-own"))
        there.pending("a")
        async with there.replica():
            await there.passes(60, lambda: _states(there) == ["known"])
            looks = len(server.requests)
            await there.passes(60, lambda: len(server.requests) > looks + 20)
            assert _states(there) == ["known"]
            name = there.launch()
            await there.passes(60, lambda: _states(there) == ["offering"])
            await there.passes(60, lambda: ORDER in there.node(name).get("labels", {}))
        assert ORDER not in there.node("own").get("labels", {})


def _states(there: KarpenterWorld) -> list[str]:
    return [slot.state for order in there.orders().values() for slot in order.slots]
