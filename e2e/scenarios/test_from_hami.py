"""Take over a node of HAMi's with its pods (docs/from/hami.md). HAMi itself does not run here."""

import json
from typing import Any

import pytest

from e2e.cluster import wait_until
from e2e.scenarios.containers import installed_with
from e2e.scenarios.installation import WHOLE, Installation
from e2e.scenarios.virtual_nodes import UNITS, VirtualNodes, node_object, node_status
from fenka.dialects import hami

NODE = "hamis-node"
CARDS = 2
SLICES = {WHOLE: "20"}


def pod(virtual: VirtualNodes, name: str, limits: dict[str, int], **rest: Any) -> dict[str, Any]:
    """Return the manifest of a pod with HAMi's names."""
    manifest = virtual.pod(name, 1, **rest)
    (container,) = manifest["spec"]["containers"]
    container["resources"] = {"limits": {key: str(value) for key, value in limits.items()}}
    return manifest


def placed_by_hami(card: int, mib: int, cores: int) -> dict[str, str]:
    """Return the annotations of a pod that HAMi has placed."""
    record = f"GPU-{NODE}-{card},NVIDIA,{mib},{cores}:;"
    return {
        hami.ALLOCATED: record,
        hami.TO_ALLOCATE: ";",
        hami.NODE: NODE,
        hami.TIME: "1700000000",
        "hami.io/bind-phase": "success",
    }


def cards_of(virtual: VirtualNodes, name: str) -> list[list[str]]:
    """Return UUID and MiB of a pod's slices, by HAMi's annotation; empty while it has none."""
    annotations = virtual.cluster.get("pod", name, virtual.namespace)["metadata"].get("annotations")
    record = (annotations or {}).get(hami.ALLOCATED, "")
    return [piece.split(",")[0:3:2] for piece in record.strip(";").split(":") if piece]


@pytest.mark.full
def test_pods_of_hami_keep_their_cards_when_fenka_takes_their_node_over(
    installation: Installation, virtual: VirtualNodes
) -> None:
    """New pods are placed beside them, by memory and by compute, and wait where none is left."""
    cluster = installation.cluster
    virtual.add(CARDS, node_object(NODE, CARDS, {"gpushare": "true"}))
    status = node_status(CARDS)
    for amounts in (status["status"]["capacity"], status["status"]["allocatable"]):
        amounts.update(SLICES)
    patch = f"--patch={json.dumps(status)}"
    cluster.kubectl("patch", "node", NODE, "--subresource=status", "--type=merge", patch)
    old = {"nodeName": NODE}
    virtual.create(
        pod(
            virtual,
            "old-memory",
            {WHOLE: 1, hami.MEMORY: 12000, hami.CORES: 60},
            annotations=placed_by_hami(0, 12000, 60),
            **old,
        ),
        pod(
            virtual,
            "old-percent",
            {WHOLE: 1, hami.PERCENT: 50},
            annotations=placed_by_hami(1, UNITS * 512, 0),
            **old,
        ),
    )
    with installed_with(installation, "hamiNames=true"):
        cluster.kubectl("-n", "fenka", "rollout", "status", "deployment/fenka-scheduler")
        wait_until(
            "the pods of HAMi are counted",
            lambda: holders(installation) == {"old-memory", "old-percent"},
        )
        # 4,384 MiB are left of card 0, and 8,192 of card 1.
        virtual.create(pod(virtual, "beside", {WHOLE: 1, hami.MEMORY: 4000}))
        wait_until("a card for `beside`", lambda: cards_of(virtual, "beside"))
        assert cards_of(virtual, "beside") == [[f"GPU-{NODE}-0", "4000"]]
        virtual.create(pod(virtual, "compute", {WHOLE: 1, hami.MEMORY: 100, hami.CORES: 50}))
        wait_until("a card for `compute`", lambda: cards_of(virtual, "compute"))
        assert cards_of(virtual, "compute") == [[f"GPU-{NODE}-1", "100"]]
        virtual.create(pod(virtual, "large", {WHOLE: 1, hami.MEMORY: 9000}))
        virtual.wait_for_event("large", "no GPU fits", "too little memory")
        # Its annotation names a card that fenka does not choose by.
        chosen = {"nvidia.com/use-gputype": "T4"}
        virtual.create(pod(virtual, "chosen", {WHOLE: 1, hami.MEMORY: 10}, annotations=chosen))
        virtual.wait_for_event("chosen", "nvidia.com/use-gputype is not served")
        virtual.cluster.kubectl("-n", virtual.namespace, "delete", "pod", "old-memory", "--force")
        wait_until("a card for `large`", lambda: cards_of(virtual, "large"))
        assert cards_of(virtual, "large") == [[f"GPU-{NODE}-0", "9000"]]


def holders(installation: Installation) -> set[str]:
    """Return the names of the pods that hold something of the node, as `fenka top node -s` shows them."""
    rows = json.loads(installation.fenka("top", "node", "-s", "--cluster", "-o", "json"))
    text = json.dumps([row for row in rows if NODE in json.dumps(row)])
    return {name for name in ("old-memory", "old-percent") if name in text}
