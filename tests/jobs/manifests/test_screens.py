"""The screens read what the renderer writes: roles, instances, cards, chief, TensorBoard."""

import msgspec
import pytest

from fenka.cluster.objects import Node
from fenka.cluster.training_objects import (
    COMPLETION_INDEX,
    BatchJob,
    JobSet,
    Root,
    Service,
    TrainingObjects,
    TrainingPod,
)
from fenka.jobs.manifests.training_manifest import Rendered
from fenka.views.cluster_workloads import training_jobs
from fenka.views.workloads import TrainingJob
from tests.builders import Json, sharing
from tests.jobs.manifests.trainings import rendered_all

NOON = "2024-01-01T12:00:00Z"


def read(rendered: Rendered) -> TrainingJob:
    """Return the job as it is shown when all of its pods run."""
    placed = {"namespace": "default", "creationTimestamp": NOON}
    root, kind = rendered.root, rendered.root["kind"]
    type_: type[Root] = JobSet if kind == "JobSet" else BatchJob
    pods = [pod for job in rendered.role_jobs for pod in _pods(job)]
    services = [
        each | {"metadata": each["metadata"] | placed}
        for each in rendered.dependents
        if each["kind"] == "Service"
    ]
    for service in services:
        for port in service["spec"].get("ports", ()):
            port["nodePort"] = 31000
    objects = TrainingObjects(
        [msgspec.convert(root | {"metadata": root["metadata"] | placed}, type_)],
        pods=msgspec.convert(pods, list[TrainingPod]),
        services=msgspec.convert(services, list[Service]),
        nodes=msgspec.convert([sharing("a")], list[Node]),
    )
    (job,) = training_jobs(objects, 0)
    return job


def _pods(job: Json) -> list[Json]:
    """Return the pods that the Job's controller makes, on node a."""
    template = job["spec"]["template"]
    return [
        {
            "metadata": {
                **template["metadata"],
                "name": f"{job['metadata']['name']}-{index}-abcde",
                "namespace": "default",
                "uid": f"{job['metadata']['name']}-{index}",
                "creationTimestamp": NOON,
                "labels": {**template["metadata"]["labels"], COMPLETION_INDEX: str(index)},
            },
            "spec": {**template["spec"], "nodeName": "a"},
            "status": {"phase": "Running"},
        }
        for index in range(job["spec"]["completions"])
    ]


@pytest.mark.parametrize(
    ("training", "trainer", "instances", "cards"),
    [
        ("mpi", "mpijob", ["mpi-dist-launcher-0", "mpi-dist-worker-0", "mpi-dist-worker-1"], 2),
        (
            "tensorflow",
            "tfjob",
            [
                "tf-dist-chief-0",
                "tf-dist-worker-0",
                "tf-dist-worker-1",
                "tf-dist-ps-0",
                "tf-dist-evaluator-0",
            ],
            # 2 units of 14, and two workers with 4 units on each of 2 cards: 0.1 + 2 * 0.6
            1.3,
        ),
        (
            "pytorch",
            "pytorchjob",
            ["torch-dist-master-0", "torch-dist-worker-0", "torch-dist-worker-1"],
            0.9,
        ),
        ("alone", "pytorchjob", ["alone-master-0"], 0.3),
        ("indexed", "pytorchjob", ["equal-master-0", "equal-worker-0"], 0),
    ],
)
def test_rendered_job_is_shown_with_its_instances_and_cards(
    training: str, trainer: str, instances: list[str], cards: float
) -> None:
    """It runs when all pods of its Jobs do; the first instance is the chief."""
    job = read(rendered_all()[training])
    assert (job.status, job.trainer) == ("RUNNING", trainer)
    assert [each.name for each in job.instances] == instances
    assert [each.chief for each in job.instances] == [True] + [False] * (len(instances) - 1)
    assert (job.requested, job.allocated) == (cards, cards)


def test_rendered_tensorboard_is_shown_with_its_address() -> None:
    """Its Service's port on a node."""
    assert read(rendered_all()["tensorflow"]).tensorboard == "http://10.0.0.1:31000"


def test_rendered_priority_class_is_shown() -> None:
    """A class of the user's, or the chart's for backfill."""
    assert read(rendered_all()["alone"]).priority == "high"
    assert read(rendered_all()["pytorch"]).priority == "fenka-backfill"
