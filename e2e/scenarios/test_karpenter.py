"""The provider `karpenter` with Karpenter itself, whose instances are simulated, on a real API server."""

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from e2e.artifacts import CHART
from e2e.cluster import STATE, Cluster, Layout, wait_until
from e2e.pki import Authority
from e2e.programs import KARPENTER, build
from e2e.scenarios.installation import FENKA
from fenka.autoscaler.providers import ApiNodeClaims
from fenka.cloud.config import ProviderConfig
from fenka.cloud.karpenter import (
    KarpenterConfig,
    KarpenterGroup,
    KarpenterProvider,
    NodeClass,
    open_provider,
)
from fenka.cloud.port import InstanceState, OfferKey, Order, OutOfStock
from fenka.cluster.autoscaling import ORDER, ORDERS_MAP, decode_order
from fenka.core.inventory import Card, DeviceId
from fenka.dialects import base, gpushare, nodes
from fenka.kubernetes.api_client import Api

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

T = TypeVar("T")
TYPE, ZONE = "c-4x-amd64-linux", "test-zone-a"
SPOT = OfferKey("spot", TYPE, ZONE, "spot")
MISSING = OfferKey("missing", TYPE, ZONE, "on-demand")
NAME, NAMESPACE = "fenka-autoscaler", "kube-system"
MODULE = "sigs.k8s.io/karpenter"
NODE_CLASS = {"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass"}

CONFIGURATION = {
    "cluster": "demo",
    "provider": {"kind": "karpenter"},
    "scaleIn": {"delay": "3s", "cooldown": "3s"},
    "groups": [
        {
            "name": "t4",
            "types": [TYPE],
            "zones": [ZONE],
            "capacity": "spot",
            "spot": {"admit": "all"},
            "price": 1,
            "labels": {"gpushare": "true"},
            "nodeClass": NODE_CLASS | {"name": "default"},
            "shape": {
                "cpu": "3",
                "memory": "12000MiB",
                "cards": [{"model": "T4", "memory": "15079MiB"}],
            },
        }
    ],
}
SETUP = """
apiVersion: karpenter.kwok.sh/v1alpha1
kind: KWOKNodeClass
metadata: {name: default}
"""
POD = """
apiVersion: v1
kind: Pod
metadata: {name: waiting}
spec:
  containers:
  - {name: main, image: "localhost/busybox:e2e", resources: {limits: {aliyun.com/gpu-mem: 4}}}
"""


class ControlPlane(Cluster):
    """A cluster without nodes, and a client with the rights that the chart gives the autoscaler."""

    @property
    def autoscaler_kubeconfig(self) -> Path:
        """The client's kubeconfig."""
        return self.state / "pki" / f"{NAME}.kubeconfig"

    def make_certificates(self) -> None:
        """Create also the client's."""
        super().make_certificates()
        server = f"https://{self.layout.control_plane}:6443"
        user = f"system:serviceaccount:{NAMESPACE}:{NAME}"
        Authority(self.state / "pki").client(NAME, user, None, server)

    def grant_rights(self) -> None:
        """Apply what the chart installs for the autoscaler, except for its program."""
        settings = json.dumps(CONFIGURATION)
        options = (
            "--set",
            "autoscaler.enabled=true",
            "--set-json",
            f"autoscaler.config={settings}",
        )
        # The pod of a hook would have no room elsewhere, and its node would stay.
        only = ("--no-hooks", "--show-only", "templates/autoscaler.yaml")
        text = self.helm("template", "fenka", str(CHART), "-n", NAMESPACE, *options, *only)
        for each in yaml.safe_load_all(text):
            if each["kind"] != "Deployment":
                self.apply(yaml.safe_dump(each), each["metadata"].get("namespace", NAMESPACE))


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A control plane with Karpenter; the first time this builds it, which takes minutes."""
    build(KARPENTER)
    folder = KARPENTER.source(MODULE)
    cluster = ControlPlane(Path(f"{STATE}-karpenter"), Layout(nodes=()), os.getpid(), print)
    with cluster:
        for crds in ("pkg/apis/crds", "kwok/apis/crds"):
            cluster.kubectl("apply", "--server-side", "-f", str(folder / crds))
        wait_until("Karpenter's kinds", lambda: cluster.kubectl("apply", "-f", "-", stdin=SETUP))
        cluster.grant_rights()
        environment = {"KUBECONFIG": str(cluster.kubeconfig), "DISABLE_LEADER_ELECTION": "true"}
        program = str(KARPENTER.directory() / "bin" / "kwok")
        cluster.control_plane.start("karpenter", [program], environment)
        yield cluster


def configuration() -> KarpenterConfig:
    """Return two groups. Without its node class, Karpenter's simulation has no stock of the second."""
    groups = [
        KarpenterGroup(
            name=key.group,
            types=(TYPE,),
            zones=(ZONE,),
            capacity=key.capacity,
            price=1.0,
            labels={"gpushare": "true"},
            node_class=NodeClass(**NODE_CLASS | {"name": name}),
        )
        for key, name in ((SPOT, "default"), (MISSING, "missing"))
    ]
    return KarpenterConfig(
        cluster="demo", provider=ProviderConfig(kind="karpenter"), groups=tuple(groups)
    )


@asynccontextmanager
async def provider(plane: ControlPlane) -> AsyncIterator[KarpenterProvider]:
    """A provider with its rights only, as after a restart."""
    async with (
        await Api.connect(plane.autoscaler_kubeconfig) as api,
        open_provider(configuration(), ApiNodeClaims(api)) as opened,
    ):
        yield opened


def in_network(plane: ControlPlane, act: Callable[[KarpenterProvider], Awaitable[T]]) -> T:
    """Return what a new provider answers, from the control plane's network."""
    results: list[T | Exception] = []

    async def ask() -> T:
        async with provider(plane) as opened:
            return await act(opened)

    def work() -> None:
        plane.enter_network()
        try:
            results.append(asyncio.run(ask()))
        except Exception as why:
            results.append(why)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def test_order_becomes_nodes_once_and_ends_with_them(plane: ControlPlane) -> None:
    """Launched, repeated after a restart, registered, and ended with their Nodes."""
    order = Order("demo-spot-1-0", SPOT, 2)
    ids = in_network(plane, lambda opened: opened.launch(order))
    assert ids == ["demo-spot-1-0-0", "demo-spot-1-0-1"]
    assert in_network(plane, lambda opened: opened.launch(order)) == ids

    def running() -> bool:
        listed = in_network(plane, lambda opened: opened.instances())
        return [it.state for it in listed] == [InstanceState.RUNNING] * 2

    wait_until("registered nodes", running, 120, plane.control_plane.log("karpenter"))
    listed = in_network(plane, lambda opened: opened.instances())
    assert {(it.offer, it.order) for it in listed} == {(SPOT, order.token)}
    nodes = {node["spec"]["providerID"]: node["metadata"] for node in plane.list("nodes")}
    assert set(nodes) == {it.provider_id for it in listed}
    for meta in nodes.values():
        labels = meta["labels"]
        assert (labels["fenka.io/group"], labels["gpushare"]) == ("spot", "true")
        assert labels["karpenter.sh/capacity-type"] == "spot"
        assert "karpenter.sh/nodepool" not in labels
        assert meta["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
    in_network(plane, lambda opened: opened.end(ids))
    wait_until("no nodes", lambda: not plane.list("nodes"), 120)
    wait_until("no claims", lambda: not plane.list("nodeclaims"), 120)


def test_launch_is_out_of_stock_when_karpenter_deletes_the_claim(plane: ControlPlane) -> None:
    """With an event, and nothing is left."""
    with pytest.raises(OutOfStock) as why:
        in_network(plane, lambda opened: opened.launch(Order("demo-missing-1-0", MISSING, 1)))
    assert why.value.offer == MISSING
    assert not plane.list("nodeclaims")
    wait_until(
        "Karpenter's event",
        lambda: "InsufficientCapacityError" in plane.kubectl("get", "events", "-o", "yaml"),
    )


def test_autoscaler_buys_a_node_by_karpenter_and_ends_it_when_it_is_idle(
    plane: ControlPlane,
) -> None:
    """From a pending pod to a NodeClaim, its Node, and back to none."""
    file = plane.state / "autoscaler.yaml"
    file.write_text(yaml.safe_dump(CONFIGURATION))
    command = [*FENKA, "autoscaler", f"--config={file}"]
    options = [f"--kubeconfig={plane.autoscaler_kubeconfig}", f"--namespace={NAMESPACE}"]
    plane.control_plane.start("autoscaler", [*command, *options])
    log = plane.control_plane.log("autoscaler")
    try:
        plane.wait_for_service_account("default")
        plane.apply(POD)
        wait_until("a claim", lambda: plane.list("nodeclaims"), 60, log)
        wait_until("its node", lambda: ORDER in _only_node(plane)["metadata"]["labels"], 60, log)
        assert _states(plane) == ["joined"]
        _offer_cards(plane, _only_node(plane)["metadata"]["name"])
        wait_until("an order that is fulfilled", lambda: _states(plane) == ["offering"], 60, log)
        assert any("FenkaScaleOut" in each for each in plane.kubectl("get", "events").splitlines())
        plane.delete(POD)
        wait_until("no nodes", lambda: not plane.list("nodes"), 120, log)
        wait_until("no claims", lambda: not plane.list("nodeclaims"), 120, log)
    finally:
        plane.control_plane.kill("autoscaler")


def _only_node(plane: ControlPlane) -> dict[str, Any]:
    (node,) = plane.list("nodes")
    return node


def _states(plane: ControlPlane) -> list[str]:
    orders = plane.get("configmap", ORDERS_MAP, NAMESPACE)["data"]
    return [slot.state for name, text in orders.items() for slot in decode_order(name, text).slots]


def _offer_cards(plane: ControlPlane, node: str) -> None:
    """Do what the kubelet and fenka's node program do."""
    inventory = nodes.encode_inventory([Card(0, DeviceId("GPU-0"), "T4", 15079)], 1024)
    plane.kubectl("annotate", "node", node, f"{base.CARDS}={inventory}")
    resources = {gpushare.MEMORY: "14", gpushare.COUNT: "1"}
    ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "test"}
    status = {"status": {"capacity": resources, "allocatable": resources, "conditions": [ready]}}
    plane.kubectl("patch", "node", node, "--subresource=status", f"--patch={json.dumps(status)}")
