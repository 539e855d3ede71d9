"""Nodes that the autoscaler buys and ends, and failures on the way (docs/understand/autoscaler.md)."""

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import yaml

from e2e.cluster import ClusterError, wait_until
from e2e.images import WORKLOAD
from e2e.scenarios.cloud import Offer
from e2e.scenarios.elastic import Elastic
from e2e.scenarios.installation import MEMORY, RELEASE
from fenka.cluster.autoscaling import ENDING

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

T4 = Offer("t4")
JOINS_S = 240
"""The longest time from a pod to its new node, on a machine that is busy."""


def pod(name: str, units: int, *, command: str = "exec sleep 100000", **fields: Any) -> str:
    """Return a pod that requests units of a card. fields: of its metadata; spec: of its spec."""
    spec = fields.pop("spec", {})
    container = {
        "name": "main",
        "image": WORKLOAD,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", command],
        "resources": {"limits": {MEMORY: units}} if units else {},
    }
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, **fields},
            "spec": {"terminationGracePeriodSeconds": 0, "containers": [container], **spec},
        }
    )


class Scene:
    """Pods of a namespace on a cluster with a cloud."""

    def __init__(self, elastic: Elastic, namespace: str) -> None:
        self.elastic, self.cloud = elastic, elastic.cloud
        self.cluster, self.namespace = elastic.cluster, namespace

    def create(self, *texts: str) -> None:
        """Create pods together."""
        self.cluster.apply("---\n".join(texts), self.namespace)

    def wait_for(self, *names: str) -> None:
        """Wait until pods run."""
        for name in names:
            self.cluster.wait_for_pod(name, self.namespace, seconds=JOINS_S)

    def node_of(self, name: str) -> str:
        """Return the node of a pod."""
        return str(self.cluster.get("pod", name, self.namespace)["spec"].get("nodeName", ""))

    def node_of_app(self, name: str) -> str:
        """Return the node of the only running pod of a Deployment, empty if there is none."""
        pods = self.cluster.list("pods", self.namespace, f"app={name}")
        return next(
            (it["spec"]["nodeName"] for it in pods if it["status"]["phase"] == "Running"), ""
        )

    def amounts(self) -> list[int]:
        """Return how many instances each call asked for."""
        return [call.amount for call in self.cloud.launches()]

    def events(self, reason: str) -> Sequence[str]:
        """Return the messages of all events with this reason."""
        listed = self.cluster.kubectl(
            "get", "events", "-A", f"--field-selector=reason={reason}", "-o", "json"
        )
        return [it.get("message") or it.get("note", "") for it in json.loads(listed)["items"]]


GUARDED = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: guarded}
spec:
  selector: {matchLabels: {app: guarded}}
  template:
    metadata: {labels: {app: guarded}}
    spec:
      terminationGracePeriodSeconds: 0
      affinity:
        nodeAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
          - weight: 100
            preference:
              matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [NODE]}]
      containers:
      - {name: main, image: IMAGE, imagePullPolicy: Never, command: [sleep, "100000"]}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: guarded}
spec: {minAvailable: 1, selector: {matchLabels: {app: guarded}}}
""".replace("IMAGE", WORKLOAD)
"""A pod without cards that prefers a node, and may not be disrupted."""


@pytest.fixture
def scene(elastic: Elastic, namespace: str) -> Scene:
    """Provide a namespace without pods."""
    return Scene(elastic, namespace)


def test_nodes_are_bought_by_cards_when_pods_fit_others_by_sums_only(scene: Scene) -> None:
    """Five pods of 10 of 14 units need five cards. Eight leave 32 units, but 4 on each card."""
    four = Offer("four", cards="four", more={"max": 3})
    with scene.elastic.autoscaler([four]):
        names = [f"p{number}" for number in range(9)]
        scene.create(*(pod(name, 10) for name in names[:5]))
        scene.wait_for(*names[:5])
        assert scene.amounts() == [2]
        scene.create(*(pod(name, 10) for name in names[5:8]))
        scene.wait_for(*names[5:8])
        assert scene.amounts() == [2]
        scene.create(pod(names[8], 10))
        scene.wait_for(names[8])
        assert scene.amounts() == [2, 1]


def test_order_is_one_instance_when_the_autoscaler_is_killed_before_it_is_answered(
    scene: Scene,
) -> None:
    """The next one finds what has come of the order, or repeats it with the same token."""
    with scene.elastic.autoscaler([T4]):
        scene.cloud.hold("RunInstances", 60)
        scene.create(pod("p", 10))
        wait_until("the deed", lambda: scene.cloud.machines)
        scene.elastic.kill()
        scene.wait_for("p")
        assert len(scene.cloud.machines) == 1
        assert scene.amounts() == [1]
        (replica,) = scene.elastic.replicas()
        assert replica["status"]["containerStatuses"][0]["restartCount"] == 1


def test_order_is_one_instance_when_two_replicas_lead_for_a_moment(scene: Scene) -> None:
    """The first one stands still while it is answered, and goes on when the second one leads."""
    with scene.elastic.autoscaler([T4], replicas=2):
        scene.cloud.hold("RunInstances", 60)
        scene.create(pod("p", 10))
        wait_until("the deed", lambda: scene.cloud.machines)
        first = scene.elastic.leader()
        with scene.elastic.paused(first):
            wait_until("another leader", lambda: scene.elastic.leader() not in ("", first))
            scene.wait_for("p")
        # It goes on with what it was about to do.
        wait_until("its view of the lease", lambda: scene.elastic.is_ready(first))
        assert len(scene.cloud.machines) == 1
        assert scene.amounts() == [1]
        assert len(scene.elastic.orders()) == 1


def test_offers_are_tried_by_their_price_when_they_are_out_of_stock(scene: Scene) -> None:
    """The spot market in two zones, then on demand."""
    rules = {"spot": {"cap": 11.63, "admit": "all"}}
    spot = Offer("spot", zones=("g", "h"), capacity="spot", price=3.49, more=rules)
    with scene.elastic.autoscaler([spot, T4]):
        scene.cloud.change(spot, "g", stock=0)
        scene.cloud.change(spot, "h", stock=0, price=4.1)
        scene.create(pod("p", 10))
        scene.wait_for("p")
        tried = [
            (call.given["ZoneId"], call.given.get("SpotStrategy", "NoSpot"), call.status)
            for call in scene.cloud.launches()
        ]
        spot_market = "SpotWithPriceLimit"
        assert tried == [("g", spot_market, 403), ("h", spot_market, 403), ("g", "NoSpot", 200)]
        groups = scene.elastic.fenka("groups")
        assert groups.count("out of stock, again in") == 2


def test_pods_get_another_node_when_theirs_never_joins(scene: Scene) -> None:
    """It ends, its offer pauses, and an event says what was missing."""
    broken = Offer("broken", price=1.0, joins=False)
    with scene.elastic.autoscaler([broken, T4], start={"timeout": "25s"}):
        scene.create(pod("p", 10))
        scene.wait_for("p")
        assert scene.amounts() == [1, 1]
        (machine,) = scene.cloud.machines
        assert scene.node_of("p") == machine
        assert any("has not joined the cluster" in it for it in scene.events("FenkaNeverJoined"))


def test_nodes_stay_when_something_needs_them(scene: Scene) -> None:
    """A pod of the last second, a disruption budget, an operator's word; without these they end."""
    scale_in = {"delay": "20s", "cooldown": "1s"}
    with scene.elastic.autoscaler([T4], scaleIn=scale_in):
        names = ["a", "b", "c"]
        scene.create(*(pod(name, 14) for name in names))
        scene.wait_for(*names)
        late, guarded, kept = (scene.node_of(name) for name in names)
        scene.create(GUARDED.replace("NODE", guarded))
        wait_until("a pod with a budget", lambda: scene.node_of_app("guarded") == guarded)
        scene.cluster.kubectl("annotate", "node", kept, "fenka.io/keep=true")
        scene.cluster.kubectl("-n", scene.namespace, "delete", "pod", *names, "--now")
        wait_until("its taint", lambda: _is_ending(scene, late))
        # It names its node, so that the taint does not keep it away.
        scene.create(pod("last", 0, spec={"nodeName": late}))
        scene.wait_for("last")
        wait_until("the end of its taint", lambda: not _is_ending(scene, late))
        for node, why in ((kept, "fenka.io/keep"), (guarded, "disruption budget")):
            wait_until(why, partial(_is_kept, scene, node, why))
        assert len(scene.cloud.machines) == 3
        assert scene.cluster.get("pod", "last", scene.namespace)["status"]["phase"] == "Running"
        scene.cluster.kubectl("annotate", "node", kept, "fenka.io/keep-")
        scene.cluster.kubectl("-n", scene.namespace, "delete", "pdb,deployment", "--all")
        scene.cluster.kubectl("-n", scene.namespace, "delete", "pod", "last", "--now")
        scene.elastic.wait_for_no_nodes()


def _is_kept(scene: Scene, node: str, why: str) -> bool:
    status = scene.elastic.status(node)
    assert status.startswith("kept"), status
    assert why in status
    return True


def _is_ending(scene: Scene, node: str) -> bool:
    taints = scene.cluster.get("node", node)["spec"].get("taints", [])
    return any(taint["key"] == ENDING for taint in taints)


def test_nothing_is_bought_when_the_stock_is_less_than_a_gang(scene: Scene) -> None:
    """Three nodes would cost money and start nothing."""
    labels = {
        "scheduling.x-k8s.io/pod-group": "g",
        "pod-group.scheduling.sigs.k8s.io/min-available": "4",
    }
    with scene.elastic.autoscaler([T4]):
        scene.cloud.change(T4, stock=3)
        scene.create(*(pod(f"g{number}", 14, labels=labels) for number in range(4)))
        wait_until("the cloud's no", scene.cloud.launches)
        wait_until("the reason", lambda: scene.events("FenkaNoScaleOut"))
        assert [(call.amount, call.status) for call in scene.cloud.launches()] == [(4, 403)]
        assert scene.cloud.machines == []
        assert not any(scene.node_of(f"g{number}") for number in range(4))


def _bad_pods() -> list[str]:
    """Return pods whose requests nobody can serve, or read."""
    group = "scheduling.x-k8s.io/pod-group"
    members = "pod-group.scheduling.sigs.k8s.io/min-available"
    core = {"limits": {MEMORY: 4, "aliyun.com/gpu-core.percentage": 900}}
    texts = [
        pod("b-huge", 1_000_000),
        pod("b-many", 2**31 - 1, labels={"aliyun.com/gpu-count": "1024"}),
        pod("b-count", 4, labels={"aliyun.com/gpu-count": "-1"}),
        pod("b-gang", 14, labels={group: "g", members: "1000000"}),
        pod("b-members", 14, labels={group: "h", members: "many"}),
        pod(
            "b-mode",
            4,
            annotations={"fenka.io/core-mode": "x" * 4000, "fenka.io/interruptible": "?"},
        ),
        pod(
            "b-record", 4, annotations={"scheduler.framework.gpushare.allocation": '{"0":{"0":99}}'}
        ),
        pod("b-nowhere", 4, spec={"nodeSelector": {"fenka.io/group": "x"}}),
    ]
    shares = yaml.safe_load(pod("b-core", 4))
    shares["spec"]["containers"][0]["resources"] = core
    return [*texts, yaml.safe_dump(shares)]


def test_bad_requests_and_deaths_keep_nobody_from_nodes_and_leave_none(scene: Scene) -> None:
    """Bad pods first, then good ones of all sizes, while autoscaler and scheduler die."""
    four = Offer("four", cards="four", price=40.0, more={"max": 2})
    scale_in = {"delay": "10s", "cooldown": "1s"}
    sizes = {"g2": 2, "g5": 5, "g9": 9, "g13": 13, "g14": 14}
    with scene.elastic.autoscaler([T4, four], scaleIn=scale_in):
        for text in _bad_pods():
            with suppress(ClusterError):  # the API server's own validation may refuse one
                scene.create(text)
        scene.create(*(pod(name, units) for name, units in sizes.items()))
        wait_until("an order", scene.elastic.orders)
        scene.elastic.kill()
        (scheduler, *_) = scene.cluster.list(
            "pods", RELEASE, "app.kubernetes.io/component=scheduler"
        )
        scene.cluster.kubectl(
            *("-n", RELEASE, "delete", "pod", scheduler["metadata"]["name"]),
            *("--grace-period=0", "--force"),
        )
        scene.wait_for(*sizes)
        bad = scene.elastic.fenka("why", "b-huge", "-n", scene.namespace)
        assert "more than any card has" in bad, bad
        scene.cluster.kubectl("-n", scene.namespace, "delete", "pod", "--all", "--now")
        scene.elastic.wait_for_no_nodes(JOINS_S)


CHECKPOINTED = """
trap 'exit 143' TERM
step=$(cat /checkpoint/step 2>/dev/null || echo 0)
echo "begins at $step"
while true; do step=$((step + 1)); echo "step $step"; echo $step > /tmp/step; sleep 0.5 & wait $!; done
"""


def test_spot_job_goes_on_from_its_checkpoint_when_its_node_is_taken_back(scene: Scene) -> None:
    """An hour later the market is above the cap: preStop saves the step, and another node goes on."""
    spot = Offer("spot", capacity="spot", price=3.49, more={"spot": {"cap": 5.0}})
    folder = scene.cluster.state / "claims" / scene.namespace
    text = pod(
        "unused",
        10,
        command=CHECKPOINTED,
        annotations={"fenka.io/interruptible": "true"},
        spec={
            "terminationGracePeriodSeconds": 20,
            "restartPolicy": "Never",
            "volumes": [
                {
                    "name": "checkpoint",
                    "hostPath": {"path": str(folder), "type": "DirectoryOrCreate"},
                }
            ],
        },
    )
    template = yaml.safe_load(text)
    (container,) = template["spec"]["containers"]
    container["volumeMounts"] = [{"name": "checkpoint", "mountPath": "/checkpoint"}]
    save = ["sh", "-c", "cp /tmp/step /checkpoint/step"]
    container["lifecycle"] = {"preStop": {"exec": {"command": save}}}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "train"},
        "spec": {
            "backoffLimit": 3,
            "template": {
                "metadata": {"annotations": template["metadata"]["annotations"]},
                "spec": template["spec"],
            },
        },
    }
    with scene.elastic.autoscaler([spot, T4]):
        scene.create(yaml.safe_dump(job))
        first = _pod_of_job(scene)
        scene.wait_for(first)
        (taken,) = scene.cloud.machines
        wait_until("its work", lambda: "step 6" in _log(scene, first))
        scene.cloud.change(spot, price=12.0)
        scene.cloud.let_pass(3600)
        second = _pod_of_job(scene, other_than=first)
        scene.wait_for(second)
        assert scene.node_of(second) not in ("", taken)
        begins = int(_log(scene, second).splitlines()[0].rpartition(" ")[2])
        assert begins >= 6
        assert scene.events("FenkaReclaim")
        scene.cloud.let_pass(4200)
        wait_until("the end of the spot node", lambda: taken not in scene.elastic.nodes(), 120)


def _pod_of_job(scene: Scene, other_than: str = "") -> str:
    """Wait for a pod of the Job, and return its name."""
    names: list[str] = []

    def exists() -> bool:
        listed = scene.cluster.list("pods", scene.namespace, "job-name=train")
        names[:] = [it["metadata"]["name"] for it in listed if it["metadata"]["name"] != other_than]
        return bool(names)

    wait_until("a pod of the Job", exists, 120)
    return names[0]


def _log(scene: Scene, name: str) -> str:
    try:
        return scene.cluster.kubectl("-n", scene.namespace, "logs", name)
    except ClusterError:
        return ""
