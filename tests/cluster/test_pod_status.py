"""States of pods in kubectl's words."""

import msgspec
import pytest

from fenka.cluster.pod_status import status_word
from fenka.cluster.training_objects import TrainingPod
from tests.builders import Json, pod


def word(status: Json, *, spec: Json | None = None, deleted: bool = False) -> str:
    """Return the word for a pod with this status."""
    made = pod("p", node="a", status=status, spec=spec or {})
    made["metadata"]["deletionTimestamp"] = "2020-01-01T00:00:00Z" if deleted else None
    return status_word(msgspec.convert(made, TrainingPod))


def containers(*states: Json, **fields: object) -> list[Json]:
    """Return statuses of containers in these states."""
    return [
        {"name": f"c{number}", "state": state, "started": None, **fields}
        for number, state in enumerate(states)
    ]


RUNS: Json = {"running": {}}
COMPLETED: Json = {"terminated": {"exitCode": 0, "reason": "Completed"}}
TWO_INITS: Json = {"initContainers": [{"name": "c0"}, {"name": "c1"}]}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"phase": "Running"}, "Running"),
        ({"phase": ""}, "Unknown"),
        ({"phase": "Failed", "reason": "Evicted"}, "Evicted"),
        (
            {
                "phase": "Pending",
                "containerStatuses": containers({"waiting": {"reason": "ContainerCreating"}}),
            },
            "ContainerCreating",
        ),
        ({"phase": "Succeeded", "containerStatuses": containers(COMPLETED)}, "Completed"),
        (
            {
                "phase": "Failed",
                "containerStatuses": containers(
                    {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
                ),
            },
            "OOMKilled",
        ),
        (
            {
                "phase": "Failed",
                "containerStatuses": containers({"terminated": {"exitCode": 137, "signal": 9}}),
            },
            "Signal:9",
        ),
        (
            {"phase": "Failed", "containerStatuses": containers({"terminated": {"exitCode": 7}})},
            "ExitCode:7",
        ),
        ({"phase": "Running", "containerStatuses": containers(RUNS, COMPLETED)}, "NotReady"),
        (
            {
                "phase": "Running",
                "containerStatuses": containers(RUNS, COMPLETED),
                "conditions": [{"type": "Ready", "status": "True"}],
            },
            "Running",
        ),
        (
            {
                "phase": "Pending",
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
                ],
            },
            "SchedulingGated",
        ),
    ],
)
def test_status_word_is_kubectls(status: Json, expected: str) -> None:
    """The first container that says more than the phase counts."""
    assert word(status) == expected


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([RUNS, {"waiting": {"reason": "PodInitializing"}}], "Init:0/2"),
        ([COMPLETED, RUNS], "Init:1/2"),
        ([{"waiting": {"reason": "ImagePullBackOff"}}], "Init:ImagePullBackOff"),
        ([{"terminated": {"exitCode": 128}}], "Init:ExitCode:128"),
        ([{"terminated": {"exitCode": 1, "reason": "Error"}}], "Init:Error"),
        ([COMPLETED, COMPLETED], "Pending"),
    ],
)
def test_status_word_counts_init_containers(states: list[Json], expected: str) -> None:
    """While the code is cloned: `Init:0/1`."""
    status = {"phase": "Pending", "initContainerStatuses": containers(*states)}
    assert word(status, spec=TWO_INITS) == expected


def test_status_word_ignores_sidecars_that_have_started() -> None:
    """They go on beside the containers."""
    spec: Json = {"initContainers": [{"name": "c0", "restartPolicy": "Always"}]}
    status = {"phase": "Running", "initContainerStatuses": containers(RUNS, started=True)}
    assert word(status, spec=spec) == "Running"


def test_status_word_says_when_a_pod_is_being_deleted() -> None:
    """A pod that has ended keeps its own word; that of a lost node is unknown."""
    assert word({"phase": "Running"}, deleted=True) == "Terminating"
    assert word({"phase": "Running", "reason": "NodeLost"}, deleted=True) == "Unknown"
    finished = {"phase": "Succeeded", "containerStatuses": containers(COMPLETED)}
    assert word(finished, deleted=True) == "Completed"
