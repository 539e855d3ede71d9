"""Start a hundred containers of one size at once on two equal cards, in small units so that they fit."""

import json
from collections.abc import Iterator

import pytest

from e2e.cluster import wait_until
from e2e.scenarios.containers import (
    agent_name,
    installed_with,
    visible_mib,
    wait_for_agent,
    wait_for_no_leases,
)
from e2e.scenarios.installation import MEMORY, WORKLOAD, Installation

NODE = "sd-cluster-04"
PODS, CONTAINERS = 50, 2
UNITS = 2 * (15079 // 128)
CARDS = """simulatedCards=[
  {"nodeSelector": {"fenka.io/simulated": "t4"}, "spec": "T4"},
  {"nodeSelector": {"fenka.io/simulated": "two"}, "spec": "T4*2"}]"""


@pytest.fixture
def two_cards(installation: Installation) -> Iterator[str]:
    """Provide a node with two T4s in units of 128 MiB, where pods go to the card with most free memory."""
    installation.label("sd-cluster-05", "gpushare-", "cgpu-")
    installation.label(NODE, "cgpu-", "gpushare-")
    with installed_with(installation, 'node.unit="128MiB"', CARDS.replace("\n", " ")):
        installation.label(
            NODE, "fenka.io/simulated=two", "gpushare=true", "ack.node.gpu.placement=spread"
        )
        wait_for_agent(installation, NODE, UNITS)
        yield NODE
        installation.cluster.kubectl("delete", "deployment,pod", "--all", "--now")
        wait_for_no_leases(installation, NODE)
        installation.label(NODE, "gpushare-", "ack.node.gpu.placement-", "fenka.io/simulated=t4")
        wait_until("no agent", lambda: not agent_name(installation, NODE))
        # The second card does not come back.
        installation.cluster.kubectl("annotate", "node", NODE, "fenka.io/cards-")


@pytest.mark.timeout(480)
def test_every_container_gets_its_own_slice_when_a_hundred_start_at_once(
    installation: Installation, two_cards: str
) -> None:
    """Every container starts on the card that the scheduler recorded on its pod."""
    container = {
        "image": WORKLOAD,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES; exec sleep 100000"],
        "resources": {"limits": {MEMORY: 1}},
    }
    pod = {
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": f"c{n}", **container} for n in range(CONTAINERS)],
    }
    made = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "crowd"},
        "spec": {
            "replicas": PODS,
            "selector": {"matchLabels": {"app": "crowd"}},
            "template": {"metadata": {"labels": {"app": "crowd"}}, "spec": pod},
        },
    }
    installation.cluster.apply(json.dumps(made))
    installation.cluster.kubectl(
        "rollout", "status", "deployment/crowd", "--timeout=240s", timeout=250
    )
    pods = {pod["metadata"]["uid"]: pod for pod in installation.pods("crowd")}
    assert len(pods) == PODS

    program = (
        "import glob, json; print(json.dumps([json.load(open(p))['lease'] for p in "
        "glob.glob('/var/lib/fenka/node/*.json')]))"
    )
    leases = json.loads(installation.cluster.node(two_cards).run("python3", "-c", program))
    assert len(leases) == PODS * CONTAINERS
    assert len({(lease["uid"], lease["container"]) for lease in leases}) == PODS * CONTAINERS
    by_card: dict[str, int] = {}
    for lease in leases:
        annotations = pods[lease["uid"]]["metadata"]["annotations"]
        (piece,) = lease["slices"]
        decided = json.loads(annotations["fenka.io/cards"])
        assert decided == {str(piece["card"]): piece["uuid"]}
        by_card[piece["uuid"]] = by_card.get(piece["uuid"], 0) + 1
    # Pods that are not bound yet count where they were expected, so the cards may differ by a few.
    assert len(by_card) == 2
    assert min(by_card.values()) >= 0.4 * PODS * CONTAINERS

    visible = installation.cluster.kubectl(
        "logs", "-l", "app=crowd", "--all-containers", "--tail=1", "--max-log-requests=200"
    ).split()
    assert {uuid: visible.count(uuid) for uuid in by_card} == by_card
    name = next(iter(pods.values()))["metadata"]["name"]
    assert visible_mib(installation, name, "c0") == 15079 // (15079 // 128)
