"""Services of a cluster: what their replicas request, from one reading of its objects."""

import msgspec

from fenka.cluster.service_objects import SERVICE, TYPE, VERSION, ServiceObjects, ServingDeployment
from fenka.cluster.training_objects import TrainingPod
from fenka.dialects import ack, gpushare
from fenka.views.cluster_workloads import service_versions
from tests.builders import pod


def test_replica_requests_units_compute_and_processors() -> None:
    """arena's readers know these."""
    labels = {SERVICE: "bert", VERSION: "v1", TYPE: "custom-serving"}
    deployment = {"metadata": {"name": "bert-v1", "namespace": "default", "labels": labels}}
    replica = pod("bert-v1-x", {gpushare.MEMORY: 4, ack.CORE: 30, "cpu": "500m"}, labels=labels)
    objects = ServiceObjects(
        versions=[msgspec.convert(deployment, ServingDeployment)],
        pods=[msgspec.convert(replica, TrainingPod)],
    )
    (version,) = service_versions(objects, 0)
    (shown,) = version.instances
    assert (shown.memory_units, shown.compute, shown.cpus) == (4, 30, 0.5)
