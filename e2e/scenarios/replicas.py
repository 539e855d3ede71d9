"""Find the replicas of the extender, and wait until they are ready."""

from e2e.cluster import Cluster, wait_until
from e2e.scenarios.installation import RELEASE
from e2e.scenarios.virtual_nodes import Json


def replicas(cluster: Cluster) -> list[Json]:
    """Return the extender's pods that are not being deleted."""
    pods = cluster.list("pods", RELEASE, "app.kubernetes.io/component=scheduler")
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def is_ready(pod: Json) -> bool:
    """Return whether the pod's Ready condition is true."""
    conditions = {
        condition["type"]: condition["status"] for condition in pod["status"].get("conditions", [])
    }
    return conditions.get("Ready") == "True"


def wait_for_replicas(cluster: Cluster) -> None:
    """Wait until both replicas are ready."""

    def both() -> bool:
        pods = replicas(cluster)
        states = {
            pod["metadata"]["name"]: (pod["spec"].get("nodeName"), pod["status"]) for pod in pods
        }
        assert len(pods) == 2, states
        assert all(map(is_ready, pods)), states
        return True

    wait_until("two ready replicas", both, 180)


def leader(cluster: Cluster) -> Json:
    """Return the pod of the leading replica."""
    holder = cluster.get("lease", "fenka-scheduler", RELEASE)["spec"]["holderIdentity"]
    return cluster.get("pod", holder.rpartition("_")[0], RELEASE)
