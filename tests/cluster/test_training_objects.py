"""Objects of training jobs as API servers send them, and what is read from them."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.training_objects import (
    FOREIGN_INDEX_LABELS,
    FOREIGN_NAME_LABELS,
    FOREIGN_ROLE_LABELS,
    JOB,
    ROLE,
    BatchJob,
    ForeignJob,
    JobSet,
    Service,
    TrainingObjects,
    TrainingPod,
)
from tests.builders import Json
from tests.training_builders import batch_job, condition, foreign_job, job_set, member


def training_pod(*statuses: Json, **given_: Any) -> TrainingPod:
    """Return a worker of job j whose containers have these statuses."""
    made = member("j", "worker", **given_)
    made["status"]["containerStatuses"] = list(statuses)
    return msgspec.convert(made, TrainingPod)


def ended(name: str, code: int) -> Json:
    """Return the status of a container that has ended."""
    return {"name": name, "state": {"terminated": {"exitCode": code}}}


# ---- pods ----


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([], None),
        ([{"name": "main", "state": {"running": {}}}], None),
        ([{"name": "main", "state": {"waiting": {"reason": "ContainerCreating"}}}], None),
        # a status without a state: the kubelet has not reported one yet
        ([{"name": "main"}], None),
        ([ended("main", 0)], 0),
        ([ended("main", 137)], 137),
        # the program runs in the first container; a helper's end says nothing about it
        ([ended("helper", 3), {"name": "main", "state": {"running": {}}}], None),
        ([ended("helper", 3), ended("main", 0)], 0),
        # Go omits a zero
        ([{"name": "main", "state": {"terminated": {}}}], 0),
    ],
)
def test_exit_code_is_the_first_containers_when_it_has_ended(
    statuses: list[Json], expected: int | None
) -> None:
    """The API server lists statuses in any order."""
    assert training_pod(*statuses).exit_code == expected


def test_exit_code_is_the_programs_when_a_helper_has_ended_too() -> None:
    """Helpers such as TensorBoard are in containers after it."""
    made = member("j", "worker")
    made["spec"]["containers"] = [{"name": "train"}, {"name": "helper"}]
    made["status"]["containerStatuses"] = [ended("helper", 0), ended("train", 9)]
    pod = msgspec.convert(made, TrainingPod)
    assert (pod.main_container, pod.exit_code) == ("train", 9)


def test_exit_code_is_unknown_when_a_pod_has_no_container() -> None:
    """An object that no API server accepts is no reason to fail either."""
    pod = TrainingPod()
    assert (pod.main_container, pod.exit_code, pod.gone) == ("", None, False)


@pytest.mark.parametrize(
    ("name", "expected"), [("main", 1), ("code", 2), ("other", None), ("", None)]
)
def test_container_is_looked_up_among_init_containers_too(name: str, expected: int | None) -> None:
    """Logs can be read of any of them."""
    made = member("j", "worker")
    made["status"] |= {
        "containerStatuses": [{"name": "main", "restartCount": 1}],
        "initContainerStatuses": [{"name": "code", "restartCount": 2}],
    }
    pod = msgspec.convert(made, TrainingPod)
    status = pod.container(name)
    assert (status and status.restart_count) == expected


@pytest.mark.parametrize(("deleted", "expected"), [(None, False), ("2020-09-13T12:26:40Z", True)])
def test_pod_is_gone_when_it_is_being_deleted(deleted: str | None, expected: bool) -> None:
    """Until its grace period is over it still runs."""
    assert training_pod(deleted=deleted).gone is expected


def test_addresses_are_read_when_kubernetes_spells_them_with_capitals() -> None:
    """`podIP` is not what the rule of camel case makes of pod_ip."""
    pod = training_pod(status={"podIP": "10.1.2.3", "hostIP": "192.0.2.7"})
    assert (pod.status.pod_ip, pod.status.host_ip) == ("10.1.2.3", "192.0.2.7")


def test_started_is_unknown_when_the_kubelet_has_sent_null() -> None:
    """An init container that was never started differs from a sidecar that has not started yet."""
    pod = training_pod(
        {"name": "a", "started": None}, {"name": "b", "started": False}, {"name": "c"}
    )
    assert [each.started for each in pod.status.container_statuses] == [None, False, None]


# ---- roots ----


@pytest.mark.parametrize(
    ("namespace", "expected"),
    [
        ("default", "/apis/batch/v1/namespaces/default/jobs/j"),
        ("team-a", "/apis/batch/v1/namespaces/team-a/jobs/j"),
    ],
)
def test_path_is_the_jobs_when_the_root_is_a_job(namespace: str, expected: str) -> None:
    """It is patched and deleted there."""
    job = msgspec.convert(batch_job("j", "pytorch", "master", namespace=namespace), BatchJob)
    assert job.path == expected


def test_path_is_the_job_sets_when_the_root_is_a_job_set() -> None:
    """In another API group."""
    root = msgspec.convert(job_set("j", roles={"worker": 1}, namespace="team-a"), JobSet)
    assert root.path == "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team-a/jobsets/j"


@pytest.mark.parametrize(
    ("replicas", "parallelism", "expected"),
    [(1, 1, 1), (1, 3, 3), (2, 1, 2), (2, 3, 6), (0, 3, 0), (3, 0, 0)],
)
def test_role_counts_pods_of_all_its_jobs(replicas: int, parallelism: int, expected: int) -> None:
    """Each of the role's Jobs runs as many pods as its parallelism."""
    made = job_set("j", roles={"worker": parallelism})
    made["spec"]["replicatedJobs"][0]["replicas"] = replicas
    assert msgspec.convert(made, JobSet).roles == {"worker": expected}


def test_roles_are_in_the_order_of_the_spec() -> None:
    """Screens show the launcher first because the renderer writes it first."""
    root = msgspec.convert(job_set("j", roles={"launcher": 1, "worker": 4, "ps": 2}), JobSet)
    assert list(root.roles.items()) == [("launcher", 1), ("worker", 4), ("ps", 2)]
    assert JobSet().roles == {}


@pytest.mark.parametrize(("labels", "expected"), [({ROLE: "master"}, "master"), ({}, "main")])
def test_role_of_a_job_is_its_label_or_main(labels: dict[str, str], expected: str) -> None:
    """A Job that somebody labelled by hand may lack the role."""
    job = BatchJob()
    job.metadata.labels = {JOB: "j", **labels}
    assert job.roles == {expected: 1}


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        ([], ""),
        ([""], ""),
        (["urgent"], "urgent"),
        (["", "urgent"], "urgent"),
        # roles of one job have one class; if somebody changed that, the first one counts
        (["batch", "urgent"], "batch"),
    ],
)
def test_priority_class_is_the_first_roles_that_has_one(classes: list[str], expected: str) -> None:
    """A launcher without a card may have none."""
    made = job_set("j", roles={f"r{number}": 1 for number in range(len(classes))})
    for job, name in zip(made["spec"]["replicatedJobs"], classes, strict=True):
        job["template"]["spec"]["template"]["spec"]["priorityClassName"] = name
    assert msgspec.convert(made, JobSet).priority_class == expected


def test_priority_class_of_a_job_is_its_templates() -> None:
    """Empty without one."""
    job = batch_job("j", "pytorch", "master", priority="urgent")
    assert msgspec.convert(job, BatchJob).priority_class == "urgent"
    assert BatchJob().priority_class == ""


@pytest.mark.parametrize("suspended", [True, False])
def test_suspension_is_read_of_both_kinds_of_roots(suspended: bool) -> None:
    """The default is that of the API."""
    job = batch_job("j", "pytorch", "master", suspend=suspended)
    root = job_set("j", roles={}, suspend=suspended)
    assert msgspec.convert(job, BatchJob).spec.suspend is suspended
    assert msgspec.convert(root, JobSet).spec.suspend is suspended
    assert not BatchJob().spec.suspend
    assert not JobSet().spec.suspend


def test_roots_are_read_when_the_server_knows_more_fields() -> None:
    """Newer servers send fields of which this version knows nothing."""
    made = job_set("j", roles={"worker": 2}, conditions=[condition("Completed", 60, "done")])
    made["spec"] |= {"network": {"enableDNSHostnames": True}, "startupPolicy": {}}
    made["spec"]["replicatedJobs"][0]["dependsOn"] = [{"name": "x", "status": "Ready"}]
    root = msgspec.json.decode(msgspec.json.encode(made), type=JobSet)
    (ending,) = root.status.conditions or ()
    assert root.roles == {"worker": 2}
    assert (ending.type, ending.message) == ("Completed", "done")
    assert ending.last_transition_time == "2020-09-13T12:27:40Z"


# ---- other operators ----


def foreign(item: Json) -> ForeignJob:
    """Return a job of another operator as the API server's answer has it."""
    return msgspec.json.decode(msgspec.json.encode(item), type=ForeignJob)


@pytest.mark.parametrize("kind", ["MPIJob", "TFJob", "PyTorchJob", "TrainJob"])
def test_foreign_job_is_read_when_its_kind_is_known(kind: str) -> None:
    """With conditions, with null for them, and without a status."""
    for conditions, expected in [([condition("Running")], 1), (list[Json](), 0)]:
        job = foreign(foreign_job("j", kind, conditions))
        assert (job.kind, len(job.status.conditions or ())) == (kind, expected)
    assert foreign(foreign_job("j", kind, None)).status.conditions is None
    bare = {"kind": kind, "metadata": {"name": "j"}}
    assert foreign(bare).status.conditions is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "CronJob"},
        {"kind": "mpijob"},
        {},
        {"kind": "MPIJob", "status": "Running"},
        {"kind": "MPIJob", "status": {"conditions": "Running"}},
        {"kind": "MPIJob", "status": {"conditions": [{"type": 7}]}},
        {"kind": "MPIJob", "status": {"launcherStatus": {"active": 1}}},
        {"kind": "MPIJob", "status": {"completionTime": 1600000000}},
        {"kind": "MPIJob", "metadata": []},
    ],
)
def test_foreign_job_is_refused_when_its_fields_have_wrong_types(wrong: Json) -> None:
    """Some versions of these kinds accept any status: the reader leaves such a job out."""
    with pytest.raises(msgspec.ValidationError):
        foreign(wrong)


def test_launcher_status_is_read_when_the_version_is_v1alpha1() -> None:
    """It has no conditions."""
    made = foreign_job("j", "MPIJob", None, status={"launcherStatus": "Active"})
    made["status"]["completionTime"] = "2020-09-13T12:26:40Z"
    status = foreign(made).status
    assert (status.launcher_status, status.completion_time) == ("Active", "2020-09-13T12:26:40Z")


def test_labels_of_operators_are_distinct_when_one_pod_has_several() -> None:
    """Each table is in order of trust: the operator's own label comes before a chart's."""
    for labels in (*FOREIGN_NAME_LABELS.values(), FOREIGN_ROLE_LABELS, FOREIGN_INDEX_LABELS):
        assert len(set(labels)) == len(labels)
        assert JOB not in labels
    for kind in ("MPIJob", "TFJob", "PyTorchJob"):
        assert FOREIGN_NAME_LABELS[kind][0] == "training.kubeflow.org/job-name"
        assert FOREIGN_NAME_LABELS[kind][-1] == "release"


# ---- Services and one reading ----


def test_node_port_is_read_when_a_service_has_one() -> None:
    """A Service of type ClusterIP has none."""
    made = {
        "metadata": {"name": "j"},
        "spec": {"type": "NodePort", "ports": [{"port": 6006, "nodePort": 30123}, {"port": 80}]},
    }
    service = msgspec.convert(made, Service)
    assert service.spec.type == "NodePort"
    assert [(each.port, each.node_port) for each in service.spec.ports] == [(6006, 30123), (80, 0)]


def test_objects_of_one_reading_are_its_own() -> None:
    """A second reading does not add to the lists of the first."""
    first, second = TrainingObjects(), TrainingObjects()
    first.pods.append(TrainingPod())
    assert second.pods == []
    assert second.nodes == []


@given(
    st.dictionaries(
        st.from_regex(r"[a-z]([a-z0-9-]{0,9}[a-z0-9])?", fullmatch=True),
        st.tuples(st.integers(0, 9), st.integers(0, 200)),
        max_size=5,
    )
)
def test_number_of_pods_is_that_of_the_jobs_that_job_set_makes(
    roles: dict[str, tuple[int, int]],
) -> None:
    """For any roles: as many pods as indexes of all Jobs, which are named ROLE-JOB-INDEX."""
    made = job_set("j", roles={name: parallelism for name, (_, parallelism) in roles.items()})
    for job in made["spec"]["replicatedJobs"]:
        job["replicas"] = roles[job["name"]][0]
    names = [
        f"j-{role}-{number}-{index}"
        for role, (replicas, parallelism) in roles.items()
        for number in range(replicas)
        for index in range(parallelism)
    ]
    root = msgspec.convert(made, JobSet)
    assert sum(root.roles.values()) == len(names)
    assert list(root.roles) == list(roles)
