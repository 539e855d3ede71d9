"""States of pods in kubectl's words."""

import msgspec
import pytest

from fenka.cluster.training_objects import TrainingPod, status_word
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


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (None, "Init:0/1"),
        ({"type": "Initialized", "status": "False"}, "Init:0/1"),
        ({"type": "Initialized", "status": "Unknown"}, "Init:0/1"),
        # an init container that the kubelet starts again after all have completed says nothing
        ({"type": "Initialized", "status": "True"}, "Running"),
        ({"type": "Ready", "status": "True"}, "Init:0/1"),
    ],
)
def test_status_word_is_the_containers_once_the_pod_is_initialized(
    condition: Json | None, expected: str
) -> None:
    """One init container runs."""
    status = {
        "phase": "Running",
        "initContainerStatuses": containers(RUNS),
        "conditions": [condition] if condition else [],
    }
    assert word(status, spec={"initContainers": [{"name": "c0"}]}) == expected


@pytest.mark.parametrize(
    ("policies", "started", "expected"),
    [
        # a sidecar that has started is passed over
        (["Always", None], [True, None], "Init:1/2"),
        # before, it is what the pod waits for
        (["Always", None], [False, None], "Init:0/2"),
        (["Always", None], [None, None], "Init:0/2"),
        # `started` of an init container that is no sidecar means only that it runs
        ([None, None], [True, None], "Init:0/2"),
        ([None, "Always"], [True, True], "Init:0/2"),
        (["Always", "Always"], [True, False], "Init:1/2"),
        (["Always", "Always"], [True, True], "Running"),
    ],
)
def test_status_word_passes_over_started_sidecars_only(
    policies: list[str | None], started: list[bool | None], expected: str
) -> None:
    """Two init containers, both running."""
    spec: Json = {
        "initContainers": [
            {"name": f"c{number}", "restartPolicy": policy}
            for number, policy in enumerate(policies)
        ]
    }
    statuses = containers(RUNS, RUNS)
    for status, value in zip(statuses, started, strict=True):
        status["started"] = value
    assert word({"phase": "Running", "initContainerStatuses": statuses}, spec=spec) == expected


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("SchedulingGated", "SchedulingGated"),
        ("Unschedulable", "Pending"),
        ("", "Pending"),
    ],
)
def test_status_word_names_a_gate_only_when_the_condition_does(reason: str, expected: str) -> None:
    """Other reasons of PodScheduled are shown elsewhere."""
    scheduled = {"type": "PodScheduled", "status": "False", "reason": reason}
    assert word({"phase": "Pending", "conditions": [scheduled]}) == expected


@pytest.mark.parametrize(
    ("states", "ready", "expected"),
    [
        ([COMPLETED, RUNS], "True", "Running"),
        ([COMPLETED, RUNS], "False", "NotReady"),
        ([COMPLETED, RUNS], None, "NotReady"),
        ([COMPLETED, COMPLETED], "True", "Completed"),
        # a container that has failed counts although another one runs
        ([{"terminated": {"exitCode": 1, "reason": "Error"}}, RUNS], "True", "Error"),
        ([RUNS, {"waiting": {"reason": "CrashLoopBackOff"}}], "True", "CrashLoopBackOff"),
        # the first word counts
        ([{"waiting": {"reason": "ImagePullBackOff"}}, COMPLETED], None, "ImagePullBackOff"),
        ([RUNS, RUNS], "True", "Running"),
        # a container that waits without a reason says nothing
        ([{"waiting": {}}], None, "Running"),
        ([{}], None, "Running"),
    ],
)
def test_status_word_is_the_first_container_s_that_has_one(
    states: list[Json], ready: str | None, expected: str
) -> None:
    """The phase is Running."""
    conditions = [{"type": "Ready", "status": ready}] if ready else []
    status = {"phase": "Running", "containerStatuses": containers(*states)}
    assert word({**status, "conditions": conditions}) == expected


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"waiting": {"reason": "PodInitializing"}}, "Init:0/1"),
        ({"waiting": {}}, "Init:0/1"),
        ({}, "Init:0/1"),
        ({"waiting": {"reason": "CrashLoopBackOff"}}, "Init:CrashLoopBackOff"),
        ({"terminated": {"exitCode": 0}}, "Pending"),
        ({"terminated": {"exitCode": 2}}, "Init:ExitCode:2"),
        ({"terminated": {"exitCode": 137, "signal": 9}}, "Init:Signal:9"),
        # a reason says more than the signal
        ({"terminated": {"exitCode": 137, "signal": 9, "reason": "OOMKilled"}}, "Init:OOMKilled"),
    ],
)
def test_status_word_has_the_init_containers_reason_when_it_does_not_run(
    state: Json, expected: str
) -> None:
    """Only one init container."""
    status = {"phase": "Pending", "initContainerStatuses": containers(state)}
    assert word(status, spec={"initContainers": [{"name": "c0"}]}) == expected
